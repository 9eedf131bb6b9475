// Calls each verb of the JavaScript client as an author would, and each error on purpose.
// node checks.mjs HOST PORT CHECK TOKEN [tls]

import assert from "node:assert/strict"

import * as bus from "../../../examples/clients/javascript/envbus.mjs"

const [host, port, what, token, tls] = process.argv.slice(2)
const url = `${tls ? "streams" : "stream"}://${host}:${port}`
const OBSERVATION = [0, 0.5, -1, 2]
const SILENCE = [99, 0, 0, 0], FAILURE = [98, 0, 0, 0], HELD = [97, 0, 1, 0]

const checks = {
  async single() {
    const client = await bus.Client.connect(url, { name: "checks", token })
    assert.equal(client.bridge.multi_agent, false)
    assert.deepEqual(client.bridge.policy_ids, ["default_policy"])
    assert.equal(client.bridge.observation_space.space, "Box")

    const own = await client.startEpisode({ episodeId: "own" })
    assert.equal(own, "own")
    await assert.rejects(client.startEpisode({ episodeId: "own" }), bus.EpisodeAlreadyStartedError)
    assert.equal(await client.getAction(own, OBSERVATION), 0)
    await client.logReturns(own, 1.5, { info: { level: "é", lives: [3, -70000, 2 ** 40, null, true] } })
    await client.logReturns(own, 2)
    assert.equal(await client.getAction(own, new Float32Array([0, 0, 1, 0])), 1)
    await client.logAction(own, OBSERVATION, 1)
    await client.logReturns(own, -0.25)
    await client.endEpisode(own, OBSERVATION)
    await assert.rejects(client.getAction(own, OBSERVATION), bus.EpisodeFinishedError)
    await assert.rejects(client.startEpisode({ episodeId: "own" }), bus.EpisodeFinishedError)
    await assert.rejects(client.getAction("strange", OBSERVATION), bus.EpisodeNotFoundError)

    const cut = await client.startEpisode({ episodeId: "cut", trainingEnabled: false })
    await assert.rejects(client.getAction(cut, [1, 2, 3]), bus.SpaceMismatchError)
    await assert.rejects(client.logAction(cut, OBSERVATION, 2), /expected Discrete\(2\)/)
    await assert.rejects(client.getAction(cut, SILENCE, { timeout: 200 }), bus.TimeoutError)
    await assert.rejects(client.getAction(cut, FAILURE), (error) =>
      error instanceof bus.RemoteError && /ArithmeticError: the policy fails/.test(error.message))
    assert.equal(await client.getAction(cut, OBSERVATION), 0)
    await client.endEpisode(cut, OBSERVATION, { truncated: true })

    const many = await Promise.all(Array.from({ length: 20 }, () => client.startEpisode()))
    assert.equal(new Set(many).size, 20)
    const sign = (i) => (i % 2 ? 1 : -1)
    const actions = await Promise.all(many.map((id, i) => client.getAction(id, [0, 0, sign(i), 0])))
    assert.deepEqual(actions, many.map((_, i) => (i % 2 ? 1 : 0)))
    await Promise.all(many.map((id) => client.endEpisode(id, OBSERVATION)))

    client.close()
    await assert.rejects(client.startEpisode(), bus.ConnectionLostError)
  },

  async agents() {
    const client = await bus.Client.connect(url, { token })
    assert.equal(client.bridge.multi_agent, true)
    const episode = await client.startEpisode({ episodeId: "team" })
    const both = { left: [0, 0, 1, 0], right: [0, 0, -1, 0] }
    assert.deepEqual(await client.getAction(episode, both), { left: 1, right: 0 })
    await client.logReturns(episode, { left: 1, right: 2 }, {
      info: { left: { hit: true } }, terminateds: { left: true },
    })
    assert.deepEqual(await client.getAction(episode, { right: both.right }), { right: 0 })
    await client.logReturns(episode, { right: 4 })
    await client.endEpisode(episode, { right: both.right }, { truncateds: { right: true } })
    await assert.rejects(client.startEpisode().then((id) => client.getAction(id, [1])),
      bus.SpaceMismatchError)
    client.close()
  },

  // The gateway is killed when "ready" is printed: the question that is in flight is asked again.
  async reconnect() {
    const client = await bus.Client.connect(url, { token })
    const episode = await client.startEpisode({ episodeId: "survivor" })
    await client.getAction(episode, OBSERVATION)
    const waiting = client.getAction(episode, HELD)
    console.log("ready")
    assert.equal(await waiting, 1)
    await client.logReturns(episode, 3)
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    assert.deepEqual(client.bridge.episodes, ["survivor"])
    await client.endEpisode(episode, OBSERVATION)
    client.close()
  },

  // Hangs for longer than the bridge bears: the client is forgotten, comes back, and goes on.
  async pause() {
    const client = await bus.Client.connect(url, { token, heartbeat: 200 })
    const episode = await client.startEpisode({ episodeId: "sleeper" })
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1900)
    await client.logReturns(episode, 3)
    await new Promise((resolve) => setTimeout(resolve, 1200)) // heartbeats go on by themselves
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    await client.endEpisode(episode, OBSERVATION)
    client.close()
  },

  // Is busy until its time is over, while the answer comes: it says that it did not take the action.
  async late() {
    const client = await bus.Client.connect(url, { token })
    const episode = await client.startEpisode({ episodeId: "late" })
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    const rejected = assert.rejects(
      client.getAction(episode, OBSERVATION, { timeout: 300 }), bus.TimeoutError)
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1500)
    await rejected
    await client.logReturns(episode, 5)
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    await client.logReturns(episode, 1)
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    await client.endEpisode(episode, OBSERVATION)
    client.close()
  },

  // The first rewards never come: the step that they are of is no row.
  async lost() {
    const client = await bus.Client.connect(url, { token, timeout: 3000 }) // to connect, too
    const episode = await client.startEpisode({ episodeId: "lost" })
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    await assert.rejects(client.logReturns(episode, 5), bus.TimeoutError)
    await client.logReturns(episode, 1)
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    await client.endEpisode(episode, OBSERVATION)
    client.close()
  },

  // The connection is lost with the first rewards, and the caller goes on with its own values meanwhile.
  async changed() {
    const client = await bus.Client.connect(url, { token })
    const episode = await client.startEpisode({ episodeId: "changed" })
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    const info = { position: new Float32Array([1]) }
    const told = client.logReturns(episode, 5, { info })
    info.position.fill(99)
    await told
    await client.endEpisode(episode, OBSERVATION)
    client.close()
  },

  // The bridge is stopped when "ready" is printed: who waits is told at once.
  async stopped() {
    const client = await bus.Client.connect(url, { token })
    const waiting = client.getAction(await client.startEpisode(), SILENCE)
    console.log("ready")
    await assert.rejects(waiting, bus.ConnectionLostError)
    const late = client.getAction("late", OBSERVATION, { timeout: 500 })
    await assert.rejects(late, bus.ConnectionLostError)
    client.close()
  },

  // The bridge is killed when "ready" is printed, and another one is at its address.
  async replaced() {
    const client = await bus.Client.connect(url, { token })
    const waiting = client.getAction(await client.startEpisode(), SILENCE)
    console.log("ready")
    await assert.rejects(waiting, bus.EpisodeNotFoundError)
    const episode = await client.startEpisode({ episodeId: "next" })
    assert.equal(await client.getAction(episode, OBSERVATION), 0)
    await client.endEpisode(episode, OBSERVATION)
    client.close()
  },

  async refused() {
    await assert.rejects(bus.Client.connect(url), bus.RefusedError, "without a token")
    await assert.rejects(bus.Client.connect(url, { token: "guess" }), /the token is wrong/)
    const nobody = "stream://127.0.0.1:1", timeout = 500 // for so long it would wait for a bridge
    await assert.rejects(bus.Client.connect(nobody, { timeout }), bus.ConnectionLostError)
  },

  // Pictures of 320 x 240 as bytes and as numbers; and what is over the gateway's limit.
  async large() {
    const client = await bus.Client.connect(url, { token })
    const episode = await client.startEpisode({ episodeId: "pictures" })
    assert.equal(await client.getAction(episode, new Uint8Array(240 * 320 * 3).fill(200)), 0)
    await assert.rejects(client.logReturns(episode, 1, { info: { text: "x".repeat(5_000_000) } }), (error) =>
      error instanceof bus.MessageTooLargeError
        && /LogReturns: a message of 5000\d\d\d bytes is over the gateway's limit of 4194304/.test(error.message))
    assert.equal(await client.getAction(episode, Array(240).fill(Array(320).fill([255, 128, 0]))), 0)
    await client.endEpisode(episode, new Uint8ClampedArray(240 * 320 * 3))
    client.close()
  },

  // Who is there sends what cannot be read, and leaves the connection open: the program ends all the same.
  async nonsense() {
    await assert.rejects(bus.Client.connect(url), (error) =>
      error instanceof bus.RefusedError && /sent what cannot be read/.test(error.message))
  },

  // Who is there announces 4 GB and sends without end.
  async huge() {
    await assert.rejects(bus.Client.connect(url), bus.RefusedError)
  },

  // Who is there sends late answers without end.
  async flood() {
    // Time enough to connect on a busy machine.
    await assert.rejects(bus.Client.connect(url, { timeout: 2000 }), bus.ConnectionLostError)
  },

  // Who is there fails the first request with an error whose name all objects have.
  async failure() {
    await assert.rejects(bus.Client.connect(url), (error) =>
      error instanceof bus.RemoteError && error.message === "toString: as told")
  },

  // Who is there answers the first request with nil.
  async nil() {
    await assert.rejects(bus.Client.connect(url), bus.RefusedError)
  },

  // Who is there says nothing, before or after TLS, or too slowly: the program ends all the same.
  async mute() {
    await assert.rejects(bus.Client.connect(url, { timeout: 500 }), (error) =>
      error instanceof bus.TimeoutError || error instanceof bus.ConnectionLostError)
  },

  // Nobody is there, which is thrown where it has no listener (the package ws), and no close follows (Node 22):
  // it is tried again. Then one that takes what is sent for the beginning of a chat.
  async websocket() {
    let tries = 0
    class Refused {
      constructor() {
        tries++
        this.readyState = 0
        setTimeout(() => {
          this.readyState = 3
          if (!this.onerror) throw new Error("an error without a listener")
          this.onerror({ message: "nobody is there" })
        })
      }
    }
    await assert.rejects(
      bus.Client.connect("ws://127.0.0.1:1", { timeout: 500, WebSocket: Refused }), bus.ConnectionLostError)
    assert.ok(tries > 1)

    class Chat {
      constructor() {
        this.readyState = 1
        setTimeout(() => this.onopen({}))
      }
      send() { setTimeout(() => this.onmessage({ data: "99999999999999999" })) }
      close() { setTimeout(() => this.onclose({ reason: "", code: 1000 })) }
    }
    await assert.rejects(
      bus.Client.connect("ws://127.0.0.1:1", { timeout: 5000, WebSocket: Chat }), bus.RefusedError)

    // As the package ws, with a server that does not take part in closing.
    let terminated
    const end = new Promise((resolve) => { terminated = resolve })
    class Mute extends Chat {
      send() {}
      close() {}
      terminate() { terminated() }
    }
    await assert.rejects(
      bus.Client.connect("ws://127.0.0.1:1", { timeout: 200, WebSocket: Mute }), bus.ConnectionLostError)
    const awake = setInterval(() => {}, 100)
    await end
    clearInterval(awake)
  },

  // Without NODE_EXTRA_CA_CERTS; nothing is waited for.
  async untrusted() {
    await assert.rejects(bus.Client.connect(url, { token }), bus.RefusedError)
  },

  messagepack() {
    const values = [
      null, true, false, 0, 127, 128, -1, -32, -33, 65535, 2 ** 31, -(2 ** 31) - 1, 2 ** 53 - 1, 0.1,
      -1e300, Infinity, 2n ** 60n, -(2n ** 63n), 2n ** 64n - 1n, "", "ü".repeat(20), "x".repeat(70000), new Uint8Array(300),
      Array(20).fill([1]), Array(70000).fill(0), {}, JSON.parse('{"__proto__": {"polluted": 1}}'),
      Object.fromEntries(Array.from({ length: 20 }, (_, i) => [`key${i}`, i])),
    ]
    for (const value of values) assert.deepEqual({ ...bus.decode(bus.encode({ value })) }, { value })
    assert.ok(Object.is(bus.decode(bus.encode(-0)), -0))
    for (const value of [2n ** 64n, -(2n ** 63n) - 1n]) assert.throws(() => bus.encode(value), bus.EnvbusError)
    assert.throws(() => bus.decode(new Uint8Array([0xc7, 1, 2, 3])), bus.EnvbusError)
    assert.equal({}.polluted, undefined)
  },
}

await checks[what]()
console.log(`passed: ${what}`)
