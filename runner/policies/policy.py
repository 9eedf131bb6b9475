"""`Policy`: what chooses actions; and those that need no learning: random, constant, a function.

Leaves out policies with weights (`mlp.py`, `adapters/torch_policy.py`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from envbus.actors.spaces.spaces import is_fixed_size
from envbus.bus.errors import ConfigError
from envbus.runner.batches.metrics import EpisodeResult
from envbus.runner.batches.nested import Tree, leaves_of, map_tree

__all__ = [
    "INPUTS",
    "ConstantPolicy",
    "EpisodeListener",
    "FunctionPolicy",
    "InputPolicy",
    "Policy",
    "PolicyFactory",
    "PolicyOutput",
    "RandomPolicy",
    "RowReader",
    "Ticket",
    "TwoStepPolicy",
    "VersionedWeights",
    "Weights",
    "check_has_no_inputs",
    "check_is_no_module",
    "count_rows",
    "import_function",
    "imported",
    "inputs_of",
    "parameters_of",
    "parse_policy",
    "versioned_weights",
    "zero_action",
]

#: By name, nested as the policy likes; arrays and numbers.
Weights: TypeAlias = Mapping[str, Any]


class PolicyOutput(NamedTuple):
    """What a policy answers, one row per observation."""

    #: Batched as Gymnasium batches them, or, where the space has no fixed size, a sequence.
    actions: Any
    #: For the rows' next calls; None of a policy without a state.
    states: Tree = None
    #: More columns, `(rows, ...)`: `action_logp`, `vf_preds`, ... The same ones each time.
    extras: Mapping[str, Tree] = {}
    #: Which weights chose each row, `(rows,)`; None: the policy's `policy_version` chose all.
    versions: npt.NDArray[np.int64] | None = None


class Policy(Protocol):
    """What chooses actions. Derive from it, or have its methods.

    It may be an `InputPolicy`, which is told more than observations, and an `EpisodeListener`, too.
    """

    #: Which weights it has; every row says which ones chose its action.
    policy_version: int = 0

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return an action per row.

        Args:
            observations: `(rows, ...)`, nested as the space is; an array of objects `(rows,)` if
                the space has no fixed size. Not to be written to.
            states: What was returned for these rows, or `initial_state` at an episode's begin,
                `(rows, ...)`; None of a policy without a state. A copy, which may be written to.
            explore: False: the best action instead of a sampled one.

        Returns:
            One row per observation, in arrays that may be used again with the next call. States
            have the structure and shapes of `initial_state`, and become its dtypes.
        """
        ...

    def initial_state(self) -> Tree:
        """Return the state of one row at the begin of an episode; None: there is none.

        It is asked when an episode's first action is chosen, and may follow from the weights.
        Whether there is one never changes.
        """
        return None

    def get_weights(self) -> Weights:
        """Return copies."""
        return {}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Take over `get_weights` of another; None: the version after the present one."""
        del weights
        self.policy_version = self.policy_version + 1 if version is None else version


#: Stands for actions that were submitted and not collected; opaque to whoever holds it.
Ticket: TypeAlias = object


@runtime_checkable
class TwoStepPolicy(Policy, Protocol):
    """A policy that works elsewhere, so that its caller can do other things meanwhile.

    `compute_actions` is `submit_actions` and, at once, `collect_actions`. Used by one thread.
    """

    def submit_actions(
        self,
        observations: Tree,
        states: Tree,
        *,
        explore: bool = True,
        env_ids: npt.NDArray[np.int64] | None = None,
    ) -> Ticket:
        """Begin to choose actions, without waiting; arguments as `compute_actions` has them.

        Args:
            observations: Not to be written to until the ticket is collected or discarded.
            states: As `observations`.
            explore: As in `compute_actions`.
            env_ids: `(rows,)`, of a pool that this policy knows: the observations are what its envs
                returned last, unchanged. They may then be read where the envs wrote them.

        Raises:
            OverloadedError: Too much is submitted and not collected. Nothing was sent.
        """
        ...

    def collect_actions(self, ticket: Ticket) -> PolicyOutput:
        """Wait for the actions of a ticket, in whichever order; each ticket once.

        Raises:
            Exception: What `compute_actions` would raise.
        """
        ...

    def discard_actions(self, ticket: Ticket) -> None:
        """Forget a ticket that will not be collected. No error if it was."""
        ...


@runtime_checkable
class RowReader(Protocol):
    """A policy that can read observations where a pool's envs write them."""

    def share_rows(self, pool: Any) -> bool:
        """Let `env_ids` of `submit_actions` be those of this `ActorPool`, from now on.

        Returns:
            Whether the rows will be read there. Else they are sent.
        """
        ...


