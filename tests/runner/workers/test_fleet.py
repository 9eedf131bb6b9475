"""What a factory that cannot be sent to an actor is told."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import pytest

from envbus.bus.errors import EncodeError
from envbus.runner import BusVectorEnv


def test_a_factory_that_cannot_be_pickled_is_told_of_what_it_refers_to() -> None:
    simulator, name = threading.Lock(), "CartPole-v1"

    def make() -> gymnasium.Env[Any, Any]:
        with simulator:
            return gymnasium.make(name)

    message = r"env 1 cannot be sent .*; it refers to 'simulator': let the factory make that"
    with pytest.raises(EncodeError, match=message):
        BusVectorEnv(["CartPole-v1", make], num_actors=1)
