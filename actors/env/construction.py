"""Makes an actor's envs from their sources and describes them to the runner.

Leaves out how they are stepped (`slots.py`, `vector_slots.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from envbus.actors.env import source as env_source
from envbus.actors.env.import_rule import ImportRule
from envbus.actors.env.slot_group import SlotGroup
from envbus.actors.env.slots import EnvSlots
from envbus.actors.env.source import AnyEnv
from envbus.actors.env.vector_slots import VectorSlots
from envbus.actors.failures import slot_error
from envbus.actors.protocol import Build, Built, SlotError
from envbus.actors.spaces import spaces
from envbus.actors.spaces.spaces import Space
from envbus.bus.forking import Origin
from envbus.bus.process.pickling import pickled
from envbus.bus.wire.messages import Tree

__all__ = ["construct"]

T = TypeVar("T")
#: Makes one env, or one vector env.
Maker: TypeAlias = Callable[[], AnyEnv]


def construct(
    request: Build,
    report: Callable[[int], object] = lambda _: None,
    rule: ImportRule | None = None,
) -> tuple[list[SlotGroup], Built]:
    """Return the groups of slots, and the reply.

    If an env cannot be made, there are no groups, the reply holds the error of the first one
    that failed, and those made before it are closed.

    Args:
        request: What to make.
        report: Called with each source's number before it is made.
        rule: What may be imported and called; None: everything.

    Raises:
        ValueError: The autoreset mode is unknown.
    """
    mode = AutoresetMode(request.autoreset_mode)
    envs: list[AnyEnv] = []
    makers: list[Maker] = []
    #: The envs below all wrappers, by identity; held, as another one might get a dead one's.
    found: dict[int, object] = {}
    space_pairs = _SpacePairs()
    #: Slots of the envs that are complete; the next one's is the one that fails.
    complete = 0
    origin = Origin()
    try:
        if request.specs is not None:
            if rule is not None:
                raise PermissionError("a remote actor registers no env specs of others")
            env_source.register_missing(request.specs.value)
        for number, plain in enumerate(request.sources.value):
            report(number)
            makers.append(functools.partial(env_source.make, env_source.from_plain(plain), rule))
            env = makers[-1]()
            base = env.unwrapped
            if id(base) in found:
                raise ValueError(
                    f"{env} was returned for several envs, which would step it in turns; the "
                    "factory must make a new one in each call: lambda: gymnasium.make(...)"
                )
            found[id(base)] = base
            envs.append(env)
            space_pairs.add(envs[-1])
            complete += _count(envs[-1])
        groups = list(_group(envs, makers, mode, request.first_env_id))
        return groups, _describe(envs, space_pairs)
    except BaseException as error:
        origin.end_copy(error)
        failed = slot_error(complete, "build", error)
        return [], _not_built([failed, *_close_all(envs)])


class _SpacePairs:
    """The distinct pairs of observation and action space among envs.

    Attributes:
        plain: The pairs in `spaces/spaces.py`'s plain form.
        of: Which pair each env has.
    """

    def __init__(self) -> None:
        self.plain: list[list[Any]] = []
        self.of: list[int] = []
        self._found: list[tuple[Space, Space]] = []

    def add(self, env: AnyEnv) -> None:
        """Take in the spaces of the next env.

        Raises:
            Exception: Anything; `__eq__` and pickling of a custom space are anybody's code.
        """
        if isinstance(env, VectorEnv):
            pair = (env.single_observation_space, env.single_action_space)
        else:
            pair = (env.observation_space, env.action_space)
        for space in pair:
            if not isinstance(space, gymnasium.Space):
                raise TypeError(
                    f"expected a gymnasium.Space as a space of {env}, got "
                    f"{type(space).__module__}.{type(space).__qualname__}"
                )
        for number, (observation_space, action_space) in enumerate(self._found):
            if pair[0] == observation_space and pair[1] == action_space:
                self.of.append(number)
                return
        plain = [spaces.to_plain(space) for space in pair]
        try:
            pickled(plain)
        except Exception as exc:  # here it is one env's fault, in the reply it would be nobody's
            raise TypeError(f"a space of {env} cannot leave its process: {exc}") from exc
        self.plain.append(plain)
        self.of.append(len(self._found))
        self._found.append(pair)


def _describe(envs: Sequence[AnyEnv], space_pairs: _SpacePairs) -> Built:
    first = envs[0] if envs else gymnasium.Env[Any, Any]()
    metadata = {key: _portable(value) for key, value in (first.metadata or {}).items()}
    # The runner asked for it. Before Gymnasium 1.4 a SyncVectorEnv leaves it in its envs' class.
    metadata.pop("autoreset_mode", None)
    return Built(
        counts=[_count(env) for env in envs],
        spaces=Tree(space_pairs.plain),
        space_of=space_pairs.of,
        metadata=Tree(metadata),
        render_mode=first.render_mode if isinstance(first.render_mode, str) else None,
    )


def _portable(value: T) -> T | None:
    """`value`, or None if it cannot leave this process: nobody steps an env by its metadata."""
    try:
        pickled(value)
    except Exception:  # pickling calls anybody's code
        return None
    return value


def _group(
    envs: Sequence[AnyEnv], makers: Sequence[Maker], mode: AutoresetMode, first_env_id: int
) -> Iterator[SlotGroup]:
    """Yield vector envs by themselves and the envs between them together."""
    first = 0
    singles: list[gymnasium.Env[Any, Any]] = []
    for index, env in enumerate([*envs, None]):
        if env is not None and not isinstance(env, VectorEnv):
            singles.append(env)
            continue
        if singles:
            own = makers[index - len(singles) : index]
            yield EnvSlots(singles, mode, own, first_slot=first, first_env_id=first_env_id + first)
            first += len(singles)
            singles = []
        if env is not None:
            yield VectorSlots(
                env, mode, makers[index], first_slot=first, first_env_id=first_env_id + first
            )
            first += _count(env)


def _count(env: AnyEnv) -> int:
    return int(env.num_envs) if isinstance(env, VectorEnv) else 1


def _not_built(errors: list[SlotError]) -> Built:
    return Built(
        counts=[],
        spaces=Tree([]),
        space_of=[],
        metadata=Tree({}),
        render_mode=None,
        errors=errors,
    )


def _close_all(envs: Sequence[AnyEnv]) -> list[SlotError]:
    errors = []
    slot = 0
    origin = Origin()
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            origin.end_copy(error)
            errors.append(slot_error(slot, "close", error))
        slot += _count(env)
    return errors