#: Names of what an `InputPolicy` may want.
INPUTS: Final = ("prev_actions", "prev_rewards", "t", "eps_id", "env_id", "timestep")


class InputPolicy(Policy, Protocol):
    """A policy that an `EnvRunner` tells more than observations, in the runner's own process.

        class Repeating(Policy):
            wanted_inputs = ("prev_actions", "t")

            def compute_actions(
                self, observations, states, *, explore=True, prev_actions=None, t=None
            ):
                ...

    Each input comes by its name, with a row per observation, and is not to be written to:

    - `prev_actions`: what stands in the batch as the agent's last action in this episode, in the
      form and dtypes of the action space (of what goes into the action connector); the zero of that
      space where there is none;
    - `prev_rewards`: `(rows,)` float32, the reward of that row of the batch; 0 where there is none;
    - `t`: `(rows,)` int64, env steps of the episode so far;
    - `eps_id`, `env_id`: `(rows,)` int64, as in the batch;
    - `timestep`: `(rows,)` int64, env steps in all samples of this runner before the present one.

    `prev_actions` and `prev_rewards` become columns of the batch.
    """

    #: Some of `INPUTS`; never changes.
    wanted_inputs: Sequence[str]


class EpisodeListener(Protocol):
    """A policy that is told of the episodes of a runner in the same process, its own and others'.

    For noise and schedules that go by episodes. A policy may have one of these methods or both.
    In a block of `EnvRunner.serving` another thread calls them.
    """

    def on_episode_start(self, *, env_id: int, eps_id: int) -> None:
        """The first observations of an episode are there, and no action was chosen yet.

        The one before in this env is over; was it given up, there was no end of it.
        """

    def on_episode_end(self, *, result: EpisodeResult) -> None:
        """An episode is over, by the env's word or by a fault."""


def inputs_of(policy_id: str, policy: Any) -> tuple[str, ...]:
    """Return what a policy wants besides observations.

    Raises:
        ConfigError: There is no such input, or the policy works elsewhere, where none comes.
    """
    inputs = getattr(policy, "wanted_inputs", ())
    if not isinstance(inputs, tuple | list) or any(name not in INPUTS for name in inputs):
        raise ConfigError(
            f"policy {policy_id!r} has wanted_inputs={inputs!r:.80}, and they are a tuple of names "
            f"among {', '.join(INPUTS)}"
        )
    if inputs and isinstance(policy, TwoStepPolicy):
        check_has_no_inputs(policy_id, policy, "a policy that works elsewhere")
    return tuple(inputs)


def check_has_no_inputs(policy_id: str, policy: Any, where: str) -> None:
    """Raise `ConfigError` if a policy wants inputs where there are none."""
    if inputs := tuple(getattr(policy, "wanted_inputs", ())):
        raise ConfigError(
            f"policy {policy_id!r} wants {', '.join(inputs)}, which {where} is not told: an "
            "EnvRunner tells them to policies in its own process"
        )


@runtime_checkable
class VersionedWeights(Protocol):
    """A policy whose weights others change, too: both are asked for at one go."""

    #: Whether its weights can be set here; else another process does that.
    can_set_weights: bool

    def get_versioned_weights(self) -> tuple[Weights, int]:
        """Return `get_weights`, and which version these are."""
        ...


