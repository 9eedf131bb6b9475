"""Asks policies for the actions of agents: rows of one policy and one form go together."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from envbus.actors.spaces.spaces import Space
from envbus.bus.brief import brief
from envbus.bus.wire.messages import Tree as Wrapped
from envbus.runner.batches.metrics import PerfTimers, SampleMetrics
from envbus.runner.batches.nested import Tree, as_rows, leaves_of, map_tree, row_of
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.policies.policy import Policy
from envbus.runner.policies.policy_output import RECORDED_INPUTS, PolicyAnswer, ask, owned
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.policy_inputs import ActionForm
from envbus.runner.sampling.quotas import Slot

__all__ = ["NO_VERSION", "AgentObservation", "Inference", "ask_rows", "by_form", "fitted", "stack"]

logger = logging.getLogger("envbus.runner")

#: `policy_version` of an action that no policy has chosen.
NO_VERSION = -1
#: Extras that are about the policy's own action, and say nothing of one that was chosen elsewhere.
_OF_THE_ACTION = ("action_logp", "action_prob")


class AgentObservation(NamedTuple):
    """An agent's observation."""

    slot: Slot
    agent_id: AgentID
    observation: Tree


class Inference:
    """Chooses actions, and opens the rows that they stand in.

    A policy is also asked where the action was chosen elsewhere (off-policy): its state goes on,
    and rows have the same columns. It is not where a simulator's own copy of it has chosen.

    Args:
        is_ragged: Whether an agent's observations or actions have no fixed size.
        lists_actions: Whether its actions have none: a policy gives them one by one.
        action_space: Its action space; None: it is not known.
        metrics: Count the env steps of samples.
        asking: Held while a policy is asked: its weights may be set by another thread.
        off_policy: Whether there can be actions that were chosen elsewhere; rows say so then, in
            a column.
    """

    def __init__(
        self,
        config: RunnerConfig,
        timers: PerfTimers,
        is_ragged: Callable[[AgentID], bool],
        lists_actions: Callable[[AgentID], bool],
        action_space: Callable[[AgentID], Space | None],
        asking: AbstractContextManager[Any],
        metrics: SampleMetrics,
        *,
        off_policy: bool,
    ) -> None:
        self._config = config
        self._timers = timers
        self._is_ragged = is_ragged
        self._lists_actions = lists_actions
        self._action_space = action_space
        self._asking = asking
        self._metrics = metrics
        self._off_policy = off_policy
        #: By policy id: the policy, and what it adds to a row; filled where it was needed.
        self._like: dict[str, tuple[Policy, Mapping[str, Tree]]] = {}
        self._told_of: set[str] = set()

    def act(self, slots: Sequence[Slot], explore: bool) -> dict[int, dict[AgentID, Any]]:
        """Return what is to be sent, by env and agent; an env without acting agents has `{}`."""
        actions: dict[int, dict[AgentID, Any]] = {slot.env_id: {} for slot in slots}
        asked = [
            AgentObservation(slot, agent_id, observation)
            for slot in slots
            for agent_id, observation in slot.seen.items()
        ]
        groups = by_form(
            asked,
            # Episodes may have had a policy of that name each.
            lambda one: (
                name := one.slot.policy_ids[one.agent_id],
                id(one.slot.policies[name]),
                _has_chosen(one.slot, one.agent_id, name),
            ),
            self._is_ragged,
        )
        for (policy_id, _, has_chosen), group in groups:
            if has_chosen:
                self._take_over(policy_id, group)
            else:
                self._ask(policy_id, group, explore, actions)
        return actions

    def _ask(
        self,
        policy_id: str,
        group: Sequence[AgentObservation],
        explore: bool,
        actions: dict[int, dict[AgentID, Any]],
    ) -> None:
        clock = time.perf_counter
        begin = clock()
        policy = group[0].slot.policies[policy_id]
        inputs, form = None, None
        if names := getattr(policy, "wanted_inputs", None):
            inputs, form = self._inputs(names, policy_id, group)
        answer = self._ask_rows(policy, group, inputs, explore=explore)
        asked = clock()
        sent = chosen = answer.actions
        listed = answer.listed
        connector = self._config.connector("action", policy_id)
        if connector is not None:  # it may write to what it is given; the batch has the policy's
            given = copy.deepcopy(chosen) if listed else owned(chosen)
            sent = connector(given, [(one.slot.env_id, one.agent_id) for one in group])
        versions = answer.versions
        count = len(group)
        singles = _rows_of(chosen, count, listed=listed)
        sendable = singles if sent is chosen else _rows_of(sent, count, listed=listed)
        extras = answer.columns().items()
        columns = [(name, _rows_of(values, count)) for name, values in extras]
        for index, (slot, agent_id, _) in enumerate(group):
            action = singles[index]
            own = {name: rows[index] for name, rows in columns}
            version = answer.version if versions is None else int(versions[index])
            slot.policy_version = version
            if answer.told is not None:
                slot.states[agent_id] = own["state_out"]
            if self._off_policy:
                own["off_policy"] = np.bool_(agent_id in slot.off_policy)
            if agent_id in slot.off_policy:
                action, version = slot.off_policy.pop(agent_id), NO_VERSION
                if connector is not None:
                    keys = [(slot.env_id, agent_id)]
                    before = connector.invert(stack([action], ragged=listed), keys)
                    action = row_of(before, 0, ragged=listed)
                own |= {name: _blank(own[name]) for name in _OF_THE_ACTION if name in own}
            assert slot.episode is not None
            slot.episode.act(agent_id, action, policy_version=version, extras=own)
            if form is not None:
                slot.prev_actions[agent_id] = form.cast(action)
            actions[slot.env_id][agent_id] = sendable[index]
        self._timers.add("inference", asked - begin)
        self._timers.add("action_processing", clock() - asked)

    def _take_over(self, policy_id: str, group: Sequence[AgentObservation]) -> None:
        """Open rows of actions that a simulator's copy of the policy has chosen."""
        begin = time.perf_counter()
        listed = self._lists_actions(group[0].agent_id)
        like = self._row_of(policy_id, group[0])
        connector = self._config.connector("action", policy_id)
        names = getattr(group[0].slot.policies[policy_id], "wanted_inputs", ())
        inputs, form = self._inputs(names, policy_id, group)
        for index, (slot, agent_id, _) in enumerate(group):
            choice, action = slot.choice, slot.off_policy.pop(agent_id)
            assert choice is not None
            assert slot.episode is not None
            own, wrong = fitted(choice.extras.get(agent_id, {}), like)
            if wrong and policy_id not in self._told_of:
                self._told_of.add(policy_id)
                logger.warning(
                    "policy %r: simulators that choose actions themselves send other columns than "
                    "the policy here has; they are NaN or 0: %s",
                    policy_id,
                    "; ".join(wrong),
                )
            if "state_out" in own:
                slot.states[agent_id] = own["state_out"]
            if connector is not None:
                before = connector.invert(stack([action], ragged=listed), [(slot.env_id, agent_id)])
                action = row_of(before, 0, ragged=listed)
            own["off_policy"] = np.bool_(False)
            own |= {name: row_of(inputs[name], index) for name in RECORDED_INPUTS if name in inputs}
            slot.policy_version = choice.policy_version
            slot.episode.act(agent_id, action, policy_version=choice.policy_version, extras=own)
            if form is not None:
                slot.prev_actions[agent_id] = form.cast(action)
        self._timers.add("action_processing", time.perf_counter() - begin)

    def _row_of(self, policy_id: str, one: AgentObservation) -> Mapping[str, Tree]:
        """Return what the policy adds to a row: it is asked once."""
        policy = one.slot.policies[policy_id]
        known = self._like.get(policy_id)
        if known is None or known[0] is not policy:
            names = getattr(policy, "wanted_inputs", ())
            inputs, _ = self._inputs(names, policy_id, [one])
            answer = self._ask_rows(policy, [one], inputs, explore=False, fresh=True)
            extras = {
                name: row_of(values, 0)
                for name, values in answer.columns().items()
                if name not in inputs
            }
            known = self._like[policy_id] = (policy, extras)
        return known[1]

    def _ask_rows(
        self,
        policy: Policy,
        group: Sequence[AgentObservation],
        inputs: Mapping[str, Tree] | None,
        *,
        explore: bool,
        fresh: bool = False,
    ) -> PolicyAnswer:
        """Ask about agents alike; with `fresh` as at an episode's begin."""
        agent_id = group[0].agent_id
        with self._asking:
            return ask_rows(
                policy,
                [one.observation for one in group],
                [None if fresh else one.slot.states.get(one.agent_id) for one in group],
                explore=explore,
                ragged=self._is_ragged(agent_id),
                lists_actions=self._lists_actions(agent_id),
                inputs=inputs,
            )

    def _inputs(
        self, names: Sequence[str], policy_id: str, group: Sequence[AgentObservation]
    ) -> tuple[dict[str, Tree], ActionForm | None]:
        """Return what a policy wants to be told besides observations, of agents alike.

        And if it wants to know their last actions, the form that these have.
        """
        form = None
        if "prev_actions" in names:
            agent_id = group[0].agent_id
            connector = self._config.connector("action", policy_id)
            whose = f"agent {agent_id!r}"
            form = ActionForm.of(self._action_space(agent_id), connector, whose)
        one_by_one = {name: [self._input(name, one, form) for one in group] for name in names}
        return {name: stack(values) for name, values in one_by_one.items()}, form

    def _input(self, name: str, one: AgentObservation, form: ActionForm | None) -> Tree:
        slot, episode = one.slot, one.slot.episode
        assert episode is not None
        match name:
            case "prev_actions":
                assert form is not None
                begins = episode.last_reward(one.agent_id) is None
                return form.zero if begins else slot.prev_actions.get(one.agent_id, form.zero)
            case "prev_rewards":
                return np.float32(episode.last_reward(one.agent_id) or 0.0)
            case "t":
                return np.int64(episode.length)
            case "eps_id":
                return np.int64(episode.eps_id)
            case "env_id":
                return np.int64(slot.env_id)
        assert name == "timestep"
        return np.int64(self._metrics.env_steps)


