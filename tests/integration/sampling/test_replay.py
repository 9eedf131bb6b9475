"""`envbus replay`: what comes out of a bridge is what was recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pyarrow")

from envbus.runner import EnvRunner, ExternalEnvBridge, RunnerConfig
from envbus.runner.batches import MultiAgentBatch, SampleBatch
from envbus.runner.cli.main import main
from envbus.runner.recordings import EpisodeWriter
from tests.waiting import PATIENCE

BOX, MOVES = spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Discrete(10)
COMPARED = ("obs", "actions", "rewards", "next_obs", "terminateds", "truncateds", "t")


def rows(agent: str, eps_id: int, times: list[int], *, terminated: bool) -> SampleBatch:
    """One agent's transitions, which are complete at these env steps."""
    length = len(times)
    last = np.arange(length) == length - 1
    seen = np.arange(2 * (length + 1), dtype=np.float32).reshape(-1, 2) + 100 * eps_id
    return SampleBatch(
        {
            "obs": seen[:-1],
            "next_obs": seen[1:],
            "actions": np.arange(length) % 10,
            "rewards": np.arange(length, dtype=np.float32) + 0.5,
            "terminateds": last & terminated,
            "truncateds": last & (not terminated),
            "eps_id": np.full(length, eps_id, np.int64),
            "t": np.array(times, np.int64),
            "agent_id": np.full(length, agent),
        }
    )


def replayed(bridge: ExternalEnvBridge, source: str, episodes: int) -> list[SampleBatch]:
    """Return the trajectories that a runner samples of what the command sends."""
    codes: list[int] = []

    def send() -> None:
        codes.append(main(["replay", source, bridge.address]))

    config = RunnerConfig(policy_mapping_fn=lambda _agent, _episode: "default_policy")
    with EnvRunner(bridge, lambda rows: np.zeros(len(rows), np.int64), config) as runner:
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        sample = runner.sample(num_episodes=episodes, timeout=PATIENCE)
        while thread.is_alive():
            runner.serve(0.05)
    assert codes == [0]
    return sample.single().split_by_trajectory()


def same(got: Iterable[SampleBatch], recorded: Iterable[SampleBatch]) -> None:
    def key(part: SampleBatch) -> Any:
        return float(part["obs"][0, 0]), str(part["agent_id"][0])

    pairs = zip(sorted(got, key=key), sorted(recorded, key=key), strict=True)
    for one, other in pairs:
        for name in COMPARED:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        assert one["off_policy"].all()


def test_recorded_episodes_of_one_agent_come_out_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = [rows("agent0", n, [*range(3 + n)], terminated=n % 2 == 0) for n in range(4)]
    with EpisodeWriter(tmp_path) as writer:
        for episode in recorded:
            writer.write(MultiAgentBatch.of([("p", episode)], len(episode)))
    same(replayed(ExternalEnvBridge(BOX, MOVES), str(tmp_path), 4), recorded)
    assert "4 episodes replayed" in capsys.readouterr().out


def test_recorded_episodes_of_several_agents_come_out_as_they_were(tmp_path: Path) -> None:
    """Also if one ends before the others, and they in different ways."""
    agents = ["x", "y", "z"]
    recorded = [
        [
            rows("x", n, [0, 1, 2], terminated=True),
            rows("y", n, [0, 2], terminated=n > 0),
            rows("z", n, [0], terminated=n > 1),
        ]
        for n in range(3)
    ]
    with EpisodeWriter(tmp_path) as writer:
        for parts in recorded:
            writer.write(MultiAgentBatch.of([("p", part) for part in parts], 3))
    bridge = ExternalEnvBridge(dict.fromkeys(agents, BOX), dict.fromkeys(agents, MOVES))
    same(replayed(bridge, str(tmp_path), 3), [part for parts in recorded for part in parts])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_minari_dataset_comes_out_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    recorded = [rows("agent0", n, [*range(3 + n)], terminated=True) for n in range(2)]
    buffers = [
        minari.data_collector.EpisodeBuffer(
            id=number,
            observations=[*episode["obs"], episode["next_obs"][-1]],
            actions=episode["actions"].tolist(),
            rewards=episode["rewards"].tolist(),
            terminations=episode["terminateds"].tolist(),
            truncations=episode["truncateds"].tolist(),
        )
        for number, episode in enumerate(recorded)
    ]
    minari.create_dataset_from_buffers(
        "count/test-v0", buffers, observation_space=BOX, action_space=MOVES
    )
    same(replayed(ExternalEnvBridge(BOX, MOVES), "count/test-v0", 2), recorded)


def test_a_mistake_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "no/such-dataset-v0", "tcp://127.0.0.1:1"]) == 2
    assert "no/such-dataset-v0" in capsys.readouterr().err