def versioned_weights(policy: Policy) -> tuple[Weights, int]:
    """Return a policy's weights, and which version these are."""
    if isinstance(policy, VersionedWeights):
        return policy.get_versioned_weights()
    return policy.get_weights(), policy.policy_version


#: `(action space of one env, seed) -> policy`.
PolicyFactory: TypeAlias = "Callable[[Space[Any], int | None], Policy]"


class RandomPolicy(Policy):
    """Samples the action space, and only what an observation's `action_mask` allows.

    A mask is the `action_mask` of observations that are dicts, `(rows, n)`, as in PettingZoo's
    board games; Discrete spaces heed it. One that allows nothing is a ValueError.

    Args:
        space: Of one action.
        seed: Of what is sampled; the space itself is left alone.
    """

    def __init__(self, space: Space[Any], seed: int | None = None) -> None:
        self._space = space
        self._fixed = is_fixed_size(space)
        self._seeds = np.random.SeedSequence(seed)
        self._seed = seed
        self._num_rows = 0
        self._batched = space
        self._masked = np.random.default_rng(seed)

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return samples, also without `explore`."""
        del explore
        if isinstance(observations, dict) and "action_mask" in observations:
            allowed = self._allowed(observations["action_mask"])
            if allowed is not None:
                return PolicyOutput(allowed, states)
        rows = count_rows(observations)
        if rows > self._num_rows or not self._fixed:
            self._grow(rows)
        actions = self._batched.sample()
        if not self._fixed:
            actions = list(actions)  # a tuple would be a batch of a Tuple space
        elif rows < self._num_rows:
            actions = map_tree(lambda leaf: leaf[:rows], actions)
        return PolicyOutput(actions, states)

    def _allowed(self, mask: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Return samples of what a mask allows; None: it is of no Discrete space."""
        space = self._space
        if not isinstance(space, spaces.Discrete):
            return None
        if not np.all(possible := np.any(mask, axis=1)):
            row = int(np.flatnonzero(~possible)[0])
            raise ValueError(
                f"the action_mask of row {row} allows no action of {space}: {mask[row]}"
            )
        draws = np.where(mask, self._masked.random(mask.shape), -1.0)
        allowed: npt.NDArray[Any] = (draws.argmax(axis=1) + space.start).astype(space.dtype)
        return allowed

    def _grow(self, rows: int) -> None:
        if rows == self._num_rows:
            return
        self._num_rows = rows
        if self._fixed:
            self._batched = batch_space(self._space, rows)
        else:  # one action after the other
            self._batched = spaces.Tuple([copy.deepcopy(self._space) for _ in range(rows)])
        self._batched.seed(self._seed)
        if self._seed is not None:
            # Another size begins another stream; the first is the seed's own.
            self._seed = int(self._seeds.spawn(1)[0].generate_state(1)[0])


