"""Whether observations and records, one by one, are what an actor's spaces have agreed. Pure.

For actors that join from elsewhere (`replies.py`): one wrong element would raise in the middle of
the learner. Whether there is one element per env was seen before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from envbus.actors.arrays.finite import FLOAT32_MAX
from envbus.actors.env.agents import ALL
from envbus.actors.protocol import StepResult
from envbus.actors.spaces.agent_spaces import AgentID, RecordSpace
from envbus.actors.spaces.forms import CheckForm, check_form_of
from envbus.bus.brief import brief

__all__ = ["Elements"]

_FLAGS: Final = ("terminateds", "truncateds")
_DICTS: Final = ("observations", "rewards", *_FLAGS, "infos")
#: An agent's id becomes an item of a column of these, if it is an integer.
_IDS: Final = np.iinfo(np.int64)
#: Agents that an env has not named beforehand, in one episode: something is kept of each.
_MAX_STRANGERS: Final = 1 << 14


class Elements:
    """The elements that one actor sends.

    It remembers which agents are done in the episodes that run: one that is observed again would
    end the learner's episode by an error.

    Args:
        space: Observation space of one env.
        first_env_id: The pool's number of the actor's first env.
        autoreset_mode: Of the pool.
    """

    def __init__(
        self, space: gymnasium.Space[Any], first_env_id: int, autoreset_mode: AutoresetMode
    ) -> None:
        self._first_env_id = first_env_id
        self._mode = autoreset_mode
        self._is_record = isinstance(space, RecordSpace)
        self._agents: dict[AgentID, tuple[type[Any], CheckForm]] = {}
        if isinstance(space, RecordSpace):
            # Agents may share a space.
            checks = {id(sub): check_form_of(sub) for sub in space.spaces.values()}
            self._agents = {a: (type(a), checks[id(sub)]) for a, sub in space.spaces.items()}
        else:
            self._check = check_form_of(space)
        #: By slot: agents whose flag was set in this episode, and whether they have had their last
        #: observation.
        self._flagged: dict[int, dict[AgentID, bool]] = {}
        #: By slot: agents of this episode that the env has not named beforehand.
        self._strangers: dict[int, set[AgentID]] = {}

    def forget(self) -> None:
        """Of which episodes the next elements are is not known: replies were given up."""
        self._flagged.clear()
        self._strangers.clear()

    def wrong(
        self,
        slots: Sequence[int],
        singles: Sequence[Any] | None,
        reply: StepResult,
        *,
        is_step: bool,
    ) -> str | None:
        """Return what is wrong with an actor's elements, for people; None: nothing is.

        Args:
            slots: Whose they are.
            singles: Observations; None: those of a fixed size are checked as arrays.
            reply: To a step or a reset.
            is_step: Which of these.
        """
        failed = {error.slot for error in reply.errors}
        if singles is None:
            return None
        for place, slot in enumerate(slots):
            if slot in failed:
                continue
            wrong = self._wrong_single(place, slot, singles[place], reply, is_step=is_step)
            if wrong is not None:
                return f"for env {self._first_env_id + slot}: {wrong}"
        return None

    def _wrong_single(
        self, place: int, slot: int, single: Any, reply: StepResult, *, is_step: bool
    ) -> str | None:
        if not self._is_record:
            wrong = self._check(single)
            return wrong and f"observation{wrong}"
        wrong = self._wrong_record(single)
        if wrong is not None:
            return f"record{wrong}"
        if self._mode is AutoresetMode.SAME_STEP:  # the flags may be of the episode before
            return None
        for name, column in zip(_FLAGS, (reply.terminations, reply.truncations), strict=True):
            told = is_step and column is not None and bool(column[place])
            if bool(single[name][ALL]) is not told:
                return f"record['{name}']['{ALL}'] that is {not told}, and {told} for the env"
        return self._wrong_order(slot, single, is_step=is_step)

    def _wrong_order(self, slot: int, record: Mapping[str, Any], *, is_step: bool) -> str | None:
        """Return what cannot follow the records before; keep what this one says."""
        if self._mode is not AutoresetMode.DISABLED:  # nobody follows agents through an episode
            return None
        observed = record["observations"].keys()
        now = {agent for name in _FLAGS for agent, flag in record[name].items() if flag}
        if not is_step:
            self._strangers.pop(slot, None)
        told = {ALL}.union(observed, *(record[name] for name in ("rewards", *_FLAGS)))
        if new := told - {ALL} - self._agents.keys():
            strangers = self._strangers.setdefault(slot, set())
            strangers |= new
            if len(strangers) > _MAX_STRANGERS:
                return f"over {_MAX_STRANGERS} agents in one episode that it has not named"
        if not is_step:
            # The flag of an agent that is observed at once says nothing: it is asked to act.
            self._flagged[slot] = dict.fromkeys(now - observed, False)
            return None
        flagged = self._flagged.setdefault(slot, {})
        if flagged:
            for agent in observed - now:
                if flagged.get(agent):
                    return f"record['observations'][{brief(agent)}] of an agent that is done"
        for agent in now:
            flagged.setdefault(agent, False)
        for agent in flagged.keys() & observed:
            flagged[agent] = True
        return None

    def _wrong_record(self, record: Any) -> str | None:
        if type(record) is not dict:
            return f" that is {brief(record)}"
        for name in _DICTS:
            if type(record.get(name)) is not dict:
                return f"[{name!r}] that is {brief(record.get(name))}"
        if not _are_ids(record.get("agents")):
            return f"['agents'] that are {brief(record.get('agents'))}"
        for agent, observation in record["observations"].items():
            known = self._agents.get(agent)
            if (wrong := self._wrong_id(agent)) is not None:
                pass
            elif known is not None:
                wrong = known[1](observation)
            elif self._agents and all(check(observation) for _, check in self._agents.values()):
                wrong = " of no form that the env has named"
            if wrong is not None:
                return f"['observations'][{brief(agent)}]{wrong}"
        for agent, reward in record["rewards"].items():
            wrong = self._wrong_id(agent)
            if wrong is not None or not _is_number(reward):
                return f"['rewards'][{brief(agent)}]{wrong or f' that is {brief(reward)}'}"
        for name in _FLAGS:
            flags = record[name]
            if ALL not in flags:
                return f"[{name!r}] without {ALL!r}"
            for agent, flag in flags.items():
                wrong = None if agent == ALL else self._wrong_id(agent)
                if wrong is not None or not _is_flag(flag):
                    return f"[{name!r}][{brief(agent)}]{wrong or f' that is {brief(flag)}'}"
        for agent, info in record["infos"].items():
            if not isinstance(info, dict):
                return f"['infos'][{brief(agent)}] that is {brief(info)}"
        return None

    def _wrong_id(self, agent: AgentID) -> str | None:
        """Return why this cannot be an agent's; agents may come whom the env has not named."""
        known = self._agents.get(agent)
        is_integer = isinstance(agent, int | np.integer) and not isinstance(agent, bool)
        is_usual = is_integer or isinstance(agent, str | tuple)
        # 1.0 and True are found where 1 was named.
        if agent == ALL or not (is_usual or (known is not None and type(agent) is known[0])):
            return ", which is no agent's id"
        if is_integer and not _IDS.min <= cast("int", agent) <= _IDS.max:
            return ", which is too large"
        return None


def _are_ids(agents: Any) -> bool:
    if type(agents) is not list:
        return False
    try:
        set(agents)
    except TypeError:  # one has no hash
        return False
    return True


def _is_number(reward: Any) -> bool:
    """Return whether this can be added up, and becomes a float."""
    kind = type(reward)
    if kind is float:
        return True
    if isinstance(reward, np.ndarray | np.generic):
        return not reward.shape and reward.dtype.kind in "biuf"
    return isinstance(reward, int) and abs(reward) <= FLOAT32_MAX


def _is_flag(flag: Any) -> bool:
    kind = type(flag)
    if kind is bool or kind is np.bool_:
        return True
    if isinstance(flag, np.ndarray):  # some envs give an array of one flag
        return flag.size == 1 and flag.dtype.kind in "biu"
    return isinstance(flag, int | np.integer)
