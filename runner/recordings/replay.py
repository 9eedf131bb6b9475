"""Replays recorded episodes through the verbs of an external env's client, off-policy.

So that logs train a policy in the very way in which a simulator that is there does.
Episodes also come from, and go to, datasets of Minari.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envbus.actors.external.verbs import SimulatorVerbs
from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.nested import Tree, map_tree, row_of
from envbus.runner.extras import how_to_install
from envbus.runner.pool.agent_results import DUMMY_AGENT

__all__ = ["minari_episodes", "replay", "to_minari"]


def replay(
    episodes: Iterable[MultiAgentBatch | SampleBatch],
    client: SimulatorVerbs,
    *,
    training_enabled: bool = True,
) -> int:
    """Send episodes through a client, each by `log_action`, `log_returns`, `end_episode`.

    Those of several agents are sent as dicts by agent. Who acted at one time is told by `t`: an
    agent's action is taken to have been chosen right after its transition before. Where an action
    was not taken, as after a time-out, there is a gap: the rows of one agent come as an episode
    each, which says the same; of several, who did not act is observed without an action.

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
        agents = _agents(episode)
        if agents.keys() == {DUMMY_AGENT}:
            for rows in agents[DUMMY_AGENT]:
                episode_id = client.start_episode(training_enabled=training_enabled)
                _replay_single(rows, client, episode_id)
        else:
            episode_id = client.start_episode(training_enabled=training_enabled)
            _replay_several(agents, client, episode_id)
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


def to_minari(
    episodes: Iterable[MultiAgentBatch | SampleBatch], dataset_id: str, **options: Any
) -> Any:
    """Write episodes of one agent to a new Minari dataset; `minari_episodes` reads them back.

        to_minari(read_episodes("recorded"), "robot/walk-v0", env="Robot-v1")

    Where an action was not taken there is a gap: the rows before and after it are an episode each.
    Infos are left out, and rows behind which an observation is missing.

    Args:
        episodes: Whole ones, `read_episodes(...)` for example; all of them are held in memory.
        dataset_id: The dataset's id.
        options: Of `minari.create_dataset_from_buffers`: `env`, or `observation_space` and
            `action_space`; `author` and more. Images are kept as they are, and as JPEG with
            `jpeg_encoding=True`, which they always are in Minari before 0.5.4.

    Returns:
        The `minari.MinariDataset`.

    Raises:
        ConfigError: An episode is of several agents, lacks a column, or is not whole; there is
            none; Minari is not installed, or refuses what it is given.
    """
    try:
        import minari
    except ImportError as exc:
        raise ConfigError(f"to write a Minari dataset, {how_to_install('minari')}") from exc
    if "env" not in options and not {"observation_space", "action_space"} <= options.keys():
        raise ConfigError("Minari wants env=, or observation_space= and action_space=")
    buffers = []
    for episode in episodes:
        agents = _agents(episode)
        if len(agents) > 1:
            raise ConfigError(f"Minari has episodes of one agent, and one here has {list(agents)}")
        for rows in itertools.chain.from_iterable(agents.values()):
            if "next_obs_valid" in rows and not rows["next_obs_valid"][-1]:
                rows = rows[:-1]
            if not len(rows):
                continue
            last = np.arange(len(rows)) == len(rows) - 1
            buffers.append(
                minari.data_collector.EpisodeBuffer(
                    observations=map_tree(_with_last, rows["obs"], rows["next_obs"]),
                    actions=rows["actions"],
                    rewards=rows["rewards"],
                    terminations=rows["terminateds"],
                    truncations=rows["truncateds"] | (last & ~rows["terminateds"]),
                )
            )
    if not buffers:
        raise ConfigError("there are no episodes to write")
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        options.setdefault("jpeg_encoding", False)
    try:
        return minari.create_dataset_from_buffers(dataset_id, buffers, **options)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"Minari does not make the dataset {dataset_id!r}: {exc}") from exc


def _with_last(observations: Any, following: Any) -> Any:
    return np.concatenate([observations, following[-1:]])


