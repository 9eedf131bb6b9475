"""Replays recorded episodes through the verbs of an external env's client, off-policy.

So that logs train a policy in the very way in which a simulator that is there does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from envbus.actors.external.verbs import SimulatorVerbs
from envbus.bus.errors import ConfigError
from envbus.runner.data.batch import MultiAgentBatch, SampleBatch
from envbus.runner.data.nested import Tree, map_tree, row_of
from envbus.runner.extras import how_to_install
from envbus.runner.pool.agent_results import DUMMY_AGENT

__all__ = ["minari_episodes", "replay"]


def replay(
    episodes: Iterable[MultiAgentBatch | SampleBatch],
    client: SimulatorVerbs,
    *,
    training_enabled: bool = True,
) -> int:
    """Send episodes through a client, each by `log_action`, `log_returns`, `end_episode`.

    Those of several agents are sent as dicts by agent. Who acted at one time is told by `t`: an
    agent's action is taken to have been chosen right after its transition before.

    Args:
        episodes: Whole ones, `read_episodes(...)` or `minari_episodes(...)` for example.
        client: A connected one.
        training_enabled: Whether they are to be trained on.

    Returns:
        How many there were.

    Raises:
        ConfigError: One lacks a column, or is not whole.
        Exception: What the client raises; the episode that it concerns was not finished.
    """
    count = 0
    for episode in episodes:
        rows = _agents(episode)
        episode_id = client.start_episode(training_enabled=training_enabled)
        if rows.keys() == {DUMMY_AGENT}:
            _replay_single(rows[DUMMY_AGENT], client, episode_id)
        else:
            _replay_several(rows, client, episode_id)
        count += 1
    return count


def minari_episodes(dataset: Any) -> Iterator[SampleBatch]:
    """Yield the episodes of a Minari dataset.

    Args:
        dataset: A `minari.MinariDataset`, or the id of one that is on this machine.

    Raises:
        ConfigError: It is an id, and there is no such dataset, or Minari is not installed.
    """
    if isinstance(dataset, str):
        try:
            import minari
        except ImportError as exc:
            raise ConfigError(
                f"to read the Minari dataset {dataset!r}, {how_to_install('minari')}"
            ) from exc
        try:
            dataset = minari.load_dataset(dataset)
        except (FileNotFoundError, ValueError) as exc:
            raise ConfigError(f"there is no Minari dataset {dataset!r} here: {exc}") from exc
    for episode in dataset.iterate_episodes():
        length = len(episode.rewards)
        yield SampleBatch(
            {
                "obs": map_tree(lambda leaf: np.asarray(leaf)[:-1], episode.observations),
                "actions": map_tree(np.asarray, episode.actions),
                "next_obs": map_tree(lambda leaf: np.asarray(leaf)[1:], episode.observations),
                "rewards": np.asarray(episode.rewards, np.float32),
                "terminateds": np.asarray(episode.terminations, np.bool_),
                "truncateds": np.asarray(episode.truncations, np.bool_),
                "eps_id": np.full(length, episode.id, np.int64),
                "t": np.arange(length, dtype=np.int64),
            }
        )


def _agents(episode: MultiAgentBatch | SampleBatch) -> dict[Any, SampleBatch]:
    """Return the rows of one episode by agent."""
    batches = [episode] if isinstance(episode, SampleBatch) else episode.policy_batches.values()
    rows: dict[Any, SampleBatch] = {}
    for batch in batches:
        for name in ("obs", "actions", "rewards", "next_obs", "terminateds", "truncateds"):
            if name not in batch:
                raise ConfigError(f"an episode cannot be replayed without a column {name!r}")
        for part in batch.split_by_trajectory():
            agent_id = part["agent_id"][0].item() if "agent_id" in part else DUMMY_AGENT
            if agent_id in rows:
                raise ConfigError(
                    f"agent {agent_id!r} has two trajectories in one episode; split the batch "
                    "with split_by_episode() first"
                )
            rows[agent_id] = part
    if not rows:
        raise ConfigError("an episode without rows cannot be replayed")
    return rows


def _replay_single(rows: SampleBatch, client: SimulatorVerbs, episode_id: str) -> None:
    for index in range(len(rows)):
        client.log_action(episode_id, row_of(rows["obs"], index), row_of(rows["actions"], index))
        info = rows["infos"][index] if "infos" in rows else None
        client.log_returns(episode_id, float(rows["rewards"][index]), info)
    last = row_of(rows["next_obs"], -1)
    client.end_episode(episode_id, last, truncated=not rows["terminateds"][-1])


def _replay_several(
    agents: Mapping[Any, SampleBatch], client: SimulatorVerbs, episode_id: str
) -> None:
    #: By env step: who acts then, or has acted until then, and by which row.
    starts: dict[int, dict[Any, int]] = {}
    ends: dict[int, dict[Any, int]] = {}
    for agent_id, rows in agents.items():
        times = rows["t"].tolist()
        before = [times[0], *(time + 1 for time in times[:-1])]
        for index, (begin, end) in enumerate(zip(before, times, strict=True)):
            starts.setdefault(begin, {})[agent_id] = index
            ends.setdefault(end, {})[agent_id] = index
    #: What those have seen last that have ended: it comes with the next observation of others.
    leaving: dict[Any, Tree] = {}
    for time in range(last := max(ends) + 1):
        acting = starts.get(time, {})
        if acting:
            seen = {agent: row_of(agents[agent]["obs"], index) for agent, index in acting.items()}
            actions = {
                agent: row_of(agents[agent]["actions"], index) for agent, index in acting.items()
            }
            client.log_action(episode_id, {**leaving, **seen}, actions)
            leaving = {}
        done = ends.get(time, {})
        over = [agent for agent, index in done.items() if index == len(agents[agent]) - 1]
        leaving |= {
            agent: row_of(agents[agent]["next_obs"], -1)
            for agent in over
            if "next_obs_valid" not in agents[agent] or agents[agent]["next_obs_valid"][-1]
        }
        terminated = {agent: True for agent in over if agents[agent]["terminateds"][-1]}
        truncated = {
            agent: True
            for agent in over
            if agents[agent]["truncateds"][-1] or agent not in terminated
        }
        flags: Mapping[str, Any] = {"terminateds": terminated, "truncateds": truncated}
        told: dict[str, Any] = {name: by_agent for name, by_agent in flags.items() if by_agent}
        if done:
            client.log_returns(
                episode_id,
                {agent: float(agents[agent]["rewards"][index]) for agent, index in done.items()},
                **(told if time < last - 1 else {}),
            )
    client.end_episode(
        episode_id,
        leaving,
        truncated=not all(rows["terminateds"][-1] for rows in agents.values()),
        **told,
    )