def _has_chosen(slot: Slot, agent_id: AgentID, policy_id: str) -> bool:
    """Return whether a simulator has acted with a copy of this very policy."""
    choice = slot.choice
    return choice is not None and choice.policy_id == policy_id and agent_id in slot.off_policy


def by_form(
    asked: Iterable[AgentObservation],
    key: Callable[[AgentObservation], Any],
    is_ragged: Callable[[AgentID], bool],
) -> list[tuple[Any, list[AgentObservation]]]:
    """Return those together whose key is equal, and whose observations have one form, or none."""
    groups: dict[Any, list[AgentObservation]] = {}
    ragged: dict[AgentID, bool] = {}
    for one in asked:
        if one.agent_id not in ragged:
            ragged[one.agent_id] = is_ragged(one.agent_id)
        name = (key(one), None if ragged[one.agent_id] else _form(one.observation))
        group = groups.get(name)
        if group is None:
            groups[name] = [one]
        else:
            group.append(one)
    return [(name, group) for (name, _), group in groups.items()]


def ask_rows(
    policy: Policy,
    observations: Sequence[Tree],
    states: Sequence[Tree],
    *,
    explore: bool,
    ragged: bool,
    lists_actions: bool,
    inputs: Mapping[str, Tree] | None = None,
) -> PolicyAnswer:
    """Ask a policy about single observations; return its answer in arrays that are nobody else's.

    A state of None is the policy's first one; of a policy without a state all are ignored. Where
    observations have no fixed size (`ragged`), actions of one may be a batch or a list.
    """
    first = policy.initial_state()
    told = None
    if first is not None:
        told = stack([first if state is None else state for state in states])
    rows = stack(observations, ragged=ragged)
    listed = lists_actions or (None if ragged else False)
    count = len(observations)
    answer = ask(policy, rows, told, count, explore=explore, listed=listed, inputs=inputs)
    return answer.owned()


