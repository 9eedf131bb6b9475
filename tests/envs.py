"""Envs that go wrong or are unusual, and spaces of every kind, for tests of whatever hosts envs."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envbus.actors.spaces.spaces import Element, Space
from envbus.actors.testing import CountingEnv

Info: TypeAlias = dict[str, Any]
Array: TypeAlias = npt.NDArray[Any]
Options: TypeAlias = dict[str, Any] | None


class _FaultyEnv(CountingEnv):
    """A `CountingEnv` one of whose methods goes wrong.

    Args:
        where: `"init"`, `"reset"`, `"step"` or `"close"`.
        after: How many calls of that method go well before.
        length: Steps of an episode.
    """

    def __init__(self, where: str = "step", after: int = 0, length: int = 3) -> None:
        super().__init__(length)
        self.where = where
        self.after = after
        self._count_down("init")

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        self._count_down("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        self._count_down("step")
        return super().step(action)

    def close(self) -> None:
        self._count_down("close")
        super().close()

    def _count_down(self, where: str) -> None:
        if where == self.where:
            self.after -= 1
            if self.after < 0:
                self._go_wrong()

    def _go_wrong(self) -> None:
        """Do not return."""


class FailingEnv(_FaultyEnv):
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
        self.error = error
        super().__init__(where, after, length)

    def _go_wrong(self) -> None:
        raise RuntimeError("failing on purpose") if self.error is None else self.error


class HangingEnv(_FaultyEnv):
    """A `CountingEnv` that never returns; arguments as `FailingEnv` has them."""

    def _go_wrong(self) -> None:
        threading.Event().wait()


class OldEnv(CountingEnv):
    """A `CountingEnv` of the old Gym API; `limited`: its episodes end by a time limit."""

    def __init__(self, length: int = 3, *, limited: bool = False) -> None:
        super().__init__(length)
        self.limited = limited

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"TimeLimit.truncated": True} if self.limited else {}
        return observation, reward, terminated or truncated, info


class InPlaceEnv(CountingEnv):
    """A `CountingEnv` that returns the same array and the same info each time, changed in place.

    Gymnasium forbids it, and many envs do it.
    """

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self._observation = np.zeros(4, np.float64)
        self._info: Info = {"counts": np.zeros(2, np.int64), "path": []}

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        self._observation[...] = super().reset(seed=seed, options=options)[0]
        return self._observation, self._note()

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
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
        super().reset(seed=seed, options=options)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Element) -> tuple[Element, float, bool, bool, Info]:
        self.actions.append(action)
        self.count += 1
        sample = self.observation_space.sample()
        return sample, float(self.count), False, self.count >= self.length, {}


class CustomSpace(gymnasium.Space[str]):
    """A space that Gymnasium knows nothing about: the words `"reset"` and `"step <n>"`."""

    def sample(self, mask: object = None, probability: object = None) -> str:
        return f"step {self.np_random.integers(100)}"

    def contains(self, x: object) -> bool:
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
        super().reset(seed=seed, options=options)
        return "reset", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return f"step {action}", 0.0, False, False, {}


def discrete(n: int, *, dtype: type[np.integer[Any]], start: int = 0) -> spaces.Discrete[Any]:
    """Return a Discrete space of a dtype; before 1.2.2 Gymnasium has those of int64 only."""
    if "dtype" not in inspect.signature(spaces.Discrete).parameters:
        return spaces.Discrete(n, start=start)
    return spaces.Discrete(n, start=start, dtype=dtype)


#: Whether a Graph may be of any spaces: before 1.4 Gymnasium has those of Box and Discrete only.
ANY_GRAPHS = hasattr(spaces.Graph(spaces.Discrete(2), None), "batch_node_space")


def all_spaces() -> dict[str, Space]:
    """Return new spaces of every kind that Gymnasium has, by name, with no generator seeded."""
    infinity = np.inf
    fixed: dict[str, Space] = {
        "discrete": spaces.Discrete(3),
        "discrete_start": spaces.Discrete(4, start=-2),
        "discrete_int32": discrete(5, dtype=np.int32),
        "discrete_uint8": discrete(5, start=250, dtype=np.uint8),
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
                spaces.Tuple((spaces.Discrete(2), discrete(3, dtype=np.int8))),
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
