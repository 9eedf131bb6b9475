from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from envbus.runner.adapters.onnx_policy import OnnxPolicy  # noqa: E402  # needs onnxruntime

SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
ROWS = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
FLOAT = 1  # onnx.TensorProto.FLOAT


def build(
    nodes: list[Any],
    inputs: Mapping[str, Any],
    outputs: list[str],
    constants: Mapping[str, Any] | None = None,
) -> bytes:
    helper = onnx.helper
    graph = helper.make_graph(
        nodes,
        "policy",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def export(policy: MlpPolicy, action: str, seen: str = "obs") -> bytes:
    """An `MlpPolicy`'s networks: the same weights in ONNX's format."""
    weights = dict(policy.get_weights())
    log_std = weights.pop("log_std", None)
    nodes = []
    for net, output in (("pi", action), ("vf", "values")):
        layers = sum(name.startswith(f"{net}.") for name in weights) // 2
        last = seen
        for layer in range(layers):
            end = layer == layers - 1
            name = f"{net}.{layer}"
            out = output if end else f"{name}.sum"
            nodes.append(node("Gemm", f"{last} {name}.weight {name}.bias", out))
            if not end:
                nodes.append(node("Tanh", f"{name}.sum", f"{name}.tanh"))
                last = f"{name}.tanh"
    nodes.append(node("Squeeze", "values axis", "vf_preds"))
    weights["axis"] = np.array([1])
    outputs = [action, "vf_preds"]
    if log_std is not None:
        weights["own_log_std"] = log_std
        nodes += [node("Sub", "means means", "zeros"), node("Add", "zeros own_log_std", "log_std")]
        outputs.append("log_std")
    return build(nodes, {seen: ["rows", 3]}, outputs, weights)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(4, start=2), "logits"),
        (spaces.Box(-1.0, 1.0, (2, 1), np.float32), "means"),
    ],
    ids=["discrete", "gaussian"],
)
def test_a_network_in_onnx_acts_as_the_same_one_in_numpy(
    space: Any, action: str, tmp_path: Path
) -> None:
    mlp = MlpPolicy(SEEN, space, seed=5)
    file = tmp_path / "policy.onnx"
    file.write_bytes(export(mlp, action))
    for policy in (OnnxPolicy(file, space, seed=1), OnnxPolicy(file.read_bytes(), space, seed=1)):
        mine = policy.compute_actions(ROWS, None, explore=False)
        its = mlp.compute_actions(ROWS, None, explore=False)
        assert mine.actions == pytest.approx(its.actions, abs=1e-5)
        assert mine.actions.dtype == its.actions.dtype
        assert mine.actions.shape == its.actions.shape
        assert mine.extras.keys() == its.extras.keys() == {"action_logp", "vf_preds"}
        for name, column in its.extras.items():
            assert mine.extras[name] == pytest.approx(column, abs=1e-5)
            assert mine.extras[name].dtype == column.dtype
    sampled = policy.compute_actions(np.repeat(ROWS[:1], 5000, axis=0), None)
    assert len(np.unique(sampled.actions)) > 3
    if action == "logits":
        for chosen in (2, 3, 4, 5):
            found = sampled.actions == chosen
            logp = sampled.extras["action_logp"][found][0]
            assert found.mean() == pytest.approx(np.exp(logp), abs=0.03)


def test_a_runner_samples_with_it_and_its_weights_are_the_model() -> None:
    with ActorPool(["CartPole-v1"] * 2, num_actors=1) as pool:
        space = pool.single_action_space

        def model(toward: int) -> bytes:
            weight = np.zeros((4, 2), np.float32)
            weight[:, toward] = 1e6
            nodes = [
                node("Mul", "x x", "square"),
                node("Gemm", "square weight", "logits"),
            ]
            return build(nodes, {"x": ["rows", 4]}, ["logits"], {"weight": weight})

        runner = EnvRunner(pool, OnnxPolicy(model(0), space), RunnerConfig(explore=False))
        first = runner.sample(num_env_steps=8).single()
        weights = runner.get_weights()
        assert weights == {"default_policy": {"model": model(0)}}
        runner.set_weights({"default_policy": {"model": model(1)}})
        second = runner.sample(num_env_steps=8).single()
        assert first["actions"].tolist() == [0] * 8
        assert second["actions"].tolist() == [1] * 8
        assert (first["policy_version"][0], second["policy_version"][0]) == (0, 1)
        assert first["action_logp"].shape == (8,)


def test_a_recurrent_model_gets_its_state_back_and_begins_with_zeros() -> None:
    nodes = [
        node("Add", "state_in.h one", "state_out.h"),
        node("Identity", "state_in.c", "state_out.c"),
        node("ReduceSum", "state_out.h axis", "actions", keepdims=0),
        node("Identity", "obs", "unused"),
    ]
    inputs = {"obs": ["rows", 3], "state_in.h": ["rows", 2], "state_in.c": ["rows", 1, 4]}
    constants = {"one": np.ones(1, np.float32), "axis": np.array([1])}
    outputs = ["actions", "state_out.h", "state_out.c", "unused"]
    policy = OnnxPolicy(build(nodes, inputs, outputs, constants), spaces.Box(0, 9))
    first = policy.initial_state()
    assert {name: array.shape for name, array in first.items()} == {"h": (2,), "c": (1, 4)}
    states = {name: np.stack([array] * 5) for name, array in first.items()}
    for step in (1, 2, 3):
        out = policy.compute_actions(ROWS[:5], states)
        assert out.actions.tolist() == [2.0 * step] * 5
        assert out.extras.keys() == {"unused"}
        states = out.states
    lonely = build(
        [node("Add", "state_in obs", "state_out"), node("Identity", "obs", "actions")],
        {"obs": ["rows", 2], "state_in": ["rows", 2]},
        ["actions", "state_out"],
    )
    policy = OnnxPolicy(lonely, spaces.Box(0, 1, (2,)))
    assert policy.initial_state().tolist() == [0.0, 0.0]
    seen = np.ones((3, 2), np.float32)
    assert policy.compute_actions(seen, np.ones((3, 2))).states.tolist() == [[2, 2]] * 3


