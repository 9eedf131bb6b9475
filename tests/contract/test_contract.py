"""The vector-env contract over all ways to run it, and over Gymnasium's own as a check of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv

from envbus.runner import BusVectorEnv
from envbus.runner.testing import VectorEnvContract

Factory = Callable[[], gymnasium.Env[Any, Any]]


class _BusContract(VectorEnvContract):
    shared_memory: ClassVar[bool] = True
    #: None: one per env.
    num_actors: ClassVar[int | None] = None
    local_links: ClassVar[bool] = True

    def make(self, env_fns: Sequence[Factory], **settings: Any) -> Any:
        most = len(env_fns)
        return BusVectorEnv(
            env_fns,
            shared_memory=self.shared_memory,
            num_actors=most if self.num_actors is None else min(self.num_actors, most),
            local_links=self.local_links,
            **settings,
        )


@pytest.mark.slow
class TestOneActor(_BusContract):
    num_actors = 1


@pytest.mark.slow
class TestOneActorWithoutSharedMemory(_BusContract):
    shared_memory = False
    num_actors = 1


class TestTwoActors(_BusContract):
    num_actors = 2


@pytest.mark.slow
class TestTwoActorsWithoutSharedMemory(_BusContract):
    shared_memory = False
    num_actors = 2


class TestTwoActorsOverZeroMq(_BusContract):
    num_actors = 2
    local_links = False


@pytest.mark.slow
class TestTwoActorsOverZeroMqWithoutSharedMemory(_BusContract):
    shared_memory = False
    num_actors = 2
    local_links = False


@pytest.mark.slow
class TestAnActorPerEnv(_BusContract):
    pass


@pytest.mark.slow
class TestAnActorPerEnvWithoutSharedMemory(_BusContract):
    shared_memory = False


class TestInThisProcess(_BusContract):
    asynchronous = False
    num_actors = 0


class TestInThisProcessWithoutSharedMemory(_BusContract):
    asynchronous = False
    shared_memory = False
    num_actors = 0


class TestSyncVectorEnv(VectorEnvContract):
    """A fake validates: what the suite asks for is what Gymnasium does where it does it right."""

    asynchronous = False
    strict = False

    def make(self, env_fns: Sequence[Factory], **settings: Any) -> Any:
        return SyncVectorEnv(env_fns, **settings)
