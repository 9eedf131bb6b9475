"""A server's policy in processes of its own."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.serving.loading import load_policies
from envbus.runner.serving.reloading import try_out
from envbus.runner.serving.workers import in_workers
from tests.waiting import wait_until

SEEN = spaces.Box(-1000.0, 1000.0, (2,), np.float32)
DONE = spaces.Box(-1e9, 1e9, (2,), np.float64)
POLICIES = "tests.integration.served_policies"


def test_many_rows_are_shared_out_and_come_back_in_their_order() -> None:
    policy = in_workers(f"{POLICIES}:whose", 2)(SEEN, DONE)
    rows = np.arange(64, dtype=np.float32)[:, np.newaxis] * np.ones(2, np.float32)
    out = policy.compute_actions(rows, None)
    assert out.actions[:, 0].tolist() == list(range(64))
    pids = set(out.actions[:, 1].astype(int))
    assert len(pids) == 2
    assert psutil.Process().pid not in pids
    few = policy.compute_actions(rows[:3], None).actions
    assert few[:, 0].tolist() == [0, 1, 2]
    del policy
    gc.collect()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "they end with their policy")


def test_a_policy_that_cannot_be_made_there_is_told() -> None:
    with pytest.raises(ConfigError, match="there is no model"):
        in_workers("missing.onnx", 2)
    make = in_workers(f"{POLICIES}:picky", 1)
    with pytest.raises(ConfigError, match="Discrete actions only"):
        make(SEEN, DONE)


def test_a_server_can_use_it_as_any_other() -> None:
    policies = load_policies(
        in_workers("envbus.runner.policies:MlpPolicy", 2), SEEN, spaces.Discrete(3)
    )
    try_out(policies)
    (policy,) = policies.by_id.values()
    own = MlpPolicy(SEEN, spaces.Discrete(3))
    weights = own.get_weights()
    policy.set_weights(weights, 5)
    rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    out = policy.compute_actions(rows, None, explore=False)
    assert out.actions.tolist() == own.compute_actions(rows, None, explore=False).actions.tolist()
    assert out.extras["action_logp"].shape == (40,)
    assert policy.policy_version == 5


def test_a_worker_that_is_replaced_has_the_model_of_the_load_whatever_the_file_holds_now(
    tmp_path: Path,
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, file = onnx.helper, tmp_path / "model.onnx"

    def write(what: str) -> None:
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [helper.make_node(what, ["obs"], ["actions"])],
            "policy",
            [value("obs", 1, ["rows", 2])],
            [value("actions", 1, None)],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        file.write_bytes(made.SerializeToString())

    def workers() -> set[psutil.Process]:
        return {one for one in psutil.Process().children(recursive=True) if one.ppid() != me}

    me, rows = psutil.Process().pid, np.ones((3, 2), np.float32)
    write("Neg")
    before = workers()
    policy = in_workers(str(file), 1)(SEEN, DONE)
    for now in ("Identity", "nonsense"):
        write(now) if now != "nonsense" else file.write_bytes(b"nonsense")
        (worker,) = workers() - before
        worker.kill()
        worker.wait()
        assert policy.compute_actions(rows, None).actions.tolist() == (-rows).tolist()