def test_observations_of_dicts_and_tuples_are_inputs_by_dotted_names() -> None:
    model = build(
        [node("Add", "obs.left obs.right.0", "actions")],
        {"obs.left": ["rows", 2], "obs.right.0": ["rows", 2]},
        ["actions"],
    )
    policy = OnnxPolicy(model, spaces.Box(0, 9, (2,)))
    ones = np.ones((3, 2), np.uint8)  # cast to what the model takes
    seen = {"left": ones, "right": (ones * 2,)}
    assert policy.compute_actions(seen, None).actions.tolist() == [[3, 3]] * 3
    with pytest.raises(ValueError, match=r"takes 'obs.left'; there are \['obs.right.0'\]"):
        policy.compute_actions({"right": (ones,)}, None)


def test_means_without_a_deviation_are_the_actions_and_names_can_be_told() -> None:
    model = build([node("Identity", "x", "y")], {"x": ["rows", 3]}, ["y"])
    policy = OnnxPolicy(model, spaces.Box(-9, 9, (3,), np.float64), names={"y": "means"})
    out = policy.compute_actions(ROWS, None)
    assert out.actions == pytest.approx(ROWS)
    assert (out.actions.dtype, out.extras) == (np.float64, {})


def test_it_can_be_sent_to_another_process() -> None:
    space = spaces.Discrete(4)
    policy = OnnxPolicy(export(MlpPolicy(SEEN, space, seed=5), "logits"), space, seed=1)
    policy.set_weights(policy.get_weights(), 7)
    copy = pickle.loads(pickle.dumps(policy))
    one, other = (each.compute_actions(ROWS, None) for each in (policy, copy))
    assert one.actions.tolist() == other.actions.tolist()
    assert copy.policy_version == 7


@pytest.mark.parametrize(
    ("shape", "output", "space", "message"),
    [
        (
            ["rows", 3],
            "y",
            spaces.Discrete(3),
            r"'actions', or 'logits' .* gives \['y'\]",
        ),
        (["rows", 3], "y", spaces.Box(0, 1), "or 'means' for Box"),
        ([1, 3], "logits", spaces.Discrete(3), r"has the shape \[1, 3\]: export it with a first"),
        (["rows", 3], "y", spaces.Text(3), "without an output 'actions' gives Discrete or Box"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    shape: Any, output: str, space: Any, message: str
) -> None:
    model = build([node("Identity", "x", output)], {"x": shape}, [output])
    with pytest.raises(ConfigError, match=message):
        OnnxPolicy(model, space)


def test_a_model_whose_weights_stand_in_a_file_beside_it_is_told_how_to_have_them_in_it(
    tmp_path: Path,
) -> None:
    # What torch.onnx.export writes, unless it is told otherwise.
    model = onnx.load_from_string(export(MlpPolicy(SEEN, spaces.Discrete(4), seed=0), "logits"))
    path = tmp_path / "policy.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    with pytest.raises(ConfigError, match="external_data=False"):
        OnnxPolicy(path, spaces.Discrete(4))
    onnx.save(onnx.load(path), path, save_as_external_data=False)
    OnnxPolicy(path, spaces.Discrete(4))


def test_what_is_no_model_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="no ONNX model that can be run"):
        OnnxPolicy(b"nothing", spaces.Discrete(2))
    model = build([node("Identity", "x", "logits")], {"x": ["rows", 3]}, ["logits"])
    policy = OnnxPolicy(model, spaces.Discrete(3))
    with pytest.raises(ConfigError):
        policy.set_weights({"model": b""})
    assert policy.get_weights() == {"model": model}
    assert policy.policy_version == 0
    forgets = build(
        [node("Add", "obs state_in", "logits")],
        {"obs": ["rows", 3], "state_in": ["rows", 3]},
        ["logits"],
    )
    with pytest.raises(ConfigError, match="takes 'state_in' and does not give its successor"):
        OnnxPolicy(forgets, spaces.Discrete(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
def test_what_torch_exports_acts_as_its_module(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pi, self.vf = torch.nn.Linear(3, 4), torch.nn.Linear(3, 1)

        def forward(self, obs: Any) -> Any:
            return self.pi(obs), self.vf(obs).squeeze(-1)

    net, file = Net().eval(), tmp_path / "policy.onnx"
    torch.onnx.export(
        net,
        (torch.zeros(2, 3),),
        str(file),
        input_names=["obs"],
        output_names=["logits", "vf_preds"],
        dynamic_axes={"obs": {0: "rows"}},
        external_data=False,
    )
    out = OnnxPolicy(file, spaces.Discrete(4)).compute_actions(ROWS, None, explore=False)
    logits, values = net(torch.as_tensor(ROWS))
    assert out.actions.tolist() == logits.argmax(-1).tolist()
    assert out.extras["vf_preds"] == pytest.approx(values.detach().numpy(), abs=1e-5)
