"""What envs have brought, row by row, until their caller takes it.

Leaves out which rows are ready (`env_states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple, TypeAlias

import gymnasium
import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from envbus.actors.arrays.blocks import Blocks
from envbus.actors.arrays.info_columns import InfoReader
from envbus.actors.arrays.packing import unpack_records
from envbus.actors.protocol import StepResult
from envbus.actors.spaces import spaces
from envbus.bus.brief import cut
from envbus.runner.errors import Fault, FaultInfo

__all__ = ["Batch", "EnvResults", "Infos", "ObservationStore", "Rows", "merge_infos"]

#: By env, those infos that are not empty.
Infos: TypeAlias = dict[int, dict[str, Any]]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What `ActorPool.recv` returns: one row per env that was ready. Arrays are the caller's."""

    #: `(n,)` int64: which envs; pass them to `send` with the actions.
    env_ids: npt.NDArray[np.int64]
    #: As Gymnasium batches `n` observations: an array `(n, *shape)`, or a dict or tuple of them.
    observations: Any
    #: `(n,)` float64; 0 after a reset.
    rewards: npt.NDArray[np.float64]
    #: `(n,)` bool.
    terminations: npt.NDArray[np.bool_]
    #: `(n,)` bool. Under SAME_STEP also where a fault cut off the episode before.
    truncations: npt.NDArray[np.bool_]
    #: Merged as a vector env of `n` envs merges them: rows are those of this batch.
    infos: dict[str, Any]
    #: `(n,)` int64: which life of the env each row comes from, from 0.
    incarnations: npt.NDArray[np.int64]
    #: Envs that failed, alone or with their actor, since the last batch: their episodes are over,
    #: without a last row. The first observation of their next episode comes by itself; under
    #: SAME_STEP in a row that is truncated, with the last one as `final_obs`; or, if the episode
    #: had ended by itself and its automatic reset failed, in the row of its last step.
    faults: list[Fault]
    #: Envs that were asked and have not answered, if the time-out ended this `recv`.
    late: list[int]


class Rows(NamedTuple):
    """What `ActorPool.step_in_place` returns: views of what the next step overwrites."""

    #: As Gymnasium batches `num_envs` observations.
    observations: Any
    #: `(num_envs,)` float64; 0 after a reset.
    rewards: npt.NDArray[np.float64]
    #: `(num_envs,)` bool.
    terminations: npt.NDArray[np.bool_]
    #: `(num_envs,)` bool.
    truncations: npt.NDArray[np.bool_]


