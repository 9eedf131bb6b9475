from __future__ import annotations

import numpy as np
import pytest

from envbus.actors.external.errors import RefusedError
from envbus.actors.external.protocol import GetModel, Model
from envbus.bus.errors import ConfigError
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Tree
from envbus.runner.bridge import models as module
from envbus.runner.bridge.models import Models


def test_a_model_is_sent_to_who_has_another_version() -> None:
    models = Models()
    models.publish("p", weights=None, onnx=b"net", version=3)
    for have in (-1, 2, 4):  # 4: of a runner before this one
        assert models.answer(GetModel(policy_id="p", have_version=have)).onnx == b"net"
    unchanged = models.answer(GetModel(policy_id="p", have_version=3))
    assert (unchanged.version, unchanged.weights, unchanged.onnx) == (3, None, None)
    models.publish("p", weights=None, onnx=b"next", version=4)
    assert models.answer(GetModel(policy_id="p", have_version=3)).version == 4


def test_another_model_of_the_same_version_is_sent_and_the_same_one_is_not() -> None:
    models = Models()

    def ask(digest: str) -> Model:
        return models.answer(GetModel(policy_id="p", have_version=3, have_digest=digest))

    models.publish("p", weights={"w": np.zeros(2)}, onnx=None, version=3)
    first = models.answer(GetModel(policy_id="p"))
    models.publish("p", weights={"w": np.zeros(2)}, onnx=None, version=3)
    assert ask(first.digest).weights is None
    models.publish("p", weights={"w": np.ones(2)}, onnx=None, version=4)
    models.publish("p", weights={"w": np.full(2, 2.0)}, onnx=None, version=3)  # an older state
    again = ask(first.digest)
    np.testing.assert_array_equal(again.weights["w"], [2.0, 2.0])
    assert again.digest != first.digest
    assert ask("").weights is None  # of an older client


def test_weights_cross_as_arrays_and_a_learner_that_goes_on_does_not_change_them() -> None:
    models, array = Models(), np.arange(3, dtype=np.float32)
    models.publish("p", weights={"w": array}, onnx=None, version=0)
    array[:] = 9.0
    sent = decode(Model, encode(models.answer(GetModel(policy_id="p"))))
    np.testing.assert_array_equal(sent.weights["w"], [0.0, 1.0, 2.0])
    assert sent.weights["w"].dtype == np.float32
    models.publish("p", weights={"w": (1, [array])}, onnx=None, version=1)
    array[:] = 8.0
    weights = models.answer(GetModel(policy_id="p")).weights
    assert isinstance(weights, Tree)
    assert weights.value["w"][1][0].tolist() == [9.0, 9.0, 9.0]


def test_a_policy_without_a_model_is_refused_and_those_that_there_are_named() -> None:
    models = Models()
    models.publish("p", weights={}, onnx=None, version=0)
    with pytest.raises(RefusedError, match=r"no model of policy 'q'; there are: p"):
        models.answer(GetModel(policy_id="q"))
    models.retain(set())
    assert not models


def test_the_limit_of_old_versions() -> None:
    models = Models(max_version_lag=1)
    assert not models.is_stale("p", 0)
    models.publish("p", weights={}, onnx=None, version=5)
    assert [models.is_stale("p", version) for version in (3, 4, 5, 6)] == [True] + [False] * 3
    assert not Models().is_stale("p", -100)


def test_what_cannot_be_handed_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    with pytest.raises(ConfigError, match="either weights or onnx"):
        models.publish("p", weights=None, onnx=None, version=0)
    with pytest.raises(ConfigError, match="not negative"):
        models.publish("p", weights={}, onnx=None, version=-1)
    monkeypatch.setattr(module, "MAX_MODEL_BYTES", 10)
    with pytest.raises(ConfigError, match="has 24 bytes, and 10 can be handed out"):
        models.publish("p", weights={"w": np.zeros(3)}, onnx=None, version=0)
