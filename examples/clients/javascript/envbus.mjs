// A client of an envbus bridge: a simulator drives itself and asks for actions.
//
// One module without dependencies, for Node (20 or newer) over plain TCP or WebSocket, and for
// browsers over WebSocket. README.md shows how to use it; docs/wire-protocol.md, sections 10 and
// 11, is what it speaks.

const REQUEST = 0, REPLY = 1, FAILURE = 2, NOTICE = 3
const MAX_BYTES = 2 ** 30 // of a message from a bridge
const LINGER = 1000 // milliseconds for last words

// --- errors ----------------------------------------------------------------------------------

/** Base of all that this module throws. */
export class EnvbusError extends Error {
  get name() { return this.constructor.name }
}
/** There was no connection until the time was over, or this client was closed. */
export class ConnectionLostError extends EnvbusError {}
/** Refused at once because a limit is reached; later there may be room. */
export class OverloadedError extends ConnectionLostError {}
/** No answer came in time. */
export class TimeoutError extends EnvbusError {}
/** The bridge, or the gateway before it, does not understand or does not want this client. */
export class RefusedError extends EnvbusError {}
/** A call is larger than the gateway takes; the message says its size and the limit. */
export class MessageTooLargeError extends RefusedError {}
/** A call does not fit its episode, which goes on as it was. */
export class EpisodeError extends RefusedError {}
export class EpisodeNotFoundError extends EpisodeError {}
export class EpisodeAlreadyStartedError extends EpisodeError {}
export class EpisodeFinishedError extends EpisodeError {}
export class EpisodeBusyError extends EpisodeError {}
export class EpisodeLostError extends EpisodeError {}
/** An observation or action is outside its space; the message says which and what was expected. */
export class SpaceMismatchError extends EpisodeError {}
/** This client was away for too long; its episodes are over. */
export class SessionLostError extends RefusedError {}
/** Something failed at the other side, for example the policy. */
export class RemoteError extends EnvbusError {}

const REFUSALS = {
  Refused: RefusedError, EpisodeError, EpisodeNotFound: EpisodeNotFoundError,
  EpisodeAlreadyStarted: EpisodeAlreadyStartedError, EpisodeFinished: EpisodeFinishedError,
  EpisodeBusy: EpisodeBusyError, EpisodeLost: EpisodeLostError,
  SpaceMismatch: SpaceMismatchError, SessionLost: SessionLostError,
}

function errorOf({ code, message, remote_type: type }) {
  if (code === "timeout") return new TimeoutError(message)
  if (code === "peer_lost" || code === "not_joined") return new ConnectionLostError(message)
  if (code === "overloaded") return new OverloadedError(message)
  if (["no_peer", "version", "protocol"].includes(code)) return new RefusedError(message)
  if (code === "remote" && Object.hasOwn(REFUSALS, type)) return new REFUSALS[type](message)
  return new RemoteError(`${type || code}: ${message}`) // also of a code that is newer than this
}

// --- the client ------------------------------------------------------------------------------

/**
 * A session with a bridge, over one connection at a time.
 *
 * When the connection is lost the client connects again by itself, and asks again what was not
 * answered; the bridge answers each question once. Times are in milliseconds. Calls of one episode
 * come one after another; any number of episodes may be open at once. With several agents
 * observations, actions, rewards and infos are objects by agent.
 */
export class Client {
  /**
   * Connect and join; a bridge that is not there yet is waited for. Options: `name`; `token`;
   * `timeout` of each call and to connect, 60 000; `heartbeat`, 60 000 at most: after four times that
   * without a sign of life the bridge takes this client for hung; `WebSocket`, the class to use where
   * there is no global one.
   * @param {string} url `ws://host:port` or `stream://host:port` (plain TCP); with TLS `wss://`
   *   or `streams://`
   */
  static async connect(url, options = {}) {
    const client = new Client(url, options)
    try {
      await client.#persist(Date.now() + client.timeout)
      return client
    } catch (error) {
      client.close()
      throw error
    }
  }