class ObservationStore:
    """The latest observation of each env, batched as Gymnasium batches them.

    Args:
        space: The single observation space.
        num_envs: Envs in the batch.
        leaves: The blocks' arrays, one per leaf of the space, each `(num_envs, *leaf_shape)`;
            None if the space has no fixed size: then `put` collects single observations.
    """

    def __init__(
        self,
        space: gymnasium.Space[Any],
        num_envs: int,
        leaves: Sequence[npt.NDArray[Any]] | None,
    ) -> None:
        self._space = space
        self._num_envs = num_envs
        self._leaves = leaves
        self._singles: list[Any] = [None] * num_envs
        self._batch: Any = None
        #: The only array of a space that is one.
        self._only: npt.NDArray[Any] | None = None
        #: What `remember` has kept: leaves, or single observations.
        self._kept: list[Any] | None = None
        if leaves is not None:
            self._structure = spaces.structurer(space)
            self._batch = self._structure(leaves)
            if isinstance(self._batch, np.ndarray):
                self._only = self._batch

    def put_arrays(self, rows: Any, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write leaves that came in a message, each `(len(rows), *leaf_shape)`."""
        assert self._leaves is not None
        for leaf, array in zip(self._leaves, arrays, strict=True):
            leaf[rows] = array

    def put_singles(self, env_ids: Sequence[int], observations: Sequence[Any]) -> None:
        """Remember single observations of a space without a fixed size."""
        for env_id, observation in zip(env_ids, observations, strict=True):
            self._singles[env_id] = observation

    def batch(self, *, copy: bool) -> Any:
        """Return the observations of all envs.

        Args:
            copy: Return arrays of the caller's own; else views that the next step overwrites.
        """
        if self._leaves is None:
            batch = _concatenate(self._space, self._singles)
            return deepcopy(batch) if copy else batch
        if not copy:
            return self._batch
        if self._only is not None:
            return self._only.copy()
        return self._structure([leaf.copy() for leaf in self._leaves])

    def select(self, env_ids: npt.NDArray[np.int64], *, copy: bool = True) -> Any:
        """Return a batch of the observations of `env_ids`.

        Args:
            env_ids: Which, in this order.
            copy: Return arrays of the caller's own; else views where the envs are neighbours in
                order.
        """
        if self._leaves is not None:
            rows: Any = env_ids
            # Not `np.diff`, which takes longer than all else here.
            if not copy and len(env_ids) and not np.count_nonzero(env_ids[1:] - env_ids[:-1] != 1):
                rows = slice(int(env_ids[0]), int(env_ids[-1]) + 1)
            return self._structure([leaf[rows] for leaf in self._leaves])
        singles = [self._singles[env_id] for env_id in env_ids]
        return deepcopy(_concatenate(self._space, singles))

    def remember(self, env_ids: Sequence[int] | npt.NDArray[np.int64] | None = None) -> None:
        """Keep the present observations of some envs for `before`; None: of all."""
        present = self._singles if self._leaves is None else self._leaves
        if self._kept is None:
            self._kept = deepcopy(list(present))
        elif self._leaves is None:
            for env_id in range(self._num_envs) if env_ids is None else env_ids:
                self._kept[env_id] = self._singles[env_id]
        else:
            rows: Any = slice(None) if env_ids is None else env_ids
            for kept, leaf in zip(self._kept, self._leaves, strict=True):
                kept[rows] = leaf[rows]

    def before(self, env_id: int) -> Any:
        """Return one env's observation as it was remembered, the caller's own."""
        assert self._kept is not None, "nothing was remembered"
        if self._leaves is None:
            return deepcopy(self._kept[env_id])
        return self._structure([leaf[env_id].copy() for leaf in self._kept])

    def arrays(self, env_id: int) -> list[npt.NDArray[Any]]:
        """Return the arrays of one env's observation, the caller's own; not those within others."""
        if self._leaves is not None:
            return [leaf[env_id].copy() for leaf in self._leaves]
        single = self._singles[env_id]
        return [single.copy()] if isinstance(single, np.ndarray) else []

    def single(self, env_id: int) -> Any:
        """Return one env's observation, the caller's own."""
        if self._leaves is None:
            return self._singles[env_id]
        return self._structure([leaf[env_id].copy() for leaf in self._leaves])


def _concatenate(space: gymnasium.Space[Any], singles: Sequence[Any]) -> Any:
    out: Any = create_empty_array(space, n=len(singles), fn=np.zeros)
    # NumPy stacks at least one array; without any a batch tells of faults only.
    return concatenate(space, singles, out) if len(singles) else out


#: Reward and flags of a row that a fault has cut off.
_CUT_OFF: Final = (0.0, False, True)
#: What an info tells of the episode that has ended.
_FINAL_KEYS: Final = ("final_obs", "final_info")


class CutEpisodes:
    """SAME_STEP: the episodes that faults cut off, until the row after them was received.

    That row looks like any in which an episode ends: truncated, with `final_obs`. If the episode
    had ended by itself, and only the next one failed, it is what its last step has brought.

    Args:
        observations: Of the pool.
        blocks: Of the pool; has rewards and flags.
        num_envs: How many there are.
        remembers: Keep the last observations, which faults may have to tell.
    """

    def __init__(
        self,
        observations: ObservationStore,
        blocks: Blocks,
        num_envs: int,
        *,
        remembers: bool = True,
    ) -> None:
        self._observations = observations
        self._flags = blocks.rewards, blocks.terminations, blocks.truncations
        #: Whether the caller has an observation of the env's present episode.
        self._shown = np.zeros(num_envs, np.bool_)
        #: Whether an action was sent since, so that the row may hold another one.
        self._asked = np.zeros(num_envs, np.bool_)
        self._remembers = remembers
        #: By env: its info, and its reward and flags.
        self._cut: dict[int, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        #: The same, of those that had ended by themselves, as long as the row of that is owed.
        self._ended: dict[int, tuple[dict[str, Any], tuple[Any, ...]]] = {}

    def on_send(self, env_ids: list[int]) -> None:
        """Actions are about to be sent to these envs."""
        if self._remembers:
            asked = self._asked
            if np.count_nonzero(asked):  # by steps that were given up: their rows were not received
                env_ids = [env_id for env_id in env_ids if not asked[env_id]]
            self._observations.remember(None if len(env_ids) == len(asked) else env_ids)
            asked[env_ids] = True

    def on_receive(self, env_ids: npt.NDArray[np.int64]) -> None:
        """The caller gets the rows of these envs."""
        self._shown[env_ids] = True
        self._asked[env_ids] = False
        if self._cut:
            self._drop(env_ids.tolist())

    def on_reset(self, env_ids: Sequence[int]) -> None:
        """The caller has these envs reset: it ends their episodes itself."""
        self._shown[list(env_ids)] = False
        self._asked[list(env_ids)] = False
        self._drop(env_ids)

    def on_drop(self) -> list[int]:
        """Forget the rows of steps that the caller has given up; return whose they were."""
        dropped = list(self._ended)
        self._ended.clear()
        return dropped

    def on_fault(self, fault: Fault, unread: dict[str, Any]) -> None:
        """An env has failed; `unread` is the info of a row that the caller did not receive."""
        env_id = fault.env_id
        if not self._shown[env_id]:
            return
        kept = self._observations
        last = kept.before(env_id) if self._asked[env_id] else kept.single(env_id)
        info: dict[str, Any] = {"final_obs": last, "final_info": {"fault": fault.info()}}
        self._cut[env_id] = info, _CUT_OFF
        if "final_obs" in unread:
            info = {key: unread[key] for key in _FINAL_KEYS if key in unread}
            self._ended[env_id] = info, self._row(env_id)
        self._shown[env_id] = self._asked[env_id] = False

    def keep(self, env_id: int, info: dict[str, Any]) -> None:
        """An env whose episode has ended leaves for a fresh one: the row tells of both."""
        self._cut[env_id] = info, _CUT_OFF
        self._ended[env_id] = info, self._row(env_id)
        self._shown[env_id] = self._asked[env_id] = False

    def tell(self, env_id: int, info: dict[str, Any]) -> dict[str, Any]:
        """Have an env's row tell of the episode before it, if one was cut off; return its info."""
        cut = self._ended.get(env_id) or self._cut.get(env_id)
        if cut is None:
            return info
        last, row = cut
        for array, value in zip(self._flags, row, strict=True):
            array[env_id] = value
        return {**info, **last}

    def _row(self, env_id: int) -> tuple[Any, ...]:
        return tuple(array[env_id] for array in self._flags)

    def _drop(self, env_ids: Sequence[int]) -> None:
        for env_id in env_ids:
            self._cut.pop(env_id, None)
            self._ended.pop(env_id, None)


class EnvResults:
    """The last result of each env.

    Args:
        observation_space: Of one env.
        num_envs: How many there are.
        blocks: Arrays of all envs; those of shared memory are written by the actors.
        tells_cuts: Rows tell of an episode before them that a fault cut off.
        remembers: As of `CutEpisodes`.
        remote: As of `merge_infos`.

    Attributes:
        cut: Those episodes; None: rows do not tell of them.
        blocks: Rewards and flags are rows of it.
        observations: Row by row.
        rows: All of them; None where observations have no fixed size.
        misfit: Says whose info of the last batch is left out of it; whoever raises it clears it.
        strange: As `misfit`, of envs elsewhere; whoever lets their actors go clears it.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_envs: int,
        blocks: Blocks,
        *,
        tells_cuts: bool = False,
        remembers: bool = True,
        remote: Collection[int] = frozenset(),
    ) -> None:
        self.blocks = blocks
        self.observations = ObservationStore(observation_space, num_envs, blocks.observations)
        self.cut: CutEpisodes | None = None
        if tells_cuts:
            self.cut = CutEpisodes(self.observations, blocks, num_envs, remembers=remembers)
        self.rows: Rows | None = None
        if blocks.observations is not None:
            self.rows = Rows(
                self.observations.batch(copy=False),
                blocks.rewards,
                blocks.terminations,
                blocks.truncations,
            )
        #: Infos that envs have left in records, and which envs have since they were last asked.
        self._records: InfoReader | None = None
        self._recorded = np.zeros(num_envs, np.bool_)
        #: Whether any may have.
        self._are_recorded = False
        #: All env ids, `(num_envs,)`.
        self.everyone = np.arange(num_envs)
        self._merger = VectorEnv[Any, Any, Any]()
        self._infos: Infos = {}
        self.misfit: ValueError | None = None
        self.strange: dict[int, str] = {}
        self._remote = remote

    def put(
        self,
        members: list[int],
        result: StepResult,
        *,
        is_step: bool,
        failed: Collection[int] = (),
    ) -> None:
        """Take in what an actor replied about its envs `members`.

        The rows of those that `failed` keep their former observations.
        """
        good, arrays, singles = members, result.observation_arrays, result.observations
        if failed and (arrays is not None or singles is not None):
            places = [place for place, env_id in enumerate(members) if env_id not in failed]
            good = [members[place] for place in places]
        if arrays is not None:
            if good is not members:
                arrays = [array[places] for array in arrays]
            self.observations.put_arrays(good, arrays)
        if singles is not None:
            found = unpack_records(singles.value)
            if good is not members:
                found = [found[place] for place in places]
            self.observations.put_singles(good, found)
        blocks = self.blocks
        if not is_step:
            blocks.rewards[members] = 0.0
            blocks.terminations[members] = False
            blocks.truncations[members] = False
        elif result.rewards is not None:
            blocks.rewards[members] = result.rewards
            blocks.terminations[members] = result.terminations
            blocks.truncations[members] = result.truncations
        if result.infos is not None:
            for env_id, info in zip(members, result.infos.value, strict=True):
                if info:
                    self._infos[env_id] = info
        if self.cut is not None and not is_step:
            for env_id in members:
                info = self.cut.tell(env_id, self._infos.get(env_id, {}))
                if info:
                    self._infos[env_id] = info

    def read_records(self, records: InfoReader) -> None:
        """Read infos in records, too: of envs that `put_rows` names."""
        self._records = records

    def put_rows(self, members: list[int]) -> None:
        """Take in that a step of these envs has left all in its rows and records."""
        self._are_recorded = True
        self._recorded[members] = True

    def has_ended(self, env_id: int) -> bool:
        """Return whether an env's last row was the last of its episode."""
        return bool(self.blocks.terminations[env_id] or self.blocks.truncations[env_id])

    def count_ended(self, members: list[int]) -> int:
        """Return how many envs' last rows were the last of their episodes."""
        blocks = self.blocks
        return int(np.count_nonzero(blocks.terminations[members] | blocks.truncations[members]))

    def take_info(self, env_id: int) -> dict[str, Any]:
        """Return the info of an env's last result; later calls return nothing."""
        if self._recorded[env_id]:
            self._fetch([env_id])
        return self._infos.pop(env_id, {})

    def take_infos(self, env_ids: list[int]) -> Infos:
        """Return the infos of some envs' last results, as `take_info` does."""
        if self._are_recorded and self._recorded[env_ids].any():
            self._fetch(env_ids)
        if not self._infos:
            return {}
        taken = [(env_id, self._infos.pop(env_id, None)) for env_id in env_ids]
        return {env_id: info for env_id, info in taken if info}

    def drop_ends(self) -> None:
        """The caller gives up the steps whose rows it has not received.

        Episodes that had ended in one of them, and whose next ones failed, were cut off for it.
        """
        if self.cut is None:
            return
        for env_id in self.cut.on_drop():
            if env_id in self._infos:  # its next episode has begun
                self._infos[env_id] = self.cut.tell(env_id, self._infos[env_id])

    def drop_infos(self) -> None:
        """Forget the infos of all envs."""
        self._infos.clear()
        self._recorded[:] = False

    def batch(
        self,
        env_ids: list[int],
        *,
        incarnations: npt.NDArray[np.int64],
        take_faults: Callable[[], list[Fault]],
        late: list[int],
        copy: bool = True,
        with_infos: bool = True,
        merge: bool = True,
    ) -> Batch:
        """Return the results of these envs, which are the caller's.

        Nothing was taken if there is no memory for their rows.

        Args:
            env_ids: Which, in the order of the rows.
            incarnations: `(num_envs,)` int64, of all envs.
            take_faults: Returns those that are told with the batch.
            late: Told with the batch.
            copy: False: observations may be views.
            with_infos: False: theirs are forgotten.
            merge: False: the infos are by env, as the envs returned them, without empty ones.
        """
        index = np.asarray(env_ids, np.int64)
        blocks = self.blocks
        observations = self.observations.select(index, copy=copy)
        rewards = blocks.rewards[index]
        terminations, truncations = blocks.terminations[index], blocks.truncations[index]
        if self.cut is not None:
            self.cut.on_receive(index)
        infos: dict[Any, Any] = {}
        if not with_infos:
            self._recorded[index] = False
            if self._infos:
                for env_id in env_ids:
                    self._infos.pop(env_id, None)
        elif self._infos or self._are_recorded:
            infos = self._take_infos(env_ids, index) if merge else self.take_infos(env_ids)
        return Batch(
            env_ids=index,
            observations=observations,
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            infos=infos,
            incarnations=incarnations[index],
            faults=take_faults(),
            late=late,
        )

    def _fetch(self, env_ids: Sequence[int]) -> None:
        """Take the infos of envs out of their records."""
        assert self._records is not None
        self._infos.update(self._records.infos([i for i in env_ids if self._recorded[i]]))
        self._recorded[env_ids] = False

    def _take_infos(self, env_ids: Sequence[int], index: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Merge the infos of a batch, without those that do not fit: see `misfit`, `strange`."""
        recorded = self._recorded[index]
        if recorded.any():
            if self._records is not None and not self._infos and recorded.all():
                self._recorded[index] = False
                return self._records.merged(index)
            self._fetch(env_ids)
        if not self._infos:
            return {}
        found = {row: self._infos.pop(env_id, {}) for row, env_id in enumerate(env_ids)}
        self._merger.num_envs = len(env_ids)
        add_info = self._merger._add_info
        merged, self.misfit, strange = merge_infos(found, add_info, env_ids, self._remote)
        self.strange.update(strange)
        return merged


#: Where a fault may be told; most steps have neither, and are looked at no further.
_FAULTY: Final = frozenset(("fault", "final_info"))


def _may_tell_of_fault(info: Any) -> bool:
    return isinstance(info, dict) and not _FAULTY.isdisjoint(info)


def _part(info: Any, key: str) -> Any:
    """Return a part of an env's info, which may be anything; None: it has none."""
    return info.get(key) if isinstance(info, dict) else None


def _without_own_faults(infos: dict[int, Any]) -> dict[int, Any]:
    """Return infos, where one tells of a fault, without what envs call `fault` themselves."""
    if not any(type(_part(info, "fault")) is FaultInfo for info in infos.values()):
        return infos
    return {
        row: {key: value for key, value in info.items() if key != "fault"}
        if isinstance(info, dict) and type(info.get("fault")) is not FaultInfo
        else info
        for row, info in infos.items()
    }


def merge_infos(
    infos: Infos,
    add_info: Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]],
    env_ids: Sequence[int],
    remote: Collection[int] = frozenset(),
) -> tuple[dict[str, Any], ValueError | None, dict[int, str]]:
    """Return infos as one dict of arrays, without those that do not fit, and what says so.

    What says so is an error; or of remote envs, by env, a text for people. Where a fault is told,
    also within `final_info`, what other envs call `fault` themselves is left out.

    Args:
        infos: By row.
        add_info: Gymnasium's `VectorEnv._add_info`.
        env_ids: By row: which env.
        remote: Envs whose actor is elsewhere: it may be anybody's program. Their infos have to fit
            the others'.
    """
    misfit: ValueError | None = None
    strange: dict[int, str] = {}
    found = dict(sorted(infos.items()))
    if any(map(_may_tell_of_fault, infos.values())):
        ends = {row: _part(info, "final_info") for row, info in found.items()}
        for row, end in _without_own_faults(ends).items():
            if end is not ends[row]:
                found[row] = {**found[row], "final_info": end}
        found = _without_own_faults(found)
    if remote:
        found = dict(sorted(found.items(), key=lambda item: env_ids[item[0]] in remote))
    while True:
        merged: dict[str, Any] = {}
        for row, info in found.items():
            try:
                merged = add_info(merged, info, row)
            except Exception as exc:  # a different error for each kind of misfit
                failure = exc
                break
        else:
            return merged, misfit, strange
        del found[row]  # and begin anew: some of it was merged already
        why = cut(str(failure), 400)
        text = f"the info of env {env_ids[row]} cannot be merged with those before it: {why}"
        if env_ids[row] in remote:
            strange[env_ids[row]] = text
        elif misfit is None:
            misfit = ValueError(f"{text}; called again, this returns the same rows without it")
            misfit.__cause__ = failure
