// A CartPole that lives in Node: node cartpole_node.mjs stream://127.0.0.1:7000 [episodes] [token]

import { Client } from "./envbus.mjs"
import { CartPole, playEpisode } from "./cartpole.mjs"

const [url = "stream://127.0.0.1:7000", episodes = "10", token = ""] = process.argv.slice(2)
const client = await Client.connect(url, { name: "cartpole-node", token })
const env = new CartPole()
for (let episode = 1; episode <= Number(episodes); episode++) {
  console.log(`episode ${episode}: ${await playEpisode(client, env)} steps`)
}
client.close()