def stack(trees: Sequence[Tree], *, ragged: bool = False) -> Tree:
    """Return rows `(n, ...)` in new memory; an array of objects if they have no fixed size."""
    if ragged:
        return as_rows(trees)
    if len(trees) == 1:
        return map_tree(lambda leaf: np.array(leaf)[np.newaxis], trees[0])
    return map_tree(lambda *leaves: np.stack(leaves), *trees)


def _rows_of(rows: Tree, count: int, *, listed: bool = False) -> Sequence[Tree]:
    """Return the rows one by one; of a batch of one array all at once, which is much faster."""
    if type(rows) is np.ndarray and rows.ndim:
        return list(rows)
    return [row_of(rows, index, ragged=listed) for index in range(count)]


def _form(tree: Tree) -> Any:
    if isinstance(tree, np.ndarray):
        return tree.shape, tree.dtype
    return tuple((path, np.shape(leaf)) for path, leaf in leaves_of(tree))


def fitted(given: Mapping[str, Any], like: Mapping[str, Tree]) -> tuple[dict[str, Tree], list[str]]:
    """Return columns of one row by name, and what is wrong with those that were given.

    Args:
        given: By name, as it came over the wire.
        like: What the runner's policy gives for a row: names, structure, shapes and dtypes. What
            is missing, or is otherwise, is NaN, or 0 where there is no NaN; what is more is left
            out: all rows of a policy have the same columns.
    """
    row: dict[str, Tree] = {}
    wrong = []
    for name, expected in like.items():
        try:
            row[name] = _cast(given[name], expected)
        except KeyError:
            wrong.append(f"{name} is missing")
            row[name] = _blank(expected)
        except (ValueError, TypeError, OverflowError) as exc:
            wrong.append(f"{name}: {exc}")
            row[name] = _blank(expected)
    return row, wrong