class ConstantPolicy(Policy):
    """Gives one action to all.

    Args:
        space: Of one action.
        action: None: what is closest to zero.

    Raises:
        ConfigError: The space knows no zero.
    """

    def __init__(self, space: Space[Any], action: Any = None) -> None:
        self._space = space
        self._action = zero_action(space) if action is None else action
        self._batches: dict[int, Any] = {}

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return the action for each row; not to be written to."""
        del explore
        rows = count_rows(observations)
        if rows not in self._batches:
            actions: Any = [self._action] * rows
            if is_fixed_size(self._space):
                out: Any = create_empty_array(self._space, rows)
                actions = concatenate(self._space, actions, out)
            self._batches = {rows: actions}
        return PolicyOutput(self._batches[rows], states)


class FunctionPolicy(Policy):
    """Calls a function of the observations.

    Args:
        function: `observations -> actions`, or a `PolicyOutput`; both batched.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return what the function makes of the observations."""
        del explore
        out = self._function(observations)
        return out if isinstance(out, PolicyOutput) else PolicyOutput(out, states)


def check_is_no_module(given: object, what: str) -> None:
    """See that a function is none of PyTorch's modules, which do not take arrays.

    Raises:
        ConfigError: It is one; says how it becomes a policy.
    """
    if hasattr(given, "state_dict") and hasattr(given, "forward"):
        raise ConfigError(
            f"{what} is a PyTorch module ({type(given).__name__}), which takes tensors: give "
            "TorchPolicy(module, action_space), from envbus.runner.adapters.torch_policy"
        )


def parse_policy(text: str) -> PolicyFactory:
    """Return what makes the policy that `text` names: "random", "zero" or "module:function".

    A function is called as `function(observations, action_space)`, both batched.

    Raises:
        ConfigError: There is no such policy, its module cannot be imported, or the function cannot
            be called so.
    """
    if text == "random":
        return RandomPolicy
    if text == "zero":
        return lambda space, _: ConstantPolicy(space)
    function = import_function(text)
    _check_takes(function, text, "observations", "action_space")

    def make(space: Space[Any], seed: int | None) -> Policy:
        batched = {}

        def choose(observations: Any) -> Any:
            rows = count_rows(observations)
            if rows not in batched:
                batched[rows] = batch_space(space, rows)
                batched[rows].seed(seed)
            return function(observations, batched[rows])

        return FunctionPolicy(choose)

    return make


def import_function(text: str) -> Callable[..., Any]:
    """Return the function that `"module:function"` names.

    Raises:
        ConfigError: There is none.
    """
    target = imported(text, "random, zero or module:function")
    if not callable(target):
        raise ConfigError(f"policy {text!r} is not a function but a {type(target).__name__}")
    return cast("Callable[..., Any]", target)


def imported(text: str, wanted: str) -> Any:
    """Return what `"module:name"` names; `wanted` says what may stand there, for people.

    Raises:
        ConfigError: There is no such thing.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"policy must be {wanted}, not {text!r}")
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:  # a script without a guard ends at its import
        raise ConfigError(
            f"cannot import the policy's module {module_name!r}: {type(exc).__name__}: {exc}"
        ) from exc
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"module {module_name!r} has no {name!r} to use as policy")
        target = getattr(target, part)
    return target


def _check_takes(function: Callable[..., Any], text: str, *arguments: str) -> None:
    """Raise `ConfigError` unless a function can be called with these arguments, by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, and does not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as exc:
        raise ConfigError(
            f"policy {text!r} is called as {text.rpartition(':')[2]}({', '.join(arguments)}), and "
            f"does not take that: {exc}"
        ) from None


def parameters_of(function: Callable[..., Any]) -> tuple[set[str], int]:
    """Return the names of a function's parameters, and how many values it needs by position.

    None and 0 of those that are written in C and do not tell.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(), 0
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return {one.name for one in parameters}, len(needed)


def count_rows(batch: Tree) -> int:
    """Return the number of rows of a batch as policies get them."""
    if isinstance(batch, np.ndarray):
        return len(batch)
    for _, leaf in leaves_of(batch):
        return len(leaf)
    raise ValueError("a batch without any array has no rows to count")


def zero_action(space: Space[Any]) -> Any:
    """Return the member of `space` that is closest to zero.

    Raises:
        ConfigError: The space, or a part of it, knows no zero.
    """
    match space:
        case spaces.Box():
            zeros = np.zeros(space.shape, space.dtype)
            return np.clip(zeros, space.low, space.high).astype(space.dtype)
        case spaces.Discrete():
            inside = int(space.start) <= 0 < int(space.start) + int(space.n)
            return space.dtype.type(0 if inside else space.start)
        case spaces.MultiDiscrete():
            has_zero = (space.start <= 0) & (space.start + space.nvec > 0)
            return np.where(has_zero, 0, space.start).astype(space.dtype)
        case spaces.MultiBinary():
            return np.zeros(space.shape, space.dtype)
        case spaces.Dict():
            return {key: zero_action(part) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(zero_action(part) for part in space.spaces)
        case spaces.Text():
            return space.character_list[0] * space.min_length if space.min_length else ""
        case spaces.OneOf():
            return (np.int64(0), zero_action(space.spaces[0]))
    raise ConfigError(
        f"no zero action is known for {type(space).__name__}; use another policy than zero"
    )
