"""What runners and env actors say to each other.

Vocabulary only. A *slot* is a place for one sub-environment inside one actor, counted from 0;
`slots=None` means all of them. Arrays that are None travel in the arena instead of in frames.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.bus.wire.messages import Notice, Reply, Request, Tree

__all__ = [
    "Build",
    "Built",
    "Call",
    "CallResult",
    "CloseEnvs",
    "Exec",
    "Finish",
    "Making",
    "MapBlocks",
    "MapInfos",
    "Mapped",
    "Rebuild",
    "Reset",
    "SetAttr",
    "SlotError",
    "Step",
    "StepResult",
]


class SlotError(msgspec.Struct, frozen=True, kw_only=True):
    """One env raised. A value, not an exception: the other slots' results stand beside it."""

    slot: int
    #: What was being done: build, reset, step, autoreset, call, close.
    phase: str
    #: Module and qualified name of the exception's class.
    type_module: str
    type_name: str
    #: `str()` of the exception, or a note that it has none.
    message: str
    #: Formatted, with causes and groups.
    traceback: str
    #: The exception's `args`, where the codec can express them.
    args: Tree | None = None


class Built(Reply, frozen=True, kw_only=True):
    """The actor's envs exist. The lists have one entry per source."""

    #: Slots each source fills: 1 for an env, `num_envs` for a vector env.
    counts: list[int]
    #: Distinct pairs (observation space, action space) among the envs, `spaces/spaces.py`'s plain
    #: form.
    spaces: Tree
    #: Which pair each source has.
    space_of: list[int]
    #: The first env's `metadata` and `render_mode`.
    metadata: Tree
    render_mode: str | None
    errors: list[SlotError] = msgspec.field(default_factory=list)


class Build(Request[Built], frozen=True, kw_only=True):
    """Create the actor's envs. Asked once in an actor's life, before all else."""

    #: List of `EnvSource` values in the plain form of `env/source.py`, or callables.
    sources: Tree
    #: Value of a `gymnasium.vector.AutoresetMode`.
    autoreset_mode: str
    #: The pool's number of the actor's first slot, for messages to people.
    first_env_id: int = 0
    #: Env specs that were registered in the runner's process only, as cloudpickle takes them.
    specs: Tree | None = None


class Making(Notice, frozen=True, kw_only=True):
    """The actor begins to make an env: so that one that takes too long can be named."""

    #: Which of the sources of `Build`.
    source: int


class Mapped(Reply, frozen=True, kw_only=True):
    """The actor reads and writes its rows of the blocks now."""


class MapBlocks(Request[Mapped], frozen=True, kw_only=True):
    """Where observations, rewards, flags and actions are exchanged from now on."""

    #: The pool's single spaces, plain form; `BlockLayout.of` on both sides gives one layout.
    observation_space: Tree
    action_space: Tree
    #: Rows of the whole pool, and this actor's first one.
    num_envs: int
    first_row: int
    #: Number under which the pipe passes the shared memory's descriptor; 0: none, the
    #: arrays travel in frames.
    passed: int = 0
    #: Where in the shared memory the words are by which this actor may be asked to step
    #: (`bus/transport/words.py`); 0: nowhere.
    words: int = 0
    #: Where in it the records are in which infos may be left (`arrays/info_columns.py`); 0:
    #: nowhere.
    infos: int = 0
    #: What a reward or observation is that is not finite: "fault" (of its env), "warn", "off".
    check_finite: str = "off"


class MapInfos(Request[Mapped], frozen=True, kw_only=True):
    """Leave infos of these forms in their records from now on, when a word asks for a step."""

    #: `InfoLayout.to_plain`.
    layout: Tree


class StepResult(Reply, frozen=True, kw_only=True):
    """Outcome of `Step` or `Reset`, one row per addressed slot, in their order.

    That of `Rebuild` has no rows: `errors` only.
    Slots named in `errors` keep their former observation, with reward 0 and no flag.
    """

    #: Leaves of the observation space, each `(len(slots), *leaf_shape)`, if not in the arena.
    observation_arrays: list[npt.NDArray[Any]] | None = None
    #: List of observations, for spaces without a fixed size; records of envs with several agents
    #: as `packing.pack_records` packs them.
    observations: Tree | None = None
    #: `(len(slots),)`; None after a reset, or if in the arena.
    rewards: npt.NDArray[np.float64] | None = None
    terminations: npt.NDArray[np.bool_] | None = None
    truncations: npt.NDArray[np.bool_] | None = None
    #: List of info dicts; None if all are empty.
    infos: Tree | None = None
    errors: list[SlotError] = msgspec.field(default_factory=list)

    @property
    def stands_in_arena(self) -> bool:
        """Whether nothing has failed, and all but the infos is to be read in the arena."""
        return not self.errors and self.observations is None and self.rewards is None


class Reset(Request[StepResult], frozen=True, kw_only=True):
    """Start a new episode in the addressed slots."""

    slots: list[int] | None = None
    #: List of integers of any size, or None, one per addressed slot; None: no env is seeded.
    seeds: Tree | None = None
    options: Tree | None = None


class Rebuild(Request[StepResult], frozen=True, kw_only=True):
    """Close the addressed slots' envs and make them anew from their sources.

    A slot that was made anew refuses steps until it is reset. An env that cannot be made is named
    in the errors; its slot then fails whatever it is asked, until the next `Rebuild`. The slots of
    one vector env are addressed all together, here and in the first `Reset` after it.
    """

    slots: list[int] | None = None
    #: Seconds that closing one env may take; then its process ends. Infinite: no limit.
    close_timeout: float = 10.0


class Step(Request[StepResult], frozen=True, kw_only=True):
    """Advance the addressed slots by one step. Not idempotent: never sent twice."""

    slots: list[int] | None = None
    #: Leaves of the action space, each `(len(slots), *leaf_shape)`, if not in the arena.
    action_arrays: list[npt.NDArray[Any]] | None = None
    #: List of single actions, for those that do not fit the blocks as they are; those of envs
    #: with several agents as `packing.pack_by_agent` packs them.
    actions: Tree | None = None


class Finish(Request[StepResult], frozen=True, kw_only=True):
    """Tell what came of the step that was asked by a word, or take it now if it was not yet.

    The reply is that to a `Step` of all slots by actions in the arena. Not idempotent either: each
    step is taken once, however it was asked.
    """

    #: The word.
    number: int


class CallResult(Reply, frozen=True, kw_only=True):
    """What the addressed slots returned, in their order; None where `errors` names the slot."""

    values: Tree
    errors: list[SlotError] = msgspec.field(default_factory=list)


class Call(Request[CallResult], frozen=True, kw_only=True):
    """Call a method of the envs, or read an attribute; dotted names reach into attributes."""

    name: str
    args: Tree
    kwargs: Tree
    slots: list[int] | None = None


class SetAttr(Request[CallResult], frozen=True, kw_only=True):
    """Set an attribute of the envs."""

    name: str
    #: List, one value per addressed slot.
    values: Tree
    slots: list[int] | None = None


class Exec(Request[CallResult], frozen=True, kw_only=True):
    """Run `function(env, *args, **kwargs)` beside each addressed env."""

    function: Tree
    args: Tree
    kwargs: Tree
    slots: list[int] | None = None


class CloseEnvs(Request[CallResult], frozen=True, kw_only=True):
    """Close the actor's envs; errors are reported, not raised."""