def _cast(value: Any, expected: Tree) -> Tree:
    if type(value) is Wrapped:
        value = value.value
    if isinstance(expected, dict):
        if not isinstance(value, Mapping) or value.keys() != expected.keys():
            raise ValueError(f"expected a map of {sorted(expected)}")
        return {key: _cast(value[key], part) for key, part in expected.items()}
    if isinstance(expected, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            raise ValueError(f"expected {len(expected)} values")
        return tuple(_cast(one, part) for one, part in zip(value, expected, strict=True))
    dtype = np.result_type(expected)
    array = np.asarray(value)
    kinds = "biufc" if dtype.kind == "c" else "biuf"
    if array.dtype.kind not in kinds or array.shape != np.shape(expected):
        raise ValueError(
            f"expected {dtype} of shape {np.shape(expected)}, got {array.dtype} of {array.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
        cast = array.astype(dtype)
    # A float may be rounded, but not become infinite, as many do in half precision.
    is_float = dtype.kind in "fc"
    if not (np.isfinite(cast) == np.isfinite(array) if is_float else cast == array).all():
        raise ValueError(f"expected {dtype}, got {brief(array.tolist())}")
    return cast


def _blank(like: Tree) -> Tree:
    """Return NaN, or 0 where there is no NaN, in the form of a row's column."""

    def blank(leaf: Any) -> Any:
        dtype = np.result_type(leaf)
        return np.full(np.shape(leaf), np.nan if dtype.kind in "fc" else 0, dtype)

    return map_tree(blank, like)
