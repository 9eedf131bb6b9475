"""One agent's transitions in one episode, kept in columns. Pure.

Leaves out when an agent observes, acts and ends, and what an env step is (`episode.py`).
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.actors.arrays.finite import FLOAT32_MAX
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.batches.nested import ArrayBuffer, Tree, TreeBuffer, as_rows, buffer_for, row_of

__all__ = ["AgentID", "Trajectory", "agent_id_column"]

AgentID: TypeAlias = Hashable
_Buffer: TypeAlias = ArrayBuffer | TreeBuffer
#: Rows to make room for in an agent's first fragment; later ones go by the one before.
_FIRST_CAPACITY = 32


class Trajectory:
    """Observations, actions and rewards of one agent, cut into fragments that join without a gap.

    Row i has observation i and, as its `next_obs`, observation i + 1: each is stored once. What
    is handed in is copied, so that it may be a view of memory that the env writes again.

    Args:
        infos: Whether to keep an info per row.
        connect_reward: As of `EpisodeRecorder`.
    """

    def __init__(
        self,
        agent_id: AgentID,
        *,
        infos: bool = False,
        connect_reward: Callable[[AgentID, str, float], float] | None = None,
    ) -> None:
        self.policy_id: str | None = None
        #: An action was recorded for which no observation came yet.
        self.acted = False
        #: Its part of the episode is over.
        self.done = False
        #: OR of all flags that came so far.
        self.terminated = False
        self.truncated = False
        #: Sum of what came since the last row was completed.
        self.reward = 0.0
        #: Complete rows of this fragment, and of all.
        self.num_rows = 0
        self.total_rows = 0
        #: Rows of this fragment before the last `break_off`; not in `num_rows`.
        self.broken_off: list[SampleBatch] = []
        self._agent_id = agent_id
        self._ragged = False
        self._capacity = _FIRST_CAPACITY
        self._observations: _Buffer | None = None
        self._actions: _Buffer | None = None
        self._extras: dict[str, _Buffer] = {}
        self._info: dict[str, Any] = {}
        self._infos: list[dict[str, Any]] | None = [] if infos else None
        #: Sums in float64; they become float32 columns.
        self._rewards = array("d")
        self._ts = array("q")
        self._versions = array("q")
        self._last_valid = True
        self._connect_reward = connect_reward
        #: What the last row's is made of, where that is something else.
        self._given_reward = 0.0
        #: Of the last row that was cut off since it was begun.
        self._last_reward: float | None = None

    @property
    def last_reward(self) -> float | None:
        """Reward of the last complete row that leads to the present observation; None: no row."""
        return self._rewards[self.num_rows - 1] if self.num_rows else self._last_reward

    @property
    def observed(self) -> bool:
        """Whether the agent got an observation, and was not broken off since."""
        return self._observations is not None

    @property
    def goes_on(self) -> bool:
        """Whether its next observation completes a row and asks for another action."""
        return self.acted and not (self.done or self.terminated or self.truncated)

    def begin(self, observation: Tree, policy_id: str, *, ragged: bool = False) -> None:
        """Take the agent's first observation, or the first since it was broken off.

        With `ragged` observations and actions are objects: their space has no fixed size.
        """
        self._ragged = ragged
        self._observations = buffer_for(observation, self._capacity, ragged=ragged)
        self._last_reward = None
        self.policy_id = policy_id

    def break_off(self, constants: Mapping[str, int]) -> None:
        """Forget the last observation as the begin of a row: the agent's action did not happen.

        The row that led there stays, truncated; the next observation does not follow from it.
        """
        self.acted = False
        if self.num_rows:
            batch = self.cut(constants)
            batch["truncateds"][-1] = True
            self.broken_off.append(batch)
        self._observations, self._actions, self._extras = None, None, {}
        self._versions = array("q")

    def forget_reward(self) -> float:
        """Return what came since the last row was completed, and forget it, and the infos."""
        reward, self.reward, self._info = self.reward, 0.0, {}
        return reward

    def act(self, action: Tree, policy_version: int, extras: Mapping[str, Tree]) -> None:
        """Open a row: the agent's answer to its last observation.

        Raises:
            ValueError: Structure, shape or names are not those of the rows before.
        """
        if self._actions is None:
            self._actions = buffer_for(action, self._capacity, ragged=self._ragged)
            for name, value in extras.items():
                self._extras[name] = buffer_for(value, self._capacity)
        else:
            if extras.keys() != self._extras.keys():
                raise ValueError(
                    f"extra columns are {sorted(extras)}, earlier ones {sorted(self._extras)}"
                )
            name = "action"
            try:
                self._actions.append(action)
                for name, value in extras.items():
                    self._extras[name].append(value)
            except ValueError as exc:
                raise ValueError(f"{name} {exc}") from None
        self._versions.append(policy_version)
        self.acted = True

    def add_reward(self, reward: float) -> bool:
        """Add to the open row, or after the end to the last.

        False: that one has left already, or several would add up to what float32 cannot express.
        """
        if not self.done:
            total = self.reward + reward
            if abs(total) > FLOAT32_MAX >= abs(reward):
                return False
            self.reward = total
        elif self.num_rows and abs(self._rewards[-1] + reward) <= FLOAT32_MAX:
            if self._connect_reward is None:
                self._rewards[-1] += reward
            elif reward:
                self._rewards[-1] = self._connected(self._given_reward + reward)
        else:
            return False
        return True

    def flag(self, *, terminated: bool = False, truncated: bool = False) -> None:
        """OR the flags; one that is done keeps those that stand on its last row."""
        if not self.done:
            self.terminated |= terminated
            self.truncated |= truncated

    def add_info(self, info: Mapping[str, Any]) -> None:
        """Keep what is told about the step; what came without an observation is added to."""
        if self._infos is not None:
            self._info = {**self._info, **info}

    def complete(self, observation: Tree, t: int) -> None:
        """Close the open row with the observation that followed.

        Raises:
            ValueError: It has another structure or shape than the one before.
        """
        assert self.acted
        assert self._observations is not None
        try:
            self._observations.append(observation)
        except ValueError as exc:
            raise ValueError(f"observation {exc}") from None
        self._close_row(t)

    def complete_blank(self, t: int) -> None:
        """Close the open row though no observation followed: `next_obs` is marked as missing."""
        assert self.acted
        assert self._observations is not None
        self._observations.append_blank()
        self._last_valid = False
        self._close_row(t)

    def end(self) -> float:
        """Close the trajectory; the last row has the flags, and takes a reward without a row.

        Returns:
            That reward, where there is no row to take it.
        """
        self.done = True
        reward, self.reward = self.reward, 0.0
        return 0.0 if self.add_reward(reward) else reward

    def cut_off(self) -> None:
        """End it as truncated where it stands; an open row, its reward too, is forgotten."""
        if self.acted:
            self.acted, self.reward = False, 0.0
        self.terminated, self.truncated = False, True
        self.end()

    def drop(self) -> int:
        """End it and forget this fragment's rows; return how many those were."""
        dropped = self.num_rows + sum(map(len, self.broken_off))
        self.num_rows, self.broken_off = 0, []
        self.total_rows -= dropped
        self.done = True
        return dropped

    def take(self, end: int, constants: Mapping[str, int]) -> list[SampleBatch]:
        """Return the complete rows of env steps before `end`, broken where they were broken off."""
        taken, kept = [], []
        for batch in self.broken_off:
            first, rest = split_at(batch, end)
            taken += [first] if len(first) else []
            kept += [rest] if len(rest) else []
        self.broken_off = kept
        if count := bisect.bisect_left(self._ts, end, 0, self.num_rows):
            taken.append(self.cut(constants, count))
        return taken

    def ts(self) -> list[npt.NDArray[np.int64]]:
        """Return the env steps that completed the rows of this fragment."""
        return [batch["t"] for batch in self.broken_off] + [
            np.array(self._ts[: self.num_rows], np.int64)
        ]

    def cut(self, constants: Mapping[str, int], count: int | None = None) -> SampleBatch:
        """Return the first `count` complete rows, None: all of them, and go on behind these.

        An open row stays: it belongs to the fragment that it is completed in.
        """
        count = self.num_rows if count is None else count
        assert count
        assert self._observations is not None
        assert self._actions is not None
        rewards = np.array(self._rewards[:count], np.float32)
        terminateds, truncateds = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        valid = np.ones(count, np.bool_)
        if self.done and count == self.num_rows:
            terminateds[-1], truncateds[-1] = self.terminated, self.truncated
            valid[-1] = self._last_valid
        columns: dict[str, Tree] = {
            "obs": self._observations.rows(0, count),
            "actions": self._actions.rows(0, count),
            "rewards": rewards,
            "terminateds": terminateds,
            "truncateds": truncateds,
            "next_obs": self._observations.rows(1, count + 1),
            "next_obs_valid": valid,
            "agent_id": agent_id_column(self._agent_id, count),
            "t": np.array(self._ts[:count], np.int64),
            "policy_version": np.array(self._versions[:count], np.int64),
        }
        for name, value in constants.items():
            columns[name] = np.full(count, value, np.int64)
        if self._infos is not None:
            columns["infos"] = as_rows(self._infos[:count])
        for name, buffer in self._extras.items():
            columns[name] = buffer.rows(0, count)
        batch = SampleBatch(columns)
        self._go_on(count)
        return batch

    def _connected(self, reward: float) -> float:
        """Return what the last row has of its reward."""
        assert self._connect_reward is not None
        assert self.policy_id is not None
        self._given_reward = reward
        return self._connect_reward(self._agent_id, self.policy_id, reward)

    def _close_row(self, t: int) -> None:
        reward = self.reward
        self._rewards.append(reward if self._connect_reward is None else self._connected(reward))
        self._ts.append(t)
        if self._infos is not None:
            self._infos.append(self._info)
            self._info = {}
        self.reward = 0.0
        self.acted = False
        self.num_rows += 1
        self.total_rows += 1

    def _go_on(self, count: int) -> None:
        """Begin the next fragment: the last observation is its first, an open row its first row."""
        self._capacity = count + 1
        self._last_reward = self._rewards[count - 1]
        assert self._observations is not None
        if count < self.num_rows:
            assert self._actions is not None
            self._observations = self._observations.behind(count)
            self._actions = self._actions.behind(count)
            self._extras = {name: buffer.behind(count) for name, buffer in self._extras.items()}
        elif self.done:
            # Nothing follows but perhaps a late reward.
            self._actions, self._extras = None, {}
        else:
            first = row_of(self._observations.rows(count, count + 1), 0)
            self._observations = buffer_for(first, self._capacity, ragged=self._ragged)
            if self.acted:
                assert self._actions is not None
                action = row_of(self._actions.rows(count, count + 1), 0)
                self._actions = buffer_for(action, self._capacity, ragged=self._ragged)
                self._extras = {
                    name: buffer_for(row_of(buffer.rows(count, count + 1), 0), self._capacity)
                    for name, buffer in self._extras.items()
                }
            else:
                self._actions, self._extras = None, {}
        self._rewards, self._ts = self._rewards[count:], self._ts[count:]
        self._versions = self._versions[count:]
        if self._infos is not None:
            self._infos = self._infos[count:]
        self.num_rows -= count


def split_at(rows: SampleBatch, end: int) -> tuple[SampleBatch, SampleBatch]:
    """Return an agent's rows of env steps before `end`, and the others, as views."""
    row = int(np.searchsorted(rows["t"], end))
    return rows[:row], rows[row:]


def agent_id_column(agent_id: AgentID, count: int) -> npt.NDArray[Any]:
    """Return `(count,)`: int64 for an integer that is one, else a string."""
    if isinstance(agent_id, int | np.integer) and -(2**63) <= agent_id < 2**63:
        return np.full(count, agent_id, np.int64)
    return np.full(count, str(agent_id))
