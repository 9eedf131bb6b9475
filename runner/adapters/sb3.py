"""`BusVecEnv`: env actors as a `VecEnv` of Stable-Baselines3.

Needs Stable-Baselines3 (`pip install -e '.[sb3]'`).
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from typing_extensions import Unpack

from envbus.actors.env.old_gym import OldGymEnv
from envbus.bus.errors import ConfigError
from envbus.runner.errors import FaultInfo
from envbus.runner.extras import needed_for
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import ActorSettings, with_settings

with needed_for("BusVecEnv", "sb3"):
    from stable_baselines3.common import env_util
    from stable_baselines3.common.monitor import ResultsWriter
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["BusVecEnv", "make_vec_env"]

Env: TypeAlias = gymnasium.Env[Any, Any]
#: Which envs, as Stable-Baselines3 has it: None: all.
Indices: TypeAlias = int | Iterable[int] | None

_TRUNCATED: Final = "TimeLimit.truncated"
#: What most envs are wrapped in. Its import takes seconds, as it brings PyTorch.
_PRELOAD: Final = ("stable_baselines3.common.monitor",)


class _SingleInfosEnv(BusVectorEnv):
    """Does not merge infos: those of several envs need not fit together."""

    _merges_infos = False

    def reset_some(
        self,
        mask: npt.NDArray[np.bool_],
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
    ) -> tuple[Any, dict[Any, Any]]:
        """Reset some envs; without options they get None, and not the `{}` beside a mask."""
        self._lockstep.begin_reset("reset_async", seeds, options, mask)
        return self.reset_wait()


class BusVecEnv(VecEnv):
    """Steps envs in supervised actor processes; takes the place of `SubprocVecEnv`.

    Its methods take and return what Stable-Baselines3 says. Observations are arrays
    `(num_envs, *obs_shape)` of the space's dtype, or a dict or tuple of such; rewards are
    `(num_envs,)` float64, dones `(num_envs,)` bool, infos a list of dicts, all the caller's own.

    An env that was started again (`restart=True`) has ended its episode as truncated:
    `infos[i]["TimeLimit.truncated"]` is True, `infos[i]["terminal_observation"]` the last
    observation that the caller was given, and the reward 0. `infos[i]["fault"]` says what has
    happened, as in docs/reliability.md; there is no `infos[i]["episode"]`. Where an env failed
    between two episodes, `reset_infos[i]["fault"]` says so.

    Errors are those of `BusVectorEnv`. `reset` drops a step that Ctrl-C broke off.

    Args:
        env_fns: One per env, as `BusVectorEnv` takes them.
        start_method: None, "fork", "forkserver" or "spawn": the `context` of `BusVectorEnv`.
        **settings: About the actors: `num_actors`, `restart`, `timeouts` and all else that
            `ActorSettings` explains. `preload` is Stable-Baselines3 if it is not given.

    Attributes:
        vector_env: The vector env below, for `statistics()`, `actor_pids()` and `exec_func()`.

    Raises:
        Exception: As `BusVectorEnv`.
        AssertionError: The envs' render modes differ.
        ConfigError: Some of the actors are to be remote.
    """

    @with_settings
    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env] | str | Any],
        start_method: str | None = None,
        **settings: Unpack[ActorSettings],
    ) -> None:
        if settings.get("remote_actors"):
            raise ConfigError(
                "remote_actors: BusVecEnv runs functions beside its envs, and remote actors run "
                "none; use BusVectorEnv, or actors on this host"
            )
        if settings.get("num_actors") != 0:
            settings.setdefault("preload", _PRELOAD)
        self.vector_env = _SingleInfosEnv(
            env_fns, context=start_method, autoreset_mode=AutoresetMode.SAME_STEP, **settings
        )
        envs = self.vector_env
        try:
            super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        except BaseException:
            envs.close(terminate=True)
            raise
        # Those of an env, as `DummyVecEnv` has them: recorders of videos look for `render_fps`.
        self.metadata = {k: v for k, v in envs.metadata.items() if k != "autoreset_mode"}
        self._joins_actions = isinstance(
            self.action_space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple
        )

    def reset(self) -> Any:
        """Reset all envs by the seeds and options that were set; return the observations."""
        try:
            return self._reset()
        except AlreadyPendingCallError as pending:  # it was broken off; nobody wants it any more
            with contextlib.suppress(Exception):
                getattr(self.vector_env, f"{pending.name}_wait")()
            return self._reset()

    def step_async(self, actions: Any) -> None:
        """Ask all envs to step; `step_wait` returns the results.

        Args:
            actions: One per env: an array `(num_envs, *action_shape)`, or a sequence.

        Raises:
            ValueError, TypeError: Not one action per env. Nothing was sent.
            AlreadyPendingCallError: A step is pending.
        """
        if self._joins_actions:
            actions = self._joined(actions)
        self.vector_env.step_async(actions)

    def step_wait(
        self,
    ) -> tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Wait for the steps; return observations, rewards, dones and infos."""
        observations, rewards, terminations, truncations, found = self.vector_env.step_wait()
        dones = terminations | truncations
        infos: list[dict[str, Any]] = [{_TRUNCATED: False} for _ in range(self.num_envs)]
        told: Mapping[Any, dict[str, Any]] = found
        for env_id, info in told.items():
            infos[env_id] = {**info, _TRUNCATED: False}
        for env_id in dones.nonzero()[0].tolist():
            last, self.reset_infos[env_id] = _at_the_end(told.get(env_id, {}))
            infos[env_id] = {**last, _TRUNCATED: not terminations[env_id]}
        return observations, rewards, dones, infos

    def close(self) -> None:
        """Close all envs and end their processes. Idempotent."""
        self.vector_env.close()

    def get_images(self) -> list[Any]:
        """Return what each env draws, as arrays of RGB, or None where it draws none."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}; images come of `rgb_array` only.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.env_method("render")

    def has_attr(self, attr_name: str) -> bool:
        """Return whether every env has the attribute."""
        return self.vector_env.has_attr(attr_name)

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of each env, or of those at `indices`; looks through wrappers."""
        return self._beside(methodcaller("get_wrapper_attr", attr_name), indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the envs' outermost wrappers."""

        def put(env: Env, it: Any) -> None:  # what is wrapped by envbus alone is the user's own
            setattr(env.env if isinstance(env, OldGymEnv) else env, attr_name, it)

        self._beside(put, indices, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, or of those at `indices`; looks through wrappers."""

        # By value, as `put` above: for one of this module an actor would import PyTorch.
        def call(env: Env, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return env.get_wrapper_attr(method_name)(*args, **kwargs)

        return self._beside(call, indices, method_args, method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Return for each env, or those at `indices`, whether a wrapper of it is of the class."""
        found = self.vector_env.env_is_wrapped(wrapper_class)
        return [found[index] for index in self._get_indices(indices)]

    def _beside(self, function: Callable[..., Any], indices: Indices, *args: Any) -> list[Any]:
        """Return what a function returns of some envs, beside which it runs."""
        chosen = list(self._get_indices(indices))
        found = self.vector_env.exec_func(function, chosen, *args)
        return [found[index] for index in chosen]

    def _reset(self) -> Any:
        # One reset for all that have the same options: one in all, as a rule.
        groups: dict[int, list[int]] = {}
        for env_id, own in enumerate(self._options):
            groups.setdefault(id(own) if own else 0, []).append(env_id)
        infos: dict[Any, dict[str, Any]] = {}
        observations: Any = None
        for env_ids in groups.values():
            options = self._options[env_ids[0]] or None
            if len(groups) > 1:
                mask = np.isin(range(self.num_envs), env_ids)
                observations, found = self.vector_env.reset_some(mask, self._seeds, options)
            else:
                observations, found = self.vector_env.reset(seed=self._seeds, options=options)
            infos.update(found)
        self.reset_infos = [infos.get(env_id, {}) for env_id in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def _joined(self, actions: Iterable[Any]) -> Any:
        """Return single actions of a Dict or Tuple space as a batch."""
        singles = list(actions)
        if len(singles) != self.num_envs:
            raise ValueError(
                f"expected {self.num_envs} actions, one per env, but got {len(singles)}"
            )
        space = self.action_space
        batch: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, singles, batch)


@with_settings
def make_vec_env(
    env_id: str | Callable[..., Env],
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | os.PathLike[str] | None = None,
    wrapper_class: Callable[..., Env] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    start_method: str | None = None,
    **settings: Unpack[ActorSettings],
) -> BusVecEnv:
    """Return a `BusVecEnv` of equal envs, each wrapped in a `Monitor` in its actor.

        envs = make_vec_env("CartPole-v1", 64, seed=0, restart=True)

    Args:
        env_id: A Gymnasium id, or what returns an env.
        n_envs: How many.
        seed: Env i begins with `seed + i`; None: by chance.
        start_index: Number of the first env, for the names of files.
        monitor_dir: Folder for the files of the monitors; None: there are none. An env that was
            made anew goes on in its file.
        wrapper_class: What each `Monitor` is wrapped in.
        env_kwargs: Arguments of the env's constructor.
        monitor_kwargs: Arguments of `Monitor`.
        wrapper_kwargs: Arguments of `wrapper_class`.
        start_method: As of `BusVecEnv`.
        **settings: As of `BusVecEnv`.
    """
    monitoring = dict(monitor_kwargs or {})
    if monitor_dir is not None:
        monitor_dir = os.path.abspath(monitor_dir)
        if monitoring.get("override_existing", True):
            # Begun here once, or a second life would override what the first one wrote.
            monitoring["override_existing"] = False
            began = time.time()
            keys = ("reset_keywords", "info_keywords")
            header = {"t_start": began, "env_id": env_id if isinstance(env_id, str) else "None"}
            for rank in range(start_index, start_index + n_envs):
                ResultsWriter(
                    os.path.join(monitor_dir, str(rank)),
                    header=header,
                    extra_keys=sum((tuple(monitoring.get(key, ())) for key in keys), ()),
                ).close()
            inner = wrapper_class

            def wrapped(monitor: Any, **kwargs: Any) -> Env:
                monitor.t_start = began  # its times are told since then, in each life
                env: Env = monitor
                return env if inner is None else inner(env, **kwargs)

            wrapper_class = wrapped
    made: BusVecEnv = env_util.make_vec_env(
        env_id,
        n_envs=n_envs,
        seed=seed,
        start_index=start_index,
        monitor_dir=monitor_dir,
        wrapper_class=wrapper_class,
        env_kwargs=env_kwargs,
        vec_env_cls=BusVecEnv,
        vec_env_kwargs={"start_method": start_method, **settings},
        monitor_kwargs=monitoring,
        wrapper_kwargs=wrapper_kwargs,
    )
    return made


def _at_the_end(info: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the last step of an episode has told, and what the reset after it has."""
    reset_info = dict(info)
    told = reset_info.pop("final_info", None)
    last: dict[str, Any] = dict(told) if isinstance(told, dict) else {}
    if "final_obs" in reset_info:
        last["terminal_observation"] = reset_info.pop("final_obs")
    if "recycled" in reset_info:
        last["recycled"] = reset_info.pop("recycled")
    if type(last.get("fault")) is FaultInfo:  # which has cut it off; it is told twice
        reset_info.pop("fault", None)
    return last, reset_info
