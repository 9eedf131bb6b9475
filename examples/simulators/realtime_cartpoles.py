"""CartPoles with a clock of their own: 30 times a second the world goes on, answered or not.

    python examples/simulators/realtime_cartpoles.py tcp://127.0.0.1:5556 --poles 8

Each pole is an agent with an episode of its own; all share one connection. (Where the agents of one
world have one episode together, observations and actions are dicts by agent. Then all simulators
at a bridge have these agents; here they play beside others that have one.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os

import gymnasium

from envbus.actors import ActionTimeoutError, AsyncExternalEnvClient, EpisodeError
from envbus.bus.errors import PeerLostError

#: Seconds between two steps of the world.
PERIOD = 1 / 30


class Pole:
    """One agent. The world moves it; its task asks what to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.env = gymnasium.make("CartPole-v1")
        self.moved = asyncio.Event()
        self.standing = False

    def begin(self) -> None:
        self.observation, _ = self.env.reset()
        self.action, self.reward, self.steps, self.standing = 0, 0.0, 0, True
        self.answers = 0
        self.moved.clear()

    def move(self) -> None:
        """Go on by a step; a pole whose answer is late is pushed to where it was pushed before."""
        if self.standing:
            self.observation, reward, fallen, self.cut, _ = self.env.step(self.action)
            self.reward += float(reward)
            self.steps += 1
            self.standing = not (fallen or self.cut)
            self.moved.set()

    async def play(self, client: AsyncExternalEnvClient, number: int) -> None:
        """Play one episode."""
        episode = await client.start_episode(f"{self.name}-{number}")
        self.begin()
        while self.standing:
            try:
                self.action = int(
                    await client.get_action(episode, self.observation, timeout=PERIOD)
                )
                self.answers += 1
            except ActionTimeoutError:
                pass  # pushed as before
            await self.moved.wait()
            self.moved.clear()
            reward, self.reward = self.reward, 0.0
            await client.log_returns(episode, reward)
        await client.end_episode(episode, self.observation, truncated=self.cut)
        print(f"episode {episode}: {self.steps} steps ({self.answers} answers)", flush=True)

    async def live(self, client: AsyncExternalEnvClient) -> None:
        for number in itertools.count(1):
            try:
                await self.play(client, number)
            except (EpisodeError, PeerLostError) as error:
                # The client connects again by itself; an episode that was lost is begun anew.
                print(f"{self.name}: {error}", flush=True)
                self.standing = False
                await asyncio.sleep(1.0)


async def tick(poles: list[Pole]) -> None:
    """Be the clock."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + PERIOD, loop.time())
        await asyncio.sleep(due - loop.time())
        for pole in poles:
            pole.move()


async def run(address: str, number: int) -> None:
    poles = [Pole(f"realtime-{os.getpid()}-{i}") for i in range(number)]
    async with AsyncExternalEnvClient(address, name="realtime") as client:
        await asyncio.gather(tick(poles), *(pole.live(client) for pole in poles))


def main() -> None:
    parser = argparse.ArgumentParser(description="CartPoles in real time.")
    parser.add_argument("address", help="of the bridge, for ZeroMQ")
    parser.add_argument("--poles", type=int, default=8)
    args = parser.parse_args()
    asyncio.run(run(args.address, args.poles))


if __name__ == "__main__":
    main()
