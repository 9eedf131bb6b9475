"""`BusEnv`: env actors as an env of TorchRL, and `to_tensordict` for what was sampled.

Needs TorchRL (`pip install -e '.[torchrl]'`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from typing_extensions import Unpack

from envbus.bus.errors import ConfigError
from envbus.runner.adapters.torch_tensors import to_tensor
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.extras import needed_for
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import ActorSettings, with_settings

with needed_for("BusEnv", "torchrl"):
    import torch
    from tensordict import TensorDict
    from torchrl.data import (
        Binary,
        Bounded,
        Categorical,
        Composite,
        MultiCategorical,
        Unbounded,
    )
    from torchrl.envs import EnvBase

__all__ = ["BusEnv", "to_tensordict"]

#: What TorchRL keeps beside observations.
_RESERVED: Final = frozenset(
    {"action", "reward", "done", "terminated", "truncated", "next", "_reset", "_step"}
)
#: Columns of a `SampleBatch`, and their names under "next".
_NEXT: Final = {"rewards": "reward", "terminateds": "terminated", "truncateds": "truncated"}


class BusEnv(EnvBase):
    """Steps envs in supervised actor processes, as one env of batch size `(n,)`.

        env = BusEnv([lambda: gymnasium.make("CartPole-v1")] * 8, restart=True)
        collector = Collector(env, policy, frames_per_batch=512, total_frames=100_000)

    Observations of a Dict space stand under its keys, others under "observation"; actions under
    "action", those of a Dict space below it. Dtypes are those of the spaces. Discrete values are
    `Categorical`, not one-hot. Reward `(n, 1)` is float32; done, terminated and truncated `(n, 1)`
    are bool.

    The "next" observation of a step that ends an episode is the last one of that episode. A reset
    by "_reset" hands out the first observation of the next one, which the env has begun by itself;
    any other reset begins a new one. `set_seed(s)` has the next reset of all envs give env i the
    seed `s + i`.

    A fault (`restart=True`) ends the episode as truncated: reward 0, and the last observation that
    the caller was given as the "next" one. `Hooks` tell what has happened. Errors are those of
    `BusVectorEnv`.

    Args:
        env_fns: One per env, as `BusVectorEnv` takes them.
        device: Where tensors are to be; envs stay on the CPU.
        context: None, "fork", "forkserver" or "spawn".
        **settings: About the actors: `num_actors`, `restart`, `timeouts` and all else that
            `ActorSettings` explains.

    Attributes:
        vector_env: The vector env below, for `statistics()`, `actor_pids()` and `exec_func()`.

    Raises:
        ConfigError: A space has no spec (Tuple, Text, Sequence, Graph), or a key of a Dict is one
            of TorchRL's own.
        Exception: As `BusVectorEnv`.
    """

    @with_settings
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]] | str | Any],
        *,
        device: Any = "cpu",
        context: str | None = None,
        **settings: Unpack[ActorSettings],
    ) -> None:
        envs = BusVectorEnv(
            env_fns, context=context, autoreset_mode=AutoresetMode.SAME_STEP, **settings
        )
        try:
            super().__init__(device=device, batch_size=[envs.num_envs])
            self.vector_env = envs
            self._set_up(envs)
        except BaseException:
            envs.close(terminate=True)
            raise

    def _set_up(self, envs: BusVectorEnv) -> None:
        space, action_space = envs.single_observation_space, envs.single_action_space
        shape = (envs.num_envs,)
        if isinstance(space, spaces.Dict):
            if taken := sorted(_RESERVED & space.spaces.keys()):
                raise ConfigError(f"observations have keys {taken}, which TorchRL has itself")
            observation_spec = _spec(space, "observations")
        else:
            observation_spec = Composite(observation=_spec(space, "observations"))
        self.observation_spec = observation_spec.expand(shape).to(self.device)
        action_spec = Composite(action=_spec(action_space, "actions"))
        self.full_action_spec = action_spec.expand(shape).to(self.device)
        self.reward_spec = Unbounded((*shape, 1), dtype=torch.float32, device=self.device)
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool, device=self.device)
        self.done_spec = Composite(
            {name: flag.clone() for name in ("done", "terminated", "truncated")}, shape=shape
        ).to(self.device)
        self._has_keys = isinstance(space, spaces.Dict)
        self._seed: int | None = None
        #: The present observations; those of which envs are first ones that nobody has asked for.
        self._present: Any = None
        self._begun: npt.NDArray[np.bool_] = np.zeros(envs.num_envs, np.bool_)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all envs and end their processes. Idempotent."""
        super().close(raise_if_closed=raise_if_closed)
        if "vector_env" in self.__dict__:
            self.vector_env.close()

    # --- what TorchRL calls ------------------------------------------------------------------

    def _reset(self, tensordict: Any = None, **_: Any) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        envs = self.vector_env
        chosen = np.ones(envs.num_envs, np.bool_)
        if mask is not None:
            chosen = mask.reshape(envs.num_envs, -1).any(-1).cpu().numpy()
        if mask is None or self._present is None or (self._seed is not None and chosen.all()):
            self._present = envs.reset(seed=self._seed)[0]
            self._seed = None
        else:
            wanted = chosen & ~self._begun
            if wanted.any():
                self._present = envs.reset(options={"reset_mask": wanted})[0]
        self._begun &= ~chosen
        return self._tensordict(_copy(self._present))

    def _step(self, tensordict: Any) -> Any:
        if tensordict.get("_step", None) is not None:
            raise NotImplementedError("BusEnv steps all of its envs, not some by `_step`")
        envs = self.vector_env
        actions = _to_numpy(tensordict.get("action"))
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        done = terminations | truncations
        self._present, self._begun = observations, done.copy()  # the tensors are the caller's
        if done.any():
            observations = _copy(observations)
            for env_id in np.flatnonzero(done).tolist():
                _put(observations, env_id, infos["final_obs"][env_id])
        return self._tensordict(
            observations,
            reward=rewards[:, None].astype(np.float32),
            done=done[:, None],
            terminated=terminations[:, None],
            truncated=truncations[:, None],
        )

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def _tensordict(self, observations: Any, **others: Any) -> Any:
        found = observations if self._has_keys else {"observation": observations}
        return TensorDict(
            to_tensor({**found, **others}, self.device),
            batch_size=self.batch_size,
            device=self.device,
        )


