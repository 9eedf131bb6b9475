"""Envs and spaces for tests of whatever hosts envs: small, deterministic, each with one trait.

Public: all envs are classes at the top of this module, so that `"envbus.actors.testing:SlowEnv"`
names one. Leaves out assertions; those belong to tests.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envbus.actors.spaces import Element, Space

__all__ = [
    "CountingEnv",
    "CustomSpace",
    "CustomSpaceEnv",
    "ExitingEnv",
    "FailingEnv",
    "HangingEnv",
    "InPlaceEnv",
    "InfoEnv",
    "NullEnv",
    "SlowEnv",
    "SpaceEnv",
    "all_spaces",
]

Info: TypeAlias = dict[str, Any]
Array: TypeAlias = npt.NDArray[Any]
Options: TypeAlias = dict[str, Any] | None


class NullEnv(gymnasium.Env[Array, np.int64]):
    """Does nothing: 4 floats, reward 0, no end, no info. What is left is the host's own cost."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Return zeros."""
        super().reset(seed=seed, options=options)
        return self._observation, {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:  # noqa: ARG002
        """Return zeros."""
        return self._observation, 0.0, False, False, {}


class CountingEnv(gymnasium.Env[Array, np.int64]):
    """Counts: its observation is `[episode, step, last action, seed]`.

    Its reward is `10 * episode + step`, the info of a reset `{"episode": ...}`. An episode ends
    after `length` steps, terminated in odd episodes and truncated in even ones.

    Attributes:
        actions: All actions that `step` got, the very objects.
        options: All `options` that `reset` got, the very objects.
        closed: Whether `close` was called.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - as Gymnasium's
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(100)

    def __init__(self, length: int = 3, *, render_mode: str | None = None) -> None:
        self.length = length
        self.render_mode = render_mode
        self.episode = 0
        self.count = 0
        self.actions: list[Any] = []
        self.options: list[Any] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Begin the next episode."""
        super().reset(seed=seed, options=options)
        self.options.append(options)
        self.episode += 1
        self.count = 0
        return self._observe(0), {"episode": self.episode}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Count."""
        self.actions.append(action)
        self.count += 1
        over = self.count >= self.length
        odd = self.episode % 2 == 1
        reward = 10.0 * self.episode + self.count
        return self._observe(action), reward, over and odd, over and not odd, {}

    def render(self) -> Array:
        """Return a picture of one pixel that shows the count."""
        return np.full((1, 1, 3), self.count, np.uint8)

    def close(self) -> None:
        """Remember that it was called."""
        self.closed = True

    def add(self, number: int, *, times: int = 1) -> int:
        """Return the count plus `number * times`."""
        return self.count + number * times

    def _observe(self, action: np.int64 | int) -> Array:
        # np_random_seed draws a seed if there was none: that would differ from run to run.
        seed = -1 if self._np_random_seed is None else self._np_random_seed
        return np.array([self.episode, self.count, action, seed], np.float64)


class FailingEnv(CountingEnv):
    """A `CountingEnv` that raises.

    Args:
        where: `"init"`, `"reset"`, `"step"` or `"close"`.
        after: How many calls of that method go well before.
        error: What to raise; a new `RuntimeError("failing on purpose")` if None.
        length: Steps of an episode.
    """

    def __init__(
        self,
        where: str = "step",
        after: int = 0,
        error: BaseException | None = None,
        length: int = 3,
    ) -> None:
        super().__init__(length)
        self.where = where
        self.after = after
        self.error = error
        self._fail("init")

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Raise, or do as `CountingEnv`."""
        self._fail("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Raise, or do as `CountingEnv`."""
        self._fail("step")
        return super().step(action)

    def close(self) -> None:
        """Raise, or do as `CountingEnv`."""
        self._fail("close")
        super().close()

    def _fail(self, where: str) -> None:
        if where != self.where:
            return
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("failing on purpose") if self.error is None else self.error


class ExitingEnv(CountingEnv):
    """A `CountingEnv` that ends its process in a step.

    Args:
        after: How many steps go well before.
        code: Exit code, by `os._exit`: no handler and no clean-up runs.
        signal: If not None, the process kills itself by this signal instead.
        length: Steps of an episode.
    """

    def __init__(
        self, after: int = 0, code: int = 9, signal: int | None = None, length: int = 3
    ) -> None:
        super().__init__(length)
        self.after = after
        self.code = code
        self.signal = signal

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """End the process, or do as `CountingEnv`."""
        self.after -= 1
        if self.after < 0:
            if self.signal is not None:
                os.kill(os.getpid(), self.signal)
            os._exit(self.code)
        return super().step(action)


class SlowEnv(CountingEnv):
    """A `CountingEnv` that takes its time.

    Args:
        step_seconds: Sleep in each step.
        reset_seconds: Sleep in each reset.
        init_seconds: Sleep in the constructor.
        length: Steps of an episode.
    """

    def __init__(
        self,
        step_seconds: float = 0.0,
        reset_seconds: float = 0.0,
        init_seconds: float = 0.0,
        length: int = 3,
    ) -> None:
        super().__init__(length)
        self.step_seconds = step_seconds
        self.reset_seconds = reset_seconds
        time.sleep(init_seconds)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Sleep, then do as `CountingEnv`."""
        time.sleep(self.reset_seconds)
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Sleep, then do as `CountingEnv`."""
        time.sleep(self.step_seconds)
        return super().step(action)


class HangingEnv(CountingEnv):
    """A `CountingEnv` that never returns.

    Args:
        where: `"init"`, `"reset"`, `"step"` or `"close"`.
        after: How many calls of that method return before.
        length: Steps of an episode.
    """

    def __init__(self, where: str = "step", after: int = 0, length: int = 3) -> None:
        super().__init__(length)
        self.where = where
        self.after = after
        self._hang("init")

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Hang, or do as `CountingEnv`."""
        self._hang("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Hang, or do as `CountingEnv`."""
        self._hang("step")
        return super().step(action)

    def close(self) -> None:
        """Hang, or do as `CountingEnv`."""
        self._hang("close")
        super().close()

    def _hang(self, where: str) -> None:
        if where == self.where:
            self.after -= 1
            if self.after < 0:
                threading.Event().wait()


class InfoEnv(CountingEnv):
    """A `CountingEnv` with infos of all sorts, some of which come and go.

    Args:
        length: Steps of an episode.
        item: Something to be put into each step's info, e.g. an object that no codec knows.
    """

    def __init__(self, length: int = 3, item: object = None) -> None:
        super().__init__(length)
        self.item = item

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Do as `CountingEnv`, with an info."""
        observation, reward, terminated, truncated, _ = super().step(action)
        info: Info = {
            "int": self.count,
            "float": self.count / 3,
            "bool": self.count % 2 == 0,
            "scalar": np.float32(self.count),
            "array": np.full((2, 3), self.count, np.int16),
            "text": f"step {self.count}",
            "none": None,
            "list": [self.count, "x"],
            "nested": {"inner": self.count, "deeper": {"array": np.arange(2.0) * self.count}},
        }
        if self.count % 2:
            info["odd"] = self.count
        if self.item is not None:
            info["item"] = self.item
        return observation, reward, terminated, truncated, info


class InPlaceEnv(CountingEnv):
    """A `CountingEnv` that returns the same array and the same info each time, changed in place.

    Gymnasium forbids it, and many envs do it.
    """

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self._observation = np.zeros(4, np.float64)
        self._info: Info = {"counts": np.zeros(2, np.int64), "path": []}

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Do as `CountingEnv`, in the old array."""
        self._observation[...] = super().reset(seed=seed, options=options)[0]
        return self._observation, self._note()

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Do as `CountingEnv`, in the old array."""
        observation, reward, terminated, truncated, _ = super().step(action)
        self._observation[...] = observation
        return self._observation, reward, terminated, truncated, self._note()

    def _note(self) -> Info:
        self._info["counts"][...] = (self.episode, self.count)
        self._info["path"][:] = [self.episode, self.count]
        return self._info


class SpaceEnv(gymnasium.Env[Element, Element]):
    """Samples its observations from any space, reproducibly by its seed, and keeps its actions.

    Args:
        observation_space: What it samples from.
        action_space: What it announces; actions are not checked.
        length: Steps of an episode; then it is truncated.

    Attributes:
        actions: All actions that `step` got, the very objects.
    """

    def __init__(self, observation_space: Space, action_space: Space, length: int = 4) -> None:
        # Its own copy: sampling changes a space, and the caller's may serve other envs.
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space
        self.length = length
        self.count = 0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Element, Info]:
        """Seed the observation space, if there is a seed, and sample."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Element) -> tuple[Element, float, bool, bool, Info]:
        """Keep the action and sample."""
        self.actions.append(action)
        self.count += 1
        sample = self.observation_space.sample()
        return sample, float(self.count), False, self.count >= self.length, {}


class CustomSpace(gymnasium.Space[str]):
    """A space that Gymnasium knows nothing about: the words `"reset"` and `"step <n>"`."""

    def sample(self, mask: object = None, probability: object = None) -> str:  # noqa: ARG002
        """Return a word."""
        return f"step {self.np_random.integers(100)}"

    def contains(self, x: object) -> bool:
        """Return whether `x` is such a word."""
        return isinstance(x, str) and (x == "reset" or x.startswith("step "))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomSpace)

    def __hash__(self) -> int:
        return hash(CustomSpace)


class CustomSpaceEnv(gymnasium.Env[str, str]):
    """An env with `CustomSpace`s; its observation tells its last action."""

    def __init__(self) -> None:
        self.observation_space = CustomSpace()
        self.action_space = CustomSpace()

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        """Return `"reset"`."""
        super().reset(seed=seed, options=options)
        return "reset", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Return the action behind `"step "`."""
        return f"step {action}", 0.0, False, False, {}


def all_spaces() -> dict[str, Space]:
    """Return new spaces of every kind that Gymnasium has, by name, with no generator seeded."""
    infinity = np.inf
    fixed: dict[str, Space] = {
        "discrete": spaces.Discrete(3),
        "discrete_start": spaces.Discrete(4, start=-2),
        "discrete_int32": spaces.Discrete(5, dtype=np.int32),
        "discrete_uint8": spaces.Discrete(5, start=250, dtype=np.uint8),
        "box_scalar_bounds": spaces.Box(0.0, 1.0),
        "box_float16": spaces.Box(-1.0, 1.0, (3,), np.float16),
        "box_float32": spaces.Box(-1.0, 1.0, (2, 3), np.float32),
        "box_float64": spaces.Box(np.array([-1.0, 0.0]), np.array([0.0, 2.0]), dtype=np.float64),
        "box_unbounded": spaces.Box(-infinity, infinity, (3,), np.float32),
        "box_half_bounded": spaces.Box(
            np.array([-infinity, 0.0]), np.array([0.0, infinity]), dtype=np.float64
        ),
        "box_unbounded_int": spaces.Box(-infinity, infinity, (2,), np.int32),
        "box_uint8": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        "box_int32": spaces.Box(-7, 7, (2,), np.int32),
        "box_int64": spaces.Box(-(2**40), 2**40, (2,), np.int64),
        "box_bool": spaces.Box(0, 1, (3,), np.bool_),
        "box_no_axes": spaces.Box(-1.0, 1.0, (), np.float32),
        "box_empty": spaces.Box(-1.0, 1.0, (0, 2), np.float32),
        "multi_discrete": spaces.MultiDiscrete([2, 3, 4]),
        "multi_discrete_2d": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
        "multi_discrete_int8": spaces.MultiDiscrete([2, 3], dtype=np.int8),
        "multi_discrete_uint16": spaces.MultiDiscrete([2, 300], dtype=np.uint16),
        "multi_discrete_start": spaces.MultiDiscrete([2, 3], start=[-1, 5]),
        "multi_binary": spaces.MultiBinary(5),
        "multi_binary_2d": spaces.MultiBinary((2, 3)),
        "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,)))),
        "tuple_single": spaces.Tuple((spaces.MultiBinary(2),)),
        "tuple_nested": spaces.Tuple(
            (
                spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3, dtype=np.int8))),
                spaces.Dict(a=spaces.Box(0, 9, (2,), np.int16)),
            )
        ),
        "dict": spaces.Dict(position=spaces.Box(-1.0, 1.0, (3,)), gear=spaces.Discrete(5)),
        "dict_single": spaces.Dict(only=spaces.Discrete(2)),
        "dict_order": spaces.Dict(
            [("z", spaces.Discrete(2)), ("a", spaces.Box(0.0, 1.0, (1,), np.float64))]
        ),
        "dict_nested": spaces.Dict(
            outer=spaces.Dict(inner=spaces.Box(0, 255, (2, 2), np.uint8), n=spaces.Discrete(2)),
            pair=spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2))),
        ),
    }
    node, edge = spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4)
    ragged: dict[str, Space] = {
        "text": spaces.Text(6),
        "text_bounds": spaces.Text(8, min_length=3, charset="abcä"),
        "sequence": spaces.Sequence(spaces.Discrete(4)),
        "sequence_of_boxes": spaces.Sequence(spaces.Box(0.0, 1.0, (2,))),
        "sequence_stacked": spaces.Sequence(spaces.Box(0.0, 1.0, (2,)), stack=True),
        "sequence_of_dicts": spaces.Sequence(
            spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0.0, 1.0, (1,))), stack=True
        ),
        "sequence_of_text": spaces.Sequence(spaces.Text(3)),
        "graph": spaces.Graph(node, edge),
        "graph_box_edges": spaces.Graph(spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,))),
        "graph_no_edges": spaces.Graph(node, None),
        "one_of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,)))),
        "one_of_nested": spaces.OneOf((spaces.Text(4), spaces.Dict(a=spaces.Discrete(2)))),
        "dict_with_text": spaces.Dict(say=spaces.Text(4), go=spaces.Discrete(3)),
        "tuple_with_text": spaces.Tuple((spaces.Text(4), spaces.Discrete(3))),
        "tuple_of_ragged": spaces.Tuple((spaces.Text(4), spaces.Sequence(spaces.Discrete(2)))),
        "dict_with_graph": spaces.Dict(
            map=spaces.Graph(node, edge), inner=spaces.Dict(words=spaces.Sequence(spaces.Text(3)))
        ),
    }
    return {**fixed, **ragged}
