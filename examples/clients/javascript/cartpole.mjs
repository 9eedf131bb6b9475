// The physics of Gymnasium's CartPole-v1: a pole on a cart, pushed left (0) or right (1).

const GRAVITY = 9.8, CART = 1.0, POLE = 0.1, HALF_LENGTH = 0.5, FORCE = 10.0, STEP = 0.02
const MAX_X = 2.4, MAX_ANGLE = (12 * 2 * Math.PI) / 360, MAX_STEPS = 500

export class CartPole {
  /** Begin an episode and return the first observation: position, speed, angle, angular speed. */
  reset() {
    this.state = Array.from({ length: 4 }, () => Math.random() * 0.1 - 0.05)
    this.steps = 0
    return this.state
  }

  /** Push, and return `{observation, reward, terminated, truncated}`. */
  step(action) {
    let [x, speed, angle, spin] = this.state
    const force = action === 1 ? FORCE : -FORCE
    const cos = Math.cos(angle), sin = Math.sin(angle)
    const push = (force + POLE * HALF_LENGTH * spin ** 2 * sin) / (CART + POLE)
    const turn = (GRAVITY * sin - cos * push) /
      (HALF_LENGTH * (4 / 3 - (POLE * cos ** 2) / (CART + POLE)))
    const pull = push - (POLE * HALF_LENGTH * turn * cos) / (CART + POLE)
    x += STEP * speed
    speed += STEP * pull
    angle += STEP * spin
    spin += STEP * turn
    this.state = [x, speed, angle, spin]
    this.steps += 1
    const terminated = Math.abs(x) > MAX_X || Math.abs(angle) > MAX_ANGLE
    const truncated = !terminated && this.steps >= MAX_STEPS
    return { observation: this.state, reward: 1, terminated, truncated }
  }
}

/**
 * Play one episode whose actions come from a bridge, and return its number of steps.
 *
 * `onStep(env)` is awaited after each step. `human()` returns an action to be taken instead of the
 * policy's, or null; the policy then learns from it off-policy.
 */
export async function playEpisode(
  client, env, { episodeId = null, onStep = () => {}, human = () => null } = {},
) {
  const episode = await client.startEpisode({ episodeId })
  let observation = env.reset()
  for (;;) {
    let action = human()
    if (action === null) action = await client.getAction(episode, observation)
    else await client.logAction(episode, observation, action)
    const result = env.step(action)
    observation = result.observation
    await client.logReturns(episode, result.reward)
    await onStep(env)
    if (result.terminated || result.truncated) {
      await client.endEpisode(episode, observation, { truncated: result.truncated })
      return env.steps
    }
  }
}
