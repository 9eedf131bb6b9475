"""What becomes of factories and registered ids that cannot be sent to an actor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


@pytest.fixture
def unsendable() -> Iterator[str]:
    """An id that other programs register, whose entry point holds what cannot be pickled."""
    owner = threading.Lock()
    gymnasium.register("EnvbusHeld-v0", entry_point=lambda: gymnasium.make(str(owner)))
    yield "EnvbusHeld-v0"
    del gymnasium.registry["EnvbusHeld-v0"]


def test_an_id_that_cannot_be_sent_hinders_no_envs_of_others(
    unsendable: str, caplog: pytest.LogCaptureFixture
) -> None:
    gymnasium.register("EnvbusSent-v0", entry_point=lambda: gymnasium.make("CartPole-v1"))
    try:
        with BusVectorEnv(["EnvbusSent-v0"] * 2, num_actors=2) as envs:
            assert envs.reset(seed=0)[0].shape == (2, 4)
    finally:
        del gymnasium.registry["EnvbusSent-v0"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"actors do not know {unsendable}"
    ]


def test_envs_of_an_id_that_cannot_be_sent_are_refused_with_the_reason(unsendable: str) -> None:
    with pytest.raises(EncodeError, match=r"cannot pickle .*lock"):
        BusVectorEnv([unsendable])