def _agents(episode: MultiAgentBatch | SampleBatch) -> dict[Any, list[SampleBatch]]:
    """Return the rows of one episode by agent, in parts between which it took no action."""
    batches = [episode] if isinstance(episode, SampleBatch) else episode.policy_batches.values()
    rows: dict[Any, list[SampleBatch]] = {}
    for batch in batches:
        for name in ("obs", "actions", "rewards", "next_obs", "terminateds", "truncateds"):
            if name not in batch:
                raise ConfigError(f"an episode cannot be replayed without a column {name!r}")
        for part in batch.split_by_trajectory():
            agent_id = part["agent_id"][0].item() if "agent_id" in part else DUMMY_AGENT
            parts = rows.setdefault(agent_id, [])
            if parts and not _has_gap(parts[-1], part):
                raise ConfigError(
                    f"agent {agent_id!r} has two trajectories in one episode; split the batch "
                    "with split_by_episode() first"
                )
            parts.append(part)
    if not rows:
        raise ConfigError("an episode without rows cannot be replayed")
    return rows


def _has_gap(before: SampleBatch, after: SampleBatch) -> bool:
    """Return whether two parts are of one episode, with an observation between that is no row's."""
    goes_on = "t" in after and after["t"][0] > before["t"][-1] + 1
    return bool(goes_on and before["truncateds"][-1])


def _replay_single(rows: SampleBatch, client: SimulatorVerbs, episode_id: str) -> None:
    for index in range(len(rows)):
        client.log_action(episode_id, row_of(rows["obs"], index), row_of(rows["actions"], index))
        info = rows["infos"][index] if "infos" in rows else None
        client.log_returns(episode_id, float(rows["rewards"][index]), info)
    last = row_of(rows["next_obs"], -1)
    client.end_episode(episode_id, last, truncated=not rows["terminateds"][-1])


def _replay_several(
    agents: Mapping[Any, Sequence[SampleBatch]], client: SimulatorVerbs, episode_id: str
) -> None:
    #: By env step: who acts then, or has acted until then, and by which row of which part.
    starts: dict[int, dict[Any, tuple[SampleBatch, int]]] = {}
    ends: dict[int, dict[Any, tuple[SampleBatch, int]]] = {}
    for agent_id, parts in agents.items():
        for rows in parts:
            times = rows["t"].tolist()
            before = [times[0], *(time + 1 for time in times[:-1])]
            for index, (begin, end) in enumerate(zip(before, times, strict=True)):
                starts.setdefault(begin, {})[agent_id] = rows, index
                ends.setdefault(end, {})[agent_id] = rows, index
    #: What those have seen last that have ended: it comes with the next observation of others.
    leaving: dict[Any, Tree] = {}
    #: Those of them that only did not act upon it.
    pausing: set[Any] = set()
    for time in range(last := max(ends) + 1):
        acting = starts.get(time, {})
        if acting or pausing & leaving.keys():
            seen = {agent: row_of(rows["obs"], index) for agent, (rows, index) in acting.items()}
            actions = {
                agent: row_of(rows["actions"], index) for agent, (rows, index) in acting.items()
            }
            client.log_action(episode_id, {**leaving, **seen}, actions)
            leaving, pausing = {}, set()
        done = ends.get(time, {})
        at_end = {agent: rows for agent, (rows, index) in done.items() if index == len(rows) - 1}
        leaving |= {
            agent: row_of(rows["next_obs"], -1)
            for agent, rows in at_end.items()
            if "next_obs_valid" not in rows or rows["next_obs_valid"][-1]
        }
        over = {agent: rows for agent, rows in at_end.items() if rows is agents[agent][-1]}
        pausing = at_end.keys() - over.keys()
        terminated = {agent: True for agent, rows in over.items() if rows["terminateds"][-1]}
        truncated = {
            agent: True
            for agent, rows in over.items()
            if rows["truncateds"][-1] or agent not in terminated
        }
        flags: Mapping[str, Any] = {"terminateds": terminated, "truncateds": truncated}
        told: dict[str, Any] = {name: by_agent for name, by_agent in flags.items() if by_agent}
        if done:
            client.log_returns(
                episode_id,
                {agent: float(rows["rewards"][index]) for agent, (rows, index) in done.items()},
                **(told if time < last - 1 else {}),
            )
    client.end_episode(
        episode_id,
        leaving,
        truncated=not all(parts[-1]["terminateds"][-1] for parts in agents.values()),
        **told,
    )