  /** What the bridge said: spaces, policy ids, lease, ids of open episodes. */
  bridge
  #url; #name; #token; #WebSocket
  #transport = null
  #opening = null // ends what is to become a transport
  #joined = false
  #session = ""
  #calls = new Map() // those without an answer, by request id
  #lastId = 0
  #notTaken = new Map() // by episode: the first GetAction whose action may come, and nobody takes it
  #givenUp = new Map() // by episode: the last call that was given up, and may never have come
  #complaint = null // the last failure that answers no call: why the connection ends
  #end = null // why no call is taken any more
  #heartbeat; #lease; #lastSent
  #limit = Infinity // bytes of a message, as Welcome says
  #pulse = null

  constructor(url, {
    name = "simulator", token = "", timeout = 60_000, heartbeat = 60_000, WebSocket,
  } = {}) {
    this.#url = new URL(url)
    this.#name = name
    this.#token = token
    this.#heartbeat = heartbeat
    this.#WebSocket = WebSocket ?? globalThis.WebSocket
    this.timeout = timeout
  }

  /** Begin an episode and return its id. `trainingEnabled: false`: act, but do not learn from it. */
  async startEpisode({ episodeId = null, trainingEnabled = true } = {}) {
    const fields = { episode_id: episodeId, training_enabled: trainingEnabled }
    return (await this.#ask("StartEpisode", fields)).episode_id
  }

  /** Return the policy's action for an observation. */
  async getAction(episodeId, observation, { timeout = this.timeout } = {}) {
    return (await this.#ask("GetAction", { episode_id: episodeId, observation }, timeout)).action
  }

  /** Tell an action that was chosen elsewhere (off-policy). */
  async logAction(episodeId, observation, action) {
    await this.#ask("LogAction", { episode_id: episodeId, observation, action })
  }

  /** Tell what the last action has led to; adds up until the next observation. */
  async logReturns(episodeId, reward, { info = null, terminateds = null, truncateds = null } = {}) {
    await this.#ask("LogReturns", { episode_id: episodeId, reward, info, terminateds, truncateds })
  }

  /** Tell the last observation. `truncated`: it was cut short, for example by a time limit. */
  async endEpisode(
    episodeId, observation, { truncated = false, terminateds = null, truncateds = null } = {},
  ) {
    const fields = { episode_id: episodeId, observation, truncated, terminateds, truncateds }
    await this.#ask("EndEpisode", fields)
  }

  /** Leave. Episodes that are open wait for the bridge's lease. */
  close() {
    if (this.#joined) this.#notify("Goodbye")
    this.#finish(new ConnectionLostError("this client was closed"))
  }

  // --- private

  #ask(type, payload, timeout = this.timeout, { to = "bridge", handshake = false } = {}) {
    return new Promise((resolve, reject) => {
      if (this.#end) throw this.#end
      const id = ++this.#lastId
      const notTaken = this.#notTaken.get(payload.episode_id), givenUp = this.#givenUp.get(payload.episode_id)
      if (notTaken !== undefined) payload = { ...payload, not_taken: notTaken }
      if (givenUp !== undefined) payload = { ...payload, given_up: givenUp }
      // Now, as it may be sent later, and again: the caller's arrays may have changed by then.
      const fields = encode(payload), episode = payload.episode_id
      const call = { id, type, fields, episode, to, handshake, resolve, reject, deadline: Date.now() + timeout }
      // The bridge says itself that time is over; a moment later means that it cannot.
      call.timer = setTimeout(() => {
        this.#calls.delete(id)
        this.#giveUp(call)
        const Kind = this.#joined ? TimeoutError : ConnectionLostError
        reject(new Kind(`${type}: no answer from ${this.#url.host} within ${timeout} ms`))
      }, timeout + 1000)
      this.#calls.set(id, call)
      if (this.#joined || handshake) this.#sendCall(call) // else when it has joined
    })
  }

  #sendCall(call) {
    const { id, type, fields, to, deadline } = call
    call.sent = true
    try {
      this.#send(REQUEST, id, type, fields, Math.max(deadline - Date.now(), 1) / 1000, to)
    } catch (error) { // it is too large: sent again it would be as well
      this.#settle(call)
      call.reject(error)
    }
  }

  #settle(call) {
    this.#calls.delete(call.id)
    clearTimeout(call.timer)
  }

  /** The bridge may have answered all the same, or may never get it: the next calls of the episode tell it. */
  #giveUp({ id, type, episode }) {
    if (!["GetAction", "LogAction", "LogReturns"].includes(type)) return
    if (type === "GetAction" && !this.#notTaken.has(episode)) this.#notTaken.set(episode, id)
    this.#givenUp.set(episode, Math.max(id, this.#givenUp.get(episode) ?? 0))
  }

  #notify(type, payload = {}) { this.#send(NOTICE, 0, type, encode(payload)) }

  #send(kind, id, type, fields, ttl = 0, to = "") {
    const now = Date.now()
    if (this.#joined && now - this.#lastSent > this.#lease) { // asleep for so long: forgotten
      return this.#onLost("no sign of life was sent in time")
    }
    const data = encode([encode([1, kind, id, type, ttl, 0, to]), fields])
    if (data.length > this.#limit) {
      throw new MessageTooLargeError(
        `${type}: a message of ${data.length} bytes is over the gateway's limit of ${this.#limit}`)
    }
    this.#lastSent = now
    this.#transport?.send(data)
  }

  async #open(deadline) {
    let mine = null
    // A connection that was given up may still bring what was under way in it.
    const onLost = (why) => { if (mine === this.#transport) this.#onLost(why) }
    const onMessage = (data) => {
      if (mine !== this.#transport) return
      try { this.#take(data) } catch (error) { // thrown on, it would end the whole program
        this.#complaint = new RefusedError(`${this.#url.host} sent what cannot be read: ${error.message}`)
        this.#transport.close()
      }
    }
    const opening = this.#opening = new AbortController()
    const transport = openTransport(this.#url, this.#WebSocket, onMessage, onLost, opening.signal)
    try {
      this.#transport = mine = await before(deadline, transport, `nobody answers at ${this.#url.host}`)
    } catch (error) {
      opening.abort() // left open, it would keep the program from ending
      throw error
    }
    if (this.#token) this.#notify("Token", { token: this.#token })
    const greet = (type, payload, to) =>
      this.#ask(type, payload, deadline - Date.now(), { to, handshake: true })
    const name = `${this.#name}-${Math.random().toString(36).slice(2, 12)}`
    const welcome = await greet("Hello", { name, heartbeat: this.#heartbeat / 1000 }, "")
    this.#lease = welcome.lease * 1000
    this.#limit = welcome.max_message_bytes
    const join = { client: this.#name, plain: true, resume: this.#session }
    this.bridge = await greet("JoinBridge", join, "bridge").catch((error) => {
      if (!(error instanceof SessionLostError)) throw error
      // Away for too long: begin anew. Each of the old episodes will say that it is over.
      return greet("JoinBridge", { ...join, resume: "" }, "bridge")
    })
    this.#session = this.bridge.session
    for (const ids of [this.#notTaken, this.#givenUp]) {
      for (const id of ids.keys()) if (!this.bridge.episodes.includes(id)) ids.delete(id) // it is over
    }
    this.#joined = true
    for (const call of this.#calls.values()) this.#sendCall(call)
    this.#pulse = setInterval(() => this.#notify("Heartbeat"), this.#heartbeat / 3)
    this.#pulse.unref?.() // it shall not keep Node from ending
  }

  #take(data) {
    if (!data) throw new EnvbusError(`a message of over ${MAX_BYTES} bytes`)
    if (typeof data === "string") throw new EnvbusError("a text message")
    const [header, payload] = decode(data).map((frame) => decode(frame))
    const [, kind, id, type] = header
    if (kind === NOTICE && type === "Shutdown") return this.#transport.close()
    if (kind !== REPLY && kind !== FAILURE) return
    if (payload === null || typeof payload !== "object") throw new EnvbusError(`${type} without fields`)
    const error = kind === FAILURE ? errorOf(payload) : null // what cannot be read is no call's answer
    // Our lease is over: we slept. What has no answer is asked again after a new hello.
    if (kind === FAILURE && payload.code === "not_joined" && this.#joined) return this.#onLost(payload.message)
    const call = this.#calls.get(id)
    if (call) {
      this.#settle(call)
      if (error) return call.reject(error)
      this.#notTaken.delete(call.episode)
      this.#givenUp.delete(call.episode)
      call.resolve(payload)
    } else if (error && id === 0) {
      this.#complaint = error
      this.#transport.close() // as the gateway is about to do; or the broker has forgotten us
    } // or a late answer, which nobody waits for any more
  }

  #onLost(why) {
    const error = this.#complaint ?? new ConnectionLostError(`the connection is gone: ${why}`)
    const joined = this.#joined
    this.#transport?.close()
    this.#complaint = this.#transport = null
    this.#joined = false
    clearInterval(this.#pulse)
    // Who is refused would be so again: none of those sent is the one for sure, so all of them end.
    const refused = error instanceof RefusedError
    this.#fail(error, ({ handshake, sent }) => handshake || (refused && sent))
    if (joined && !this.#end) this.#reopen()
  }

  async #reopen() {
    try {
      await sleep(100)
      await this.#persist(Infinity)
    } catch (error) {
      this.#finish(error)
    }
  }

  /** Connect and join; again, with pauses that grow, while nobody is there, until `deadline`. */
  async #persist(deadline) {
    for (let pause = 100; ; pause = Math.min(pause * 2, 2000)) {
      if (this.#end) throw this.#end
      try {
        return await this.#open(Math.min(deadline, Date.now() + this.timeout))
      } catch (error) {
        this.#transport?.close()
        const absent = error instanceof ConnectionLostError || error instanceof TimeoutError
        if (!absent || Date.now() + pause >= deadline) throw error
      }
      await sleep(pause)
    }
  }

  #finish(error) {
    this.#end ??= error
    clearInterval(this.#pulse)
    this.#opening?.abort()
    this.#transport?.close()
    this.#fail(this.#end)
  }

  #fail(error, which = () => true) {
    for (const call of [...this.#calls.values()].filter(which)) {
      this.#settle(call)
      this.#giveUp(call)
      call.reject(error)
    }
  }
}

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds))

async function before(deadline, promise, what) {
  let timer
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TimeoutError(`${what}, in time`)), deadline - Date.now())
  })
  try {
    return await Promise.race([promise, late])
  } finally {
    clearTimeout(timer)
  }
}

// --- transports: each has send(bytes) and close() ---------------------------------------------

/** `signal`: gives up what is not open yet. */
function openTransport(url, WebSocket, onMessage, onLost, signal) {
  const web = url.protocol === "ws:" || url.protocol === "wss:"
  return web ? openWeb(url, WebSocket, onMessage, onLost, signal) : openTcp(url, onMessage, onLost, signal)
}

function openWeb(url, WebSocket, onMessage, onLost, signal) {
  if (!WebSocket) throw new EnvbusError("no WebSocket here: use stream://, or give the option WebSocket")
  const socket = new WebSocket(url)
  socket.binaryType = "arraybuffer"
  signal.addEventListener("abort", () => { if (socket.readyState === 0) socket.close() })
  return new Promise((resolve, reject) => {
    const close = () => {
      socket.close()
      // The package ws waits for 30 s for a server that does not close its side in turn.
      setTimeout(() => socket.terminate?.(), LINGER).unref?.()
    }
    socket.onopen = () => resolve({ send: (data) => socket.send(data), close })
    // A text would be taken for an array's length.
    socket.onmessage = ({ data }) => onMessage(typeof data === "string" ? data : new Uint8Array(data))
    const gone = (why) => {
      onLost(why)
      reject(new ConnectionLostError(`cannot connect to ${url.host}: ${why}`))
    }
    // Browsers do not tell why a connection was refused: nobody there, or a page's origin.
    socket.onclose = ({ reason, code }) => gone(reason || `code ${code}`)
    // Node 22 closes nothing that was refused; of the package ws an error without a listener ends the program.
    socket.onerror = ({ message }) => gone(message || "code 1006")
  })
}

async function openTcp(url, onMessage, onLost, signal) {
  const secure = url.protocol === "streams:"
  const { connect } = secure ? await import("node:tls") : await import("node:net")
  const host = url.hostname.replace(/^\[|\]$/g, "")
  const socket = connect({ host, port: Number(url.port), noDelay: true })
  let isOpen = false
  signal.addEventListener("abort", () => { if (!isOpen) socket.destroy() })
  if (signal.aborted) socket.destroy()
  let rest = new Uint8Array(0)
  socket.on("data", (data) => {
    rest = rest.length ? Buffer.concat([rest, data]) : data
    while (rest.length >= 4) {
      const end = 4 + new DataView(rest.buffer, rest.byteOffset).getUint32(0)
      if (end > 4 + MAX_BYTES) return onMessage(null)
      if (rest.length < end) break
      onMessage(rest.subarray(4, end))
      rest = rest.subarray(end)
    }
  })
  return new Promise((resolve, reject) => {
    let why = "it was closed"
    socket.on("error", (error) => { why = error.message })
    socket.on("close", () => {
      onLost(why)
      const Kind = socket.authorizationError ? RefusedError : ConnectionLostError // of TLS
      reject(new Kind(`cannot connect to ${url.host}: ${why}`))
    })
    const send = (data) => {
      const length = new Uint8Array(4)
      new DataView(length.buffer).setUint32(0, data.length)
      socket.cork() // both leave together
      socket.write(length)
      socket.write(data)
      socket.uncork()
    }
    socket.on(secure ? "secureConnect" : "connect", () => {
      isOpen = true
      // Who does not close its side in turn, or does not read, would keep the program from ending.
      const close = () => {
        socket.destroySoon()
        setTimeout(() => socket.destroy(), LINGER).unref()
      }
      resolve({ send, close })
    })
  })
}

// --- MessagePack -----------------------------------------------------------------------------

/** Return a value as MessagePack: null, booleans, numbers, bigints, strings, bytes, arrays, maps. */
export function encode(value) {
  const out = new Writer()
  out.value(value)
  return out.done()
}

class Writer {
  #view = new DataView(new ArrayBuffer(256))
  #length = 0

  done() { return new Uint8Array(this.#view.buffer, 0, this.#length) }

  value(value) {
    if (value === null || value === undefined) this.#byte(0xc0)
    else if (typeof value === "boolean") this.#byte(value ? 0xc3 : 0xc2)
    else if (typeof value === "number") this.#number(value)
    else if (typeof value === "bigint") this.#bigint(value)
    else if (typeof value === "string") {
      const bytes = new TextEncoder().encode(value)
      this.#head(bytes.length, 0xa0, 32, 0xd9)
      this.#bytes(bytes)
    } else if (value instanceof Uint8Array || value instanceof Uint8ClampedArray) { // also a picture's
      this.#head(value.length, 0, 0, 0xc4)
      this.#bytes(value)
    } else if (value instanceof Float32Array) {
      this.#head(value.length, 0x90, 16, 0xdb)
      for (const item of value) { this.#byte(0xca); this.#put(4, "setFloat32", item) }
    } else if (Array.isArray(value) || ArrayBuffer.isView(value)) {
      this.#head(value.length, 0x90, 16, 0xdb)
      for (const item of value) this.value(item)
    } else {
      const pairs = value instanceof Map ? [...value] : Object.entries(value)
      this.#head(pairs.length, 0x80, 16, 0xdd)
      for (const [key, item] of pairs) { this.value(key); this.value(item) }
    }
  }

  /** Write a type with a length: in one byte, or in `first` and 1, 2 or 4 more. */
  #head(length, fixed, limit, first) {
    if (length < limit) return this.#byte(fixed | length)
    const short = first !== 0xdb && first !== 0xdd // arrays and maps have no one-byte length
    if (short && length < 0x100) { this.#byte(first); this.#byte(length) }
    else if (length < 0x10000) { this.#byte(first + 1); this.#put(2, "setUint16", length) }
    else { this.#byte(first + 2); this.#put(4, "setUint32", length) }
  }

  #number(value) {
    if (!Number.isSafeInteger(value) || Object.is(value, -0)) {
      this.#byte(0xcb); this.#put(8, "setFloat64", value)
    } else if (value >= -32 && value < 128) this.#byte(value & 0xff)
    else if (value >= 0 && value < 0x100) { this.#byte(0xcc); this.#byte(value) }
    else if (value >= 0 && value < 0x10000) { this.#byte(0xcd); this.#put(2, "setUint16", value) }
    else if (value >= -(2 ** 31) && value < 2 ** 31) { this.#byte(0xd2); this.#put(4, "setInt32", value) }
    else this.#bigint(BigInt(value))
  }

  #bigint(value) {
    if (value === BigInt.asIntN(64, value)) { this.#byte(0xd3); this.#put(8, "setBigInt64", value) }
    else if (value === BigInt.asUintN(64, value)) { this.#byte(0xcf); this.#put(8, "setBigUint64", value) }
    else throw new EnvbusError(`${value} is not from -2^63 to 2^64 - 1`)
  }

  #byte(value) { this.#put(1, "setUint8", value) }

  #put(size, setter, value) {
    this.#room(size)
    this.#view[setter](this.#length, value)
    this.#length += size
  }

  #bytes(bytes) {
    this.#room(bytes.length)
    new Uint8Array(this.#view.buffer).set(bytes, this.#length)
    this.#length += bytes.length
  }

  #room(size) {
    const wanted = this.#length + size
    if (wanted <= this.#view.byteLength) return
    const larger = new Uint8Array(Math.max(wanted, 2 * this.#view.byteLength))
    larger.set(this.done())
    this.#view = new DataView(larger.buffer)
  }
}

/** Return the value of MessagePack bytes; maps become objects, 64-bit integers numbers if they fit. */
export function decode(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  let at = 0

  const take = (size) => bytes.subarray(at, (at += size))
  const get = (size, getter) => view[getter]((at += size) - size)
  const length = (size) => get(size, { 1: "getUint8", 2: "getUint16", 4: "getUint32" }[size])
  const text = (size) => new TextDecoder().decode(take(size))
  const array = (size) => Array.from({ length: size }, value)
  const map = (size) => {
    const found = {}
    for (let i = 0; i < size; i++) {
      const key = value()
      Object.defineProperty(found, key, { value: value(), enumerable: true, writable: true, configurable: true })
    }
    return found
  }
  const narrow = (big) => (Number.isSafeInteger(Number(big)) ? Number(big) : big)
  const others = {
    0xc0: () => null, 0xc2: () => false, 0xc3: () => true,
    0xc4: () => take(length(1)), 0xc5: () => take(length(2)), 0xc6: () => take(length(4)),
    0xca: () => get(4, "getFloat32"), 0xcb: () => get(8, "getFloat64"),
    0xcc: () => get(1, "getUint8"), 0xcd: () => get(2, "getUint16"),
    0xce: () => get(4, "getUint32"), 0xcf: () => narrow(get(8, "getBigUint64")),
    0xd0: () => get(1, "getInt8"), 0xd1: () => get(2, "getInt16"),
    0xd2: () => get(4, "getInt32"), 0xd3: () => narrow(get(8, "getBigInt64")),
    0xd9: () => text(length(1)), 0xda: () => text(length(2)), 0xdb: () => text(length(4)),
    0xdc: () => array(length(2)), 0xdd: () => array(length(4)),
    0xde: () => map(length(2)), 0xdf: () => map(length(4)),
  }

  function value() {
    const first = get(1, "getUint8")
    if (first < 0x80) return first
    if (first < 0x90) return map(first & 0x0f)
    if (first < 0xa0) return array(first & 0x0f)
    if (first < 0xc0) return text(first & 0x1f)
    if (first >= 0xe0) return first - 0x100
    if (!(first in others)) throw new EnvbusError(`MessagePack type 0x${first.toString(16)} has no form here`)
    return others[first]()
  }

  return value()
}
