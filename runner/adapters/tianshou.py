"""`ActorVectorEnv`: env actors as a vector env of Tianshou.

Needs Tianshou (`pip install -e '.[tianshou]'`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from operator import methodcaller
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from typing_extensions import Unpack

from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number
from envbus.runner.engine.env_results import Batch
from envbus.runner.extras import needed_for
from envbus.runner.pool.pool import ActorPool
from envbus.runner.workers.config import ActorSettings, with_settings

with needed_for("ActorVectorEnv", "tianshou"):
    from tianshou.env import BaseVectorEnv

__all__ = ["ActorVectorEnv"]

Spaces: TypeAlias = list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]
#: Which envs, as Tianshou has it: None: all.
Ids: TypeAlias = int | Sequence[int] | npt.NDArray[np.integer[Any]] | None


class _Pool(ActorPool):
    """Does not merge infos; takes envs whose observations differ in their bounds."""

    _merges_infos = False
    _observation_mode = "different"

    def env_spaces(self) -> Spaces:
        return self._fleet.env_spaces()

    def has_faults(self) -> bool:
        """Return whether `recv` has a fault to tell, so that it does not wait."""
        return bool(self._faults.untold)


class _Rows(NamedTuple):
    """Rows of some envs, batched."""

    env_ids: npt.NDArray[np.int64]
    observations: npt.NDArray[Any]
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]

    def take(self, chosen: npt.NDArray[np.int64] | list[int]) -> _Rows:
        columns: list[Any] = [column[chosen] for column in self]
        return _Rows(*columns)


class ActorVectorEnv(BaseVectorEnv):
    """Steps envs in supervised actor processes; takes the place of `SubprocVectorEnv`.

        envs = ActorVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8, restart=True)
        collector = Collector(policy, envs, VectorReplayBuffer(20_000, 8))

    Its methods take and return what Tianshou says: observations `(n, *obs_shape)` of the space's
    dtype, or `(n,)` objects where the space is no array; rewards `(n,)` float64; terminated and
    truncated `(n,)` bool; infos `(n,)` dicts, with `env_id` and `fault`. All are the caller's own.
    It resets no env by itself.

    A fault (`restart=True`) ends the episode of its env: `step` returns that env truncated, with
    reward 0, the last observation that the caller was given, and True as `info["fault"]`, which is
    False in all other steps: Tianshou's buffers take a text in a few rows for an error. `Hooks`
    tell what has happened. `reset` begins the next episode as ever; it has `info["fault"]` where an
    env failed between two episodes. Other errors are those of `ActorPool`.

    Args:
        env_fns: One per env, as `ActorPool` takes them. Each makes an env with one agent.
        wait_num: `step` returns when so many envs have stepped; None: all of them.
        timeout: Seconds after which `step` returns with those that have stepped, at least one;
            None: it waits for `wait_num`.
        context: None, "fork", "forkserver" or "spawn".
        **settings: About the actors: `num_actors`, `restart`, `timeouts` and all else that
            `ActorSettings` explains. With a `wait_num` or a `timeout`, `num_actors` is one per
            env if it is not given.

    Attributes:
        pool: The pool below, for `statistics()` and `actor_pids()`.

    Raises:
        ConfigError: A setting cannot be used, or the envs have several agents.
        TypeError: Observations are tuples, which Tianshou refuses.
        Exception: As `ActorPool`.
    """

    #: Tianshou looks these up in each env; they are known here.
    _SPACES: ClassVar[dict[str, int]] = {"observation_space": 0, "action_space": 1}

    # Not Tianshou's own constructor: that makes a worker per env.
    @with_settings
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]] | str | Any],
        wait_num: int | None = None,
        timeout: float | None = None,
        *,
        context: str | None = None,
        **settings: Unpack[ActorSettings],
    ) -> None:
        number = len(env_fns)
        check_number("wait_num", wait_num, whole=True, least=1, most=number, optional=True)
        check_number("timeout", timeout, over=0.0, optional=True)
        self.wait_num = wait_num or number
        self.timeout = timeout
        self.is_async = self.wait_num != number or timeout is not None
        if self.is_async and not settings.get("remote_actors"):
            settings.setdefault("num_actors", number)  # envs of one actor wait for each other
        self.is_closed = True
        self.pool = pool = _Pool(
            env_fns,
            context=context,
            autoreset_mode=AutoresetMode.DISABLED,
            all_or_nothing=True,
            **settings,
        )
        try:
            self._set_up(pool)
        except BaseException:
            pool.close(terminate=True)
            raise
        self.is_closed = False

    def _set_up(self, pool: _Pool) -> None:
        if pool.is_multi_agent:
            raise ConfigError("the envs have several agents; ActorVectorEnv takes envs with one")
        space = pool.single_observation_space
        if isinstance(space, gymnasium.spaces.Tuple):
            raise TypeError("Tianshou takes no tuples as observations; use an array or a Dict")
        self.env_num = number = pool.num_envs
        #: Envs that were asked to step, the longest ago first, and those that were not.
        self.waiting_id: list[int] = []
        self.ready_id = list(range(number))
        # Each env's own, as they are seeded.
        self._env_spaces: Spaces = [deepcopy(pair) for pair in pool.env_spaces()]
        self._has_rows = isinstance(
            space,
            gymnasium.spaces.Box
            | gymnasium.spaces.Discrete
            | gymnasium.spaces.MultiBinary
            | gymnasium.spaces.MultiDiscrete,
        )
        self._joins_actions = isinstance(
            pool.single_action_space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple
        )
        #: The last observation of each env that the caller was given.
        self._last: npt.NDArray[Any] = np.empty(number, object)
        if self._has_rows:
            self._last = np.zeros((number, *(space.shape or ())), space.dtype)
        #: Envs with a fault that was not told yet. Their next episodes begin by themselves.
        self._faults: set[int] = set()
        #: Rows of the step that is under way, and infos of the same envs.
        self._parts: list[_Rows] = []
        self._told: dict[int, dict[str, Any]] = {}
        #: Whether an error has broken it off.
        self._is_broken_off = False

    def reset(
        self, env_id: Ids = None, **kwargs: Any
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        """Begin new episodes of some envs, or of all.

        Args:
            env_id: Which.
            **kwargs: `seed`, which each of these envs gets, and `options`. An env that is being
                started again has begun with a seed of its own.

        Returns:
            Their first observations `(n, *obs_shape)`, and infos `(n,)`.

        Raises:
            TypeError: Another argument.
            AssertionError: An env is stepping now; or only some are named after an error in `step`.
            Exception: As `ActorPool.reset` and `recv`.
        """
        self._assert_is_not_closed()
        env_ids = self._ids(env_id)
        if len(env_ids) < self.env_num or (self.is_async and not self._is_broken_off):
            self._check_idle(env_ids)
        if unknown := kwargs.keys() - {"seed", "options"}:
            raise TypeError(f"reset takes `seed` and `options`, not {sorted(unknown)}")
        seed = kwargs.get("seed")
        if seed is not None:
            for i in env_ids:
                self._env_spaces[i][1].seed(seed)
        return self._reset(env_ids, [seed] * len(env_ids), kwargs.get("options"))

    def step(
        self, action: Any, id: Ids = None
    ) -> tuple[
        npt.NDArray[Any],
        npt.NDArray[np.float64],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        npt.NDArray[np.object_],
    ]:
        """Step some envs, or all; with `wait_num` or `timeout` return those that are done first.

        Args:
            action: One per env, in the order of `id`: an array `(n, *action_shape)`, a tensor on
                the CPU, or a sequence. None: wait for envs that are stepping already.
            id: Which envs.

        Returns:
            Observations, rewards, terminated, truncated, infos: in the order of `id`, or, with
            `wait_num` or `timeout`, as `info["env_id"]` says.

        Raises:
            ValueError: Not one action per env, or None where no env is stepping.
            AssertionError: An env is stepping now; or the last step has raised, and not all envs
                were reset since.
            Exception: As `ActorPool.send` and `recv`.
        """
        self._assert_is_not_closed()
        env_ids = self._ids(id)
        if action is not None:
            self._check_idle(env_ids)
            self._send(action, env_ids)
        elif not self.is_async:
            raise ValueError("action is None; that waits for envs, which needs a `wait_num`")
        if not self.waiting_id:
            raise ValueError("no env is stepping; pass actions")
        try:
            self._take_steps()
        except Exception:
            self._is_broken_off = True
            raise
        parts, told = self._parts, self._told
        self._parts, self._told = [], {}
        self.waiting_id = [i for i in self.waiting_id if i not in told]
        self.ready_id += told
        rows = parts[0]
        if len(parts) > 1:
            rows = _Rows(*map(np.concatenate, zip(*parts, strict=True)))
        if not self.is_async and rows.env_ids.tolist() != env_ids:
            order = np.empty(self.env_num, np.int64)
            order[rows.env_ids] = range(len(rows.env_ids))
            rows = rows.take(order[env_ids])
        self._last[rows.env_ids] = rows.observations
        infos = np.empty(len(rows.env_ids), object)
        for row, env_id in enumerate(rows.env_ids.tolist()):
            infos[row] = {"fault": False, **told[env_id], "env_id": env_id}
        return rows.observations, rows.rewards, rows.terminations, rows.truncations, infos

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Return an attribute of some envs, or of all; looks through wrappers.

        Raises:
            AttributeError: An env has none of that name.
        """
        self._assert_is_not_closed()
        env_ids = self._ids(id)
        if key in self._SPACES:
            return [self._env_spaces[i][self._SPACES[key]] for i in env_ids]
        if self.is_async:
            self._assert_id(env_ids)
        envs = self.pool.get_sub_environments()
        return [envs[i].exec_func(methodcaller("get_wrapper_attr", key)) for i in env_ids]

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of some envs, or of all, below all wrappers. A fault loses it."""
        self._assert_is_not_closed()
        env_ids = self._ids(id)
        if self.is_async:
            self._assert_id(env_ids)
        envs = self.pool.get_sub_environments()
        for i in env_ids:
            # By value: for a function of this module an actor would import Tianshou.
            envs[i].exec_func(lambda env, it: setattr(env.unwrapped, key, it), value)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int] | None]:
        """Reset all envs by these seeds, and seed their action spaces; return the seeds.

        Args:
            seed: Env i gets `seed + i`; or one per env; None: by chance.
        """
        self._assert_is_not_closed()
        seeds: list[int | None]
        if seed is None:
            seeds = [None] * self.env_num
        elif isinstance(seed, int | np.integer):
            seeds = [int(seed) + i for i in range(self.env_num)]
        else:
            seeds = list(seed)
        if len(seeds) != self.env_num:
            raise ValueError(f"expected {self.env_num} seeds, one per env, but got {len(seeds)}")
        for (_, space), one in zip(self._env_spaces, seeds, strict=True):
            space.seed(one)
        self._reset(list(range(self.env_num)), seeds, None)
        return [None if one is None else [one] for one in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """Return what each env draws.

        Raises:
            RuntimeError: Some envs are stepping now.
        """
        self._assert_is_not_closed()
        if self.waiting_id:
            raise RuntimeError(f"envs {self.waiting_id} are stepping; they cannot be drawn now")
        return [env.call("render", **kwargs) for env in self.pool.get_sub_environments()]

    def close(self) -> None:
        """Close all envs and end their processes. Idempotent."""
        self.is_closed = True
        self.pool.close()

    # --- private -----------------------------------------------------------------------------

    def _ids(self, env_ids: Ids) -> list[int]:
        if env_ids is None:
            return list(range(self.env_num))
        return [int(i) for i in self._wrap_id(env_ids)]

    def _check_idle(self, env_ids: list[int]) -> None:
        """Raise `AssertionError` if one of these envs has a step that was not returned."""
        if self.is_async:
            self._assert_id(env_ids)
        elif self.waiting_id:  # rows of it would be taken for those of the next one
            raise AssertionError("the last step was broken off; call `reset()`, of all envs, first")

    def _reset(
        self, env_ids: list[int], seeds: Sequence[int | None], options: dict[str, Any] | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        if len(env_ids) == self.env_num:  # that also drops a step that an error has broken off
            by_env = dict(zip(env_ids, seeds, strict=True))
            self.pool.reset([by_env[i] for i in range(self.env_num)], options)
            self.waiting_id, self._parts, self._told = [], [], {}
            self._is_broken_off = False
            self.ready_id = list(range(self.env_num))
        else:
            self._ask_for_resets(env_ids, seeds, options)
        infos: dict[int, dict[str, Any]] = {}
        missing = set(env_ids)
        while missing:
            batch = self._receive(len(missing))
            found = [row for row, i in enumerate(batch.env_ids.tolist()) if i in missing]
            rows = self._rows(batch, found)
            self._last[rows.env_ids] = rows.observations
            told: dict[Any, Any] = batch.infos
            for i in rows.env_ids.tolist():
                missing.discard(i)
                infos[i] = told.get(i, {})
                if i in self._faults:
                    infos[i] = {**infos[i], "fault": True}
                    self._faults.discard(i)
        in_order = np.empty(len(env_ids), object)
        in_order[:] = [infos[i] for i in env_ids]
        return self._last[env_ids], in_order

    def _ask_for_resets(
        self, env_ids: list[int], seeds: Sequence[int | None], options: dict[str, Any] | None
    ) -> None:
        while True:
            try:
                self.pool.reset(seeds, options, env_ids=env_ids)
                return
            except AlreadyPendingCallError:
                if not self.waiting_id or self.is_async:
                    self._receive(1)  # one of them is being made anew, and begins by itself
                else:
                    raise

    def _send(self, action: Any, env_ids: list[int]) -> None:
        if len(action) != len(env_ids):
            raise ValueError(f"got {len(action)} actions for {len(env_ids)} envs")
        while self.pool.has_faults():  # noticed by a call in between
            self._receive(1)
        failed = {i for i in env_ids if i in self._faults}
        asked = env_ids
        if self._joins_actions:
            action = list(action)
        elif not isinstance(action, list | tuple):
            action = np.asarray(action)
        if failed:  # their episodes are over, and their next ones nobody knows of yet
            chosen = [row for row, i in enumerate(env_ids) if i not in failed]
            asked = [env_ids[row] for row in chosen]
            rows = isinstance(action, np.ndarray)
            action = action[chosen] if rows else [action[row] for row in chosen]
        if asked:
            self.pool.send(self._joined(action) if self._joins_actions else action, asked)
        self.waiting_id += env_ids
        sent = set(env_ids)
        self.ready_id = [i for i in self.ready_id if i not in sent]

    def _joined(self, actions: Iterable[Any]) -> Any:
        """Return single actions of a Dict or Tuple space as a batch."""
        singles = list(actions)
        space = self.pool.single_action_space
        out: Any = create_empty_array(space, len(singles))
        return concatenate(space, singles, out)

    def _take_steps(self) -> None:
        """Wait for enough of the envs that are stepping; what Ctrl-C breaks off can go on."""
        wanted = min(self.wait_num, len(self.waiting_id))
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        self._tell_faults()
        while (missing := wanted - len(self._told)) > 0:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if self._told:
                    break
                missing, left = 1, None
            self._receive(missing, left)

    def _receive(self, count: int, timeout: float | None = None) -> Batch:
        """Return what comes from the pool; take in faults, and rows of envs that are stepping."""
        batch = self.pool.recv(count, timeout=timeout)
        self._faults.update(fault.env_id for fault in batch.faults)
        # Others are first rows of episodes, also of those that have begun by themselves.
        stepped = set(self.waiting_id).difference(self._told, self._faults)
        infos: dict[Any, Any] = batch.infos
        found = [(row, i) for row, i in enumerate(batch.env_ids.tolist()) if i in stepped]
        if found:
            self._parts.append(self._rows(batch, [row for row, _ in found]))
            self._told.update((i, infos.get(i, {})) for _, i in found)
        self._tell_faults()
        return batch

    def _tell_faults(self) -> None:
        """Have faults end the steps that are under way."""
        if self._faults:
            for env_id in self._faults.intersection(self.waiting_id).difference(self._told):
                self._parts.append(self._cut_off(env_id))
                self._told[env_id] = {"fault": True}
                self._faults.discard(env_id)

    def _rows(self, batch: Batch, chosen: list[int]) -> _Rows:
        """Return some rows of a batch."""
        observations: Any = batch.observations
        if not self._has_rows:
            singles = list(iterate(self.pool.observation_space, observations))
            observations = np.empty(len(batch.env_ids), object)
            for row in chosen:
                observations[row] = singles[row]
        rows = _Rows(
            batch.env_ids, observations, batch.rewards, batch.terminations, batch.truncations
        )
        if len(chosen) == len(batch.env_ids):
            return rows
        return rows.take(chosen)

    def _cut_off(self, env_id: int) -> _Rows:
        """Return the row of an env whose episode a fault has ended."""
        return _Rows(
            np.array([env_id], np.int64),
            self._last[[env_id]],
            np.zeros(1),
            np.zeros(1, np.bool_),
            np.ones(1, np.bool_),
        )
