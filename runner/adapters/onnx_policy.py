"""`OnnxPolicy`: a network in ONNX's format as a policy, without the library that trained it.

Needs onnxruntime (`pip install -e '.[onnx]'`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from envbus.actors.spaces.spaces import shown
from envbus.bus.errors import ConfigError
from envbus.runner.batches.nested import Tree, leaves_of, map_tree
from envbus.runner.extras import needed_for
from envbus.runner.policies.distributions import ActionHead
from envbus.runner.policies.policy import Policy, PolicyOutput, Weights

with needed_for("OnnxPolicy", "onnx"):
    import onnxruntime

__all__ = ["OnnxPolicy", "check_fit"]

_DTYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
#: `get_weights` returns one model, so there is no folder to look in.
_ONE_FILE = (
    ". Its weights stand in a file of their own, and must be in the model: "
    "torch.onnx.export(..., external_data=False), or "
    "onnx.save(onnx.load(path), path, save_as_external_data=False)"
)


class OnnxPolicy(Policy):
    """Runs a model whose inputs and outputs have these names; each has rows as its first axis.

    Inputs:
        `obs`, or of a Dict space `obs.key`, of a Tuple space `obs.0`, ...; cast to the model's
        dtype. An input that is the only one but for states may have any name.
        `state_in`, or `state_in.name` for each of several: begins with zeros in each episode.

    Outputs, one of the first three:
        `logits`, `(rows, n)` of a Discrete space: sampled, or the largest without `explore`.
        `means`, `(rows, n)` of a Box, with `log_std`, `(rows, n)`: sampled likewise; without
        `log_std` they are the actions.
        `actions`: as they are.
        `state_out`, or `state_out.name`: as `state_in`.
        All others become columns; so does `action_logp` of what was sampled here.

    Args:
        model: A file, or its bytes.
        action_space: Of one env.
        names: What inputs and outputs of the model are here, where they have other names.
        seed: Of what is sampled.
        threads: That one call uses.
        providers: onnxruntime's, in order of preference; None: those that are there.

    Raises:
        ConfigError: It is no model, its names do not fit, an axis of rows has a fixed length, or
            the space is neither Discrete nor a Box and there are no `actions`.
    """

    def __init__(
        self,
        model: str | Path | bytes,
        action_space: Space[Any],
        *,
        names: Mapping[str, str] | None = None,
        seed: int | None = None,
        threads: int = 1,
        providers: Sequence[str] | None = None,
    ) -> None:
        self._space = action_space
        self._names = dict(names or {})
        self._threads = threads
        self._providers = list(providers or onnxruntime.get_available_providers())
        self._rng = np.random.default_rng(seed)
        self._load(model if isinstance(model, bytes) else Path(model).read_bytes())

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return actions in the dtype of the space, and what else the model gives."""
        given = _flat("obs", observations)
        if len(self._sole) == 1 and len(given) == 1:
            given = dict.fromkeys(self._sole, *given.values())
        given |= _flat("state_in", states) if self._has_state else {}
        feed = {}
        for name, (full_name, dtype, _) in self._inputs.items():
            if name not in given:
                raise ValueError(f"the model takes {name!r}; there are {sorted(given)}")
            feed[full_name] = np.asarray(given[name], dtype)
        answers = self._session.run(list(self._outputs.values()), feed)
        found = dict(zip(self._outputs, answers, strict=True))
        after: Tree = None
        if self._has_state:
            after = _tree({name: found.pop(f"state_out{name[8:]}") for name in self._states})
        return PolicyOutput(self._choose(found, explore), after, found)

    def initial_state(self) -> Tree:
        """Return zeros as the model's `state_in` has them."""
        if not self._has_state:
            return None
        return _tree(
            {name: np.zeros(self._inputs[name][2], self._inputs[name][1]) for name in self._states}
        )

    def get_weights(self) -> Weights:
        """Return the model itself, `{"model": bytes}`."""
        return {"model": self._model}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Take over another model with the same space; raises as when it is made."""
        self._load(bytes(weights["model"]))
        super().set_weights(weights, version)

    def input_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the shape of one row by input, states left out; None: any length."""
        return {name: self._inputs[name][2] for name in self._sole}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._load(self._model)

    def _choose(self, found: dict[str, npt.NDArray[Any]], explore: bool) -> Any:
        """Return actions, and leave in `found` what becomes a column."""
        if "actions" in found:
            return found.pop("actions")
        assert self._head is not None
        if "means" in found and "log_std" not in found:
            return self._head.shaped(found.pop("means"))
        outputs = found.pop("logits") if self._head.is_discrete else found.pop("means")
        if outputs.shape[1:] != (self._head.size,):
            raise ValueError(
                f"the model gives {outputs.shape[1:]} numbers per row, {shown(self._space)} needs "
                f"({self._head.size},)"
            )
        log_std = found.pop("log_std", None)
        actions, logp = self._head.choose(outputs, self._rng if explore else None, log_std)
        found["action_logp"] = logp
        return actions

    def _load(self, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = self._threads
        try:
            session = onnxruntime.InferenceSession(model, options, providers=self._providers)
        except Exception as exc:  # onnxruntime's own types, which have no public base
            told = _ONE_FILE if "external data" in str(exc).lower() else ""
            raise ConfigError(f"this is no ONNX model that can be run: {exc}{told}") from exc
        #: By our name: the model's, dtype, shape of one row.
        inputs = {}
        for one in session.get_inputs():
            inputs[self._names.get(one.name, one.name)] = (
                one.name,
                _dtype_of(one),
                _row_shape(one),
            )
        outputs = {self._names.get(one.name, one.name): one.name for one in session.get_outputs()}
        states = [name for name in inputs if name.partition(".")[0] == "state_in"]
        head = self._head_for(outputs, inputs)
        for name in states:
            if f"state_out{name[8:]}" not in outputs:
                raise ConfigError(f"the model takes {name!r} and does not give its successor")
            if None in inputs[name][2]:
                raise ConfigError(f"{name!r} needs axes of fixed length but for the rows")
        self._inputs, self._outputs, self._states, self._head = inputs, outputs, states, head
        self._has_state = bool(states)
        self._sole = [name for name in inputs if name not in states]
        self._session, self._model = session, model

    def _head_for(self, outputs: Mapping[str, str], inputs: Mapping[str, Any]) -> ActionHead | None:
        if "actions" in outputs:
            return None
        head = ActionHead(self._space, "OnnxPolicy without an output 'actions'")
        needed = "logits" if head.is_discrete else "means"
        if needed not in outputs:
            raise ConfigError(
                f"the model must give 'actions', or {needed!r} for {shown(self._space)}; it takes "
                f"{sorted(inputs)} and gives {sorted(outputs)}; say by `names` which is which"
            )
        return head


def check_fit(policy: OnnxPolicy, observation_space: Space[Any], action_space: Space[Any]) -> None:
    """See whether a model takes observations of a space, and gives actions of one.

    Raises:
        ConfigError: It does not; says which input or output is of which shape.
    """
    row = observation_space.sample()
    given, wanted = _flat("obs", row), policy.input_shapes()
    if len(wanted) == 1 and len(given) == 1:
        given = dict.fromkeys(wanted, *given.values())
    for name, shape in wanted.items():
        if name not in given:
            raise ConfigError(
                f"the model takes {name!r}; the observation space {shown(observation_space)} has "
                f"{sorted(given)}"
            )
        own = np.shape(given[name])
        if len(own) != len(shape) or any(
            length not in (None, there) for length, there in zip(shape, own, strict=True)
        ):
            raise ConfigError(
                f"the model's input {name!r} takes rows of shape {shape}, the observation space "
                f"{shown(observation_space)} has {own}"
            )
    rows = map_tree(lambda leaf: np.asarray(leaf)[np.newaxis], row)
    first = policy.initial_state()
    states = None if first is None else map_tree(lambda leaf: np.asarray(leaf)[np.newaxis], first)
    try:
        out = policy.compute_actions(rows, states, explore=False)
        action = map_tree(lambda leaf: np.asarray(leaf)[0], out.actions)
    except Exception as exc:  # onnxruntime's own types, which have no public base
        raise ConfigError(f"the model cannot answer an observation: {exc}") from exc
    expected = action_space.sample()
    for (name, leaf), (_, other) in zip(
        leaves_of(action, "action"), leaves_of(expected, "action"), strict=False
    ):
        if np.shape(leaf) != np.shape(other):
            raise ConfigError(
                f"the model's {name} has shape {np.shape(leaf)}, the action space "
                f"{shown(action_space)} has {np.shape(other)}"
            )


def _dtype_of(one: Any) -> Any:
    try:
        return _DTYPES[one.type]
    except KeyError:
        raise ConfigError(f"input {one.name!r} is of {one.type}, which no column is") from None


def _row_shape(one: Any) -> tuple[int | None, ...]:
    """Return the shape without the axis of rows; None where a length is not fixed."""
    if not one.shape or isinstance(one.shape[0], int):
        raise ConfigError(
            f"input {one.name!r} has the shape {one.shape}: export it with a first axis of any "
            "length"
        )
    return tuple(length if isinstance(length, int) else None for length in one.shape[1:])


def _flat(name: str, tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by dotted names."""
    if isinstance(tree, dict):
        parts: Any = tree.items()
    elif isinstance(tree, tuple):
        parts = enumerate(tree)
    else:
        return {name: tree}
    return {
        path: leaf for key, part in parts for path, leaf in _flat(f"{name}.{key}", part).items()
    }


def _tree(leaves: Mapping[str, Any]) -> Tree:
    """Return the states by name, or the only one, if it has none."""
    if list(leaves) == ["state_in"]:
        return leaves["state_in"]
    return {name.partition(".")[2]: leaf for name, leaf in leaves.items()}
