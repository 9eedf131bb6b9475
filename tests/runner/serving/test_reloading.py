from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.policy import FunctionPolicy
from envbus.runner.serving.loading import ServedPolicies, load_policies
from envbus.runner.serving.reloading import LoadedModel, ModelLoader, try_out
from tests.waiting import wait_until

SPACES = (spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3))


def constant(action: Any) -> Any:
    return lambda _seen, _actions: FunctionPolicy(lambda rows: np.array([action] * len(rows)))


def taken(loader: ModelLoader) -> LoadedModel:
    found: list[LoadedModel] = []

    def look() -> bool:
        done = loader.take()
        if done is not None:
            found.append(done)
        return bool(found)

    wait_until(look, "a model is loaded")
    return found[0]


def test_a_model_that_answers_is_taken() -> None:
    loader = ModelLoader()
    loader.ask("m", constant(2), SPACES)
    done = taken(loader)
    assert (done.name, done.error) == ("m", None)
    assert done.policies is not None
    assert loader.take() is None


def test_one_that_cannot_be_made_is_told_and_the_next_is_loaded() -> None:
    def broken(*_spaces: Any) -> Any:
        raise ArithmeticError("as told")

    loader = ModelLoader()
    loader.ask("m", broken, SPACES)
    assert isinstance(taken(loader).error, ArithmeticError)
    loader.ask("m", constant(1), SPACES)
    assert taken(loader).error is None


def test_one_that_would_end_the_program_ends_no_later_load() -> None:
    def leaves(*_spaces: Any) -> Any:
        raise SystemExit("as told")

    loader = ModelLoader()
    loader.ask("m", leaves, SPACES)
    assert isinstance(taken(loader).error, SystemExit)
    loader.ask("m", constant(1), SPACES)
    assert taken(loader).error is None


def test_one_that_is_asked_for_while_it_is_loaded_is_loaded_once_more() -> None:
    go_on, loads = threading.Semaphore(0), []

    def load(make: Any, of: Any) -> ServedPolicies:
        assert go_on.acquire(timeout=60.0)
        loads.append(make)
        return load_policies(make, *of)

    loader = ModelLoader(load)
    first, second, third = constant(0), constant(1), constant(2)
    for make in (first, second, third):
        loader.ask("m", make, SPACES)
    go_on.release()
    taken(loader)
    go_on.release()
    taken(loader)
    assert loads == [first, third]
    assert loader.take() is None


def test_a_policy_that_cannot_answer_or_whose_action_no_client_could_take_is_refused() -> None:
    def fails(_rows: Any) -> Any:
        raise ArithmeticError("as told")

    with pytest.raises(ConfigError, match="cannot be sent"):
        try_out(load_policies(constant(5), *SPACES))
    with pytest.raises(ConfigError, match="cannot answer an observation: ArithmeticError"):
        try_out(load_policies(lambda _seen, _actions: FunctionPolicy(fails), *SPACES))