def to_tensordict(batch: SampleBatch, device: Any = "cpu") -> Any:
    """Return a batch as a TensorDict of batch size `(rows,)`, for TorchRL's losses and buffers.

        buffer.extend(to_tensordict(runner.sample().single()))

    On the CPU its tensors share the memory of the batch.

    Args:
        batch: Of `EnvRunner.sample`.
        device: Where the tensors are to be.

    Returns:
        "observation", or the keys of a Dict space; "action"; under "next" the same of `next_obs`,
        and "reward", "done", "terminated" and "truncated", each `(rows, 1)`. Rows without a last
        observation (`next_obs_valid` False) are there: leave them out before, by
        `batch[batch["next_obs_valid"] | batch["terminateds"]]`. Other columns keep their names, but
        for those that have no tensor (`infos`, `agent_id` as text).

    Raises:
        ConfigError: A key of the observations is one of TorchRL's own.
    """
    columns = to_tensor(batch, device)
    rest = {
        name: column
        for name, column in columns.items()
        if name not in ("obs", "actions", "next_obs", *_NEXT) and _is_tensors(column)
    }
    after = {name: columns[column][:, None] for column, name in _NEXT.items()}
    done = after["terminated"] | after["truncated"]
    return TensorDict(
        {
            **rest,
            **_observations(columns["obs"]),
            "action": columns["actions"],
            "next": {**_observations(columns["next_obs"]), **after, "done": done},
        },
        batch_size=[len(batch)],
        device=device,
    )


def _observations(column: Any) -> dict[str, Any]:
    if not isinstance(column, Mapping):
        return {"observation": column}
    if taken := sorted(_RESERVED & column.keys()):
        raise ConfigError(f"observations have keys {taken}, which TorchRL has itself")
    return dict(column)


def _is_tensors(column: Any) -> bool:
    if isinstance(column, Mapping):
        return all(map(_is_tensors, column.values()))
    return isinstance(column, torch.Tensor)


def _spec(space: gymnasium.Space[Any], what: str) -> Any:
    """Return the spec of one env's observations or actions."""
    if isinstance(space, spaces.Dict):
        return Composite({key: _spec(part, what) for key, part in space.spaces.items()})
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=space.shape, dtype=torch.int8)
    if isinstance(space, spaces.Discrete) and not space.start:
        return Categorical(int(space.n), shape=(), dtype=_dtype(space))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return MultiCategorical(torch.as_tensor(space.nvec), dtype=_dtype(space))
    low: Any
    high: Any
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
        if np.isinf(low).all() and np.isinf(high).all():
            return Unbounded(space.shape, dtype=_dtype(space))
    elif isinstance(space, spaces.Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    else:
        raise ConfigError(
            f"{what}: TorchRL has no spec of {space}; use a wrapper that makes it a Box, Discrete, "
            "MultiDiscrete, MultiBinary, or a Dict of these"
        )
    dtype = _dtype(space)
    return Bounded(
        torch.as_tensor(np.array(low), dtype=dtype),
        torch.as_tensor(np.array(high), dtype=dtype),
        space.shape,
        dtype=dtype,
    )


def _dtype(space: gymnasium.Space[Any]) -> Any:
    return torch.from_numpy(np.zeros(1, space.dtype)).dtype


def _to_numpy(value: Any) -> Any:
    """Return a tensor, or nested ones, as arrays."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return {key: _to_numpy(part) for key, part in value.items()}


def _copy(value: Any) -> Any:
    """Return nested arrays of their own memory."""
    if isinstance(value, Mapping):
        return {key: _copy(part) for key, part in value.items()}
    return value.copy()


def _put(batch: Any, row: int, single: Any) -> None:
    """Write one env's observation into a batch."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            _put(part, row, single[key])
    else:
        batch[row] = single
