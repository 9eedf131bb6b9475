// CartPoles that live in Node:
// node cartpole_node.mjs stream://127.0.0.1:7000 [episodes] [token] [games at once]

import { Client, EnvbusError } from "./envbus.mjs"
import { CartPole, playEpisode } from "./cartpole.mjs"

const [url = "stream://127.0.0.1:7000", episodes = "10", token = "", games = "1"] =
  process.argv.slice(2)
const client = await Client.connect(url, { name: "cartpole-node", token })
let last = 0

async function play() {
  const env = new CartPole()
  while (last < Number(episodes)) {
    const episodeId = `node-${process.pid}-${++last}`
    console.log(`episode ${episodeId}: ${await playEpisode(client, env, { episodeId })} steps`)
  }
}

try {
  await Promise.all(Array.from({ length: Number(games) }, play))
} catch (error) {
  if (!(error instanceof EnvbusError)) throw error
  console.error(`cartpole: ${error.message}`)
  process.exitCode = 1
}
client.close()
