"""PPO from CartPoles that live elsewhere and connect: ppo.py at a bridge instead of a pool.

    pip install torch
    python examples/ppo_external.py                    # prints where simulators connect to
    python examples/simulators/everybody.py            # in another terminal: many of them

It has no envs of its own. Any program that plays CartPole by the verbs of a client may come and go:
those of `examples/simulators` and `examples/clients`, or yours. docs/external-simulators.md tells
how one is written, also for something else than CartPole (`--spaces`).
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from curves import Curve
from ppo import Agent, add_ppo_options, make_policy, update
from torch import nn

from envbus.bus.gateway import GatewayConfig
from envbus.runner import EnvRunner, ExternalEnvBridge, RunnerConfig
from envbus.runner.batches import EpisodeResult
from envbus.runner.policies import ClipActions, Normalize


class Parties:
    """What each kind of simulator has done. Its episodes' ids begin with it: `cpp-17-3`."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._last: dict[str, deque[float]] = {}
        self._env_steps: dict[str, int] = {}
        self.curves: dict[str, dict[str, list[float]]] = {}

    def add(self, steps: int, episodes: Iterable[EpisodeResult]) -> None:
        """Take up episodes that ended, after so many steps of all."""
        for one in episodes:
            party = one.episode_id.split("-")[0] if "-" in one.episode_id else "others"
            last = self._last.setdefault(party, deque(maxlen=self._episodes))
            last.append(one.episode_return)
            self._env_steps[party] = self._env_steps.get(party, 0) + one.length
        for party, last in self._last.items():
            curve = self.curves.setdefault(party, {"steps": [], "returns": []})
            curve["steps"].append(steps)
            curve["returns"].append(round(float(np.mean(last)), 1))

    def have_reached(self, target: float) -> bool:
        """Whether the last episodes of each of them have."""
        return all(
            len(last) == self._episodes and np.mean(last) >= target for last in self._last.values()
        )

    def summary(self) -> dict[str, dict[str, float]]:
        """Return, by party, the env steps of its episodes and the mean return of the last."""
        return {
            party: {
                "env_steps": self._env_steps[party],
                "return": round(float(np.mean(last)), 1),
            }
            for party, last in sorted(self._last.items())
        }


class Served(nn.Module):
    """What `envbus serve` needs of an agent: its actor, and what observations are scaled by."""

    def __init__(self, agent: Agent, normalize: Normalize) -> None:
        super().__init__()
        state = normalize.get_state()
        mean, variance = state["means"][0], np.asarray(state["m2s"][0]) / state["count"]
        self.mean = torch.as_tensor(np.asarray(mean, np.float32))
        self.scale = torch.as_tensor(np.sqrt(variance + normalize.epsilon).astype(np.float32))
        self.clip, self.agent = normalize.clip, agent

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.agent.actor(((obs - self.mean) / self.scale).clamp(-self.clip, self.clip))
        return (out,) if self.agent.discrete else (out, self.agent.log_std.expand_as(out))

    def save(self, file: Path) -> None:
        """Write it in ONNX's format."""
        with warnings.catch_warnings():  # the new exporter needs one more package
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                self,
                (torch.zeros(2, *self.mean.shape),),
                file,
                input_names=["obs"],
                output_names=["logits"] if self.agent.discrete else ["means", "log_std"],
                dynamic_axes={"obs": {0: "rows"}},
                dynamo=False,
            )


def find_spaces(args: argparse.Namespace) -> tuple[gymnasium.Space, gymnasium.Space]:
    if args.spaces is None:
        env = gymnasium.make(args.env)
        return env.observation_space, env.action_space
    sys.path.insert(0, os.getcwd())
    module, _, name = args.spaces.partition(":")
    args.env = module  # for the curve's title
    return getattr(importlib.import_module(module), name)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO from simulators that connect.")
    parser.add_argument("--env", default="CartPole-v1", help="whose spaces simulators have")
    parser.add_argument("--spaces", help="module:name of a pair of spaces, instead of an env's")
    parser.add_argument("--bind", default="tcp://127.0.0.1:5556", help="for ZeroMQ")
    parser.add_argument("--tcp", default="127.0.0.1:7000", help="for plain TCP")
    parser.add_argument("--websocket", default="127.0.0.1:7001")
    parser.add_argument("--each", type=int, default=0, help="go on until the last so many episodes "
                        "of each kind of simulator reach the target, too")  # fmt: skip
    parser.add_argument("--onnx", type=Path, help="file for the trained policy")
    parser.add_argument("--episodes", type=Path, help="file: a line of JSON per finished episode")
    add_ppo_options(parser)
    parser.set_defaults(target=475.0, total_steps=600_000, num_steps=64)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    observation_space, action_space = find_spaces(args)
    bridge = ExternalEnvBridge(
        observation_space,
        action_space,
        bind=args.bind,
        gateway=GatewayConfig(tcp=(args.tcp,), websocket=(args.websocket,)),
    )
    assert bridge.gateway is not None
    print(f"gateway: process {bridge.gateway.pid}")
    print("simulators connect to", *bridge.addresses, flush=True)

    normalize = Normalize(observation_space)
    agent = Agent(normalize.space, action_space)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # Simulators are answered while the agent learns: who answers them is a copy.
    policy, learnt = make_policy(copy.deepcopy(agent)), make_policy(agent)
    rows = args.num_envs * args.num_steps
    config = RunnerConfig(
        rollout_fragment_length=rows,
        max_waiting_steps=rows,  # what is older was chosen by weights that are too old
        observation_connector=normalize,
        action_connector=ClipActions(action_space),
        seed=args.seed,
    )
    steps, faulty, sampling, learning = 0, 0, 0.0, 0.0
    curve, parties = Curve(args), Parties(args.each or 20)
    finished = args.episodes.open("w", encoding="utf-8") if args.episodes else None
    with EnvRunner(bridge, policy, config) as runner:
        while steps < args.total_steps:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1.0 - steps / args.total_steps)
            begin = time.perf_counter()
            sample = runner.sample()
            sampling += time.perf_counter() - begin
            steps += sample.env_steps
            whole = [one for one in sample.episodes if not one.faulty]
            faulty += len(sample.episodes) - len(whole)
            if finished is not None:
                for one in whole:
                    line = {"id": one.episode_id, "length": one.length, "steps": steps}
                    print(json.dumps(line), file=finished, flush=True)
            curve.add(steps, (one.episode_return for one in whole))
            parties.add(steps, whole)
            if curve.solved and (not args.each or parties.have_reached(args.target)):
                break
            begin = time.perf_counter()
            with runner.serving():
                update(agent, optimizer, sample.single(), args)
            learning += time.perf_counter() - begin
            policy.set_weights(learnt.get_weights())
        statistics = bridge.statistics()
    if args.onnx is not None:
        Served(agent, normalize).save(args.onnx)
    curve.end(
        curves=parties.curves,
        parties=parties.summary(),
        faulty_episodes=faulty,
        sampling_seconds=sampling,
        learning_seconds=learning,
        resumed=statistics.resumed,
    )


if __name__ == "__main__":
    main()
