from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from msgspec import structs

from envbus.actors.env.actor import EnvActor
from envbus.actors.env.source import EntryPoint, EnvSource, GymId, to_plain
from envbus.actors.process.remote import REMOTE_SERVICE
from envbus.actors.protocol import Build, Built, Exec, SlotError, Step, StepResult
from envbus.actors.spaces.spaces import to_plain as to_plain_space
from envbus.actors.testing import InfoEnv
from envbus.bus.errors import ConfigError, EncodeError, ProtocolError, StartError
from envbus.bus.peer.client import Client
from envbus.bus.peer.worker import Worker
from envbus.bus.transport.curve_keys import new_keys
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.codec import Placeholder
from envbus.bus.wire.messages import Hello, Tree
from envbus.runner import ActorLostError, ActorPool, BusVectorEnv, EnvError
from tests.integration.bus_programs import RunningBroker, free_port
from tests.integration.group_children import wait_until

PATIENCE = 30.0
DISCRETE = to_plain_space(gymnasium.spaces.Discrete(2))


class ObjectEnv(InfoEnv):
    """Its infos, metadata and spec hold something that no socket carries."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metadata = {"render_fps": 5, "kind": InfoEnv}
        self.spec = EnvSpec("Object-v0", ObjectEnv)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "env": self}

    def get_self(self) -> object:
        return self


def by_length(index: int) -> InfoEnv:
    """Make an env by its index."""
    return InfoEnv(100 + index)


class InterruptedEnv(InfoEnv):
    """Somebody presses Ctrl-C, in the terminal of its actor, while it steps."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class CalledError(Exception):
    """Leaves a trace where it is made."""

    def __init__(self, path: str) -> None:
        Path(path).touch()
        super().__init__(path)


@contextlib.contextmanager
def with_remote_actor(endpoint: str, *options: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    program = [
        sys.executable,
        "-m",
        "envbus.runner.cli.main",
        "actor",
        endpoint,
        *map(str, options),
    ]
    process = subprocess.Popen(program, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)


def step_for_ever(envs: BusVectorEnv) -> None:
    while True:
        envs.step(np.zeros(envs.num_envs, np.int64))


def make_and_step(endpoint: str) -> None:
    with contextlib.closing(BusVectorEnv(["CartPole-v1"], remote_actors=1, bind=endpoint)) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(1, np.int64))


def make_vec(ids: list[str], endpoint: str, **options: Any) -> BusVectorEnv:
    return BusVectorEnv(ids, num_actors=2, remote_actors=1, bind=endpoint, **options)


@pytest.mark.timeout(120)
def test_the_caller_cannot_tell_a_remote_actor_from_a_local_one() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint) as process:
        envs = make_vec(["CartPole-v1"] * 5, endpoint)
        expected = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 5)
        assert np.array_equal(envs.reset(seed=3)[0], expected.reset(seed=3)[0])
        for _ in range(150):
            actions = expected.action_space.sample()
            for ours, theirs in zip(envs.step(actions), expected.step(actions), strict=True):
                np.testing.assert_equal(ours, theirs)
        assert envs.get_attr("gravity") == (9.8,) * 5
        envs.close()
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_cannot_cross_is_a_placeholder_in_infos_and_refused_elsewhere() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    source = f"{__name__}:ObjectEnv"
    with with_remote_actor(endpoint, "--allow", "tests"):
        envs = make_vec([source, source], endpoint)
        envs.reset(seed=0)
        assert envs.metadata["render_fps"] == 5
        infos = envs.step(envs.action_space.sample())[-1]
        assert type(infos["env"][0]).__name__ == "ObjectEnv"  # the local one came by its pipe
        assert isinstance(infos["env"][1], Placeholder)
        assert infos["env"][1].type_name.endswith("ObjectEnv")
        with pytest.raises(EncodeError, match="cannot cross a socket"):
            envs.call("get_self")
        with pytest.raises(EncodeError, match="cannot cross a socket"):
            envs.exec_func(lambda env: env)
        envs.step(envs.action_space.sample())
        envs.close()


@pytest.mark.timeout(120)
def test_a_function_by_its_import_path_makes_the_envs_of_a_remote_actor_by_their_index() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    settings: Any = {"num_actors": 2, "remote_actors": 1, "bind": endpoint}
    with (
        with_remote_actor(endpoint, "--allow", "tests"),
        contextlib.closing(BusVectorEnv(f"{__name__}:by_length", num_envs=4, **settings)) as envs,
    ):
        assert envs.get_attr("length") == (100, 101, 102, 103)


@pytest.mark.timeout(120)
def test_a_remote_actor_that_dies_is_named() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint) as process:
        envs = make_vec(["CartPole-v1"] * 2, endpoint)
        envs.reset(seed=0)
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(ActorLostError, match="remote") as caught:
            step_for_ever(envs)  # until its lease is over
        assert caught.value.env_ids == [1]
        envs.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_in_a_step_ends_a_remote_actor_and_is_no_error_of_its_env() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    source = f"{__name__}:InterruptedEnv"
    with with_remote_actor(endpoint, "--allow", "tests") as process:
        envs = make_vec(["envbus.actors.testing:InfoEnv", source], endpoint)
        envs.reset(seed=0)
        # Where its step was answered before, its goodbye and its end come before the next one.
        with pytest.raises(ActorLostError, match=r"it said goodbye|this peer is not connected"):
            step_for_ever(envs)
        assert process.wait(PATIENCE) == 130
        envs.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_remote_actor_that_joins_later_takes_over_the_envs_of_one_that_died() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint) as first:
        envs = make_vec(["CartPole-v1"] * 2, endpoint, restart=True)
        envs.reset(seed=0)
        os.killpg(first.pid, signal.SIGKILL)
        fault = None
        while fault is None:
            *_, truncations, infos = envs.step(np.zeros(2, np.int64))
            fault = infos.get("fault")
        assert truncations.tolist()[1] is True
        with with_remote_actor(endpoint):
            envs.step(np.zeros(2, np.int64))
            assert envs.statistics().restarts == 1
            envs.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("local_links", [True, False], ids=["local_links", "zeromq"])
def test_with_keys_remote_actors_join_over_any_interface_and_local_ones_need_none(
    local_links: bool, tmp_path: Path
) -> None:
    server, server_secret = new_keys(tmp_path, "server")
    _, actor_secret = new_keys(tmp_path / "actors", "actor")
    port = free_port()
    keys = ("--keys", actor_secret, "--server-key", server)
    with with_remote_actor(f"tcp://127.0.0.1:{port}", *keys) as process:
        envs = make_vec(
            ["CartPole-v1"] * 2,
            f"tcp://0.0.0.0:{port}",
            keys=server_secret,
            allow=tmp_path / "actors",
            local_links=local_links,
        )
        envs.reset(seed=0)
        envs.step(np.zeros(2, np.int64))
        envs.close()
        assert process.wait(PATIENCE) == 0


def test_keys_need_an_endpoint_to_guard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="guard an endpoint"):
        BusVectorEnv(["CartPole-v1"], keys=tmp_path, allow=tmp_path)


def test_functions_do_not_cross_the_network() -> None:
    with pytest.raises(ConfigError, match="env 1 goes to a remote actor and is a function"):
        make_vec(["CartPole-v1", lambda: gymnasium.make("CartPole-v1")], "tcp://127.0.0.1:*")  # type: ignore[list-item]


def test_remote_actors_need_an_endpoint() -> None:
    with pytest.raises(ConfigError, match="bind="):
        BusVectorEnv(["CartPole-v1"], remote_actors=1)


def test_a_wide_bind_is_refused_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match="insecure=True"):
        make_vec(["CartPole-v1"] * 2, "tcp://0.0.0.0:*")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_actor_calls_nothing_that_its_own_command_line_does_not_allow(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    def errors_of(source: EnvSource) -> str:
        build = Build(sources=Tree([to_plain(source)]), autoreset_mode="NextStep")
        built = client.ask("remote-env", build, timeout=PATIENCE).result()
        return " ".join(error.message for error in built.errors)

    with (
        RunningBroker() as broker,
        with_remote_actor(broker.endpoint, "--allow", "envbus.actors.testing") as actor,
        Client(broker.endpoint) as client,
    ):
        wait_until(lambda: broker.statistics().ready_peers_now == 2, "the actor has joined")
        popen = EntryPoint("subprocess:Popen", {"args": ["touch", str(canary)]})
        assert "--allow subprocess" in errors_of(popen)
        through = EntryPoint("envbus.actors.testing:os.mkdir", {"path": str(canary)})
        assert "--allow os" in errors_of(through)
        assert "--allow this" in errors_of(GymId("this:CartPole-v1"))
        assert errors_of(EntryPoint("envbus.actors.testing:InfoEnv")) == ""
        function = Exec(function=Tree("print"), args=Tree([]), kwargs=Tree({}))
        with pytest.raises(ProtocolError, match="does not answer Exec"):
            client.ask("remote-env", function, timeout=PATIENCE).result()
        actor.kill()
    assert not canary.exists()


@pytest.mark.slow
def test_a_pool_is_told_which_flag_its_remote_actor_lacks() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    source = f"{__name__}:ObjectEnv"
    with with_remote_actor(endpoint) as actor:
        with pytest.raises(PermissionError, match=f"--allow {__name__}"):
            make_vec([source, source], endpoint)
        actor.kill()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"counts": [10**9]}, r"\[1000000000\] envs; 1 to 65536 are allowed"),
        ({"counts": [-1]}, r"\[-1\] envs; 1 to 65536"),
        ({"counts": []}, "0 of 1 envs"),
        ({"counts": [1, 1], "space_of": [0, 0]}, "2 of 1 envs"),
        ({"space_of": [7]}, r"spaces \[7\] of 1"),
        ({"spaces": Tree(["x"])}, "no pairs of spaces"),
        ({"spaces": Tree([[DISCRETE, DISCRETE], [DISCRETE] * 3])}, "no pairs of spaces"),
        ({"metadata": Tree(5)}, "metadata are 5"),
        ({"spaces": Tree([[{"kind": "Box"}, 3]])}, "unknown spaces"),
    ],
)
def test_what_a_remote_actor_cannot_have_built_is_refused(
    said: dict[str, Any], told: str, tmp_path: Path
) -> None:
    built = Built(
        counts=[1],
        spaces=Tree([[DISCRETE, DISCRETE]]),
        space_of=[0],
        metadata=Tree({}),
        render_mode=None,
    )
    endpoint = f"ipc://{tmp_path}/bus"
    worker = Worker(
        ZmqPeer(endpoint, b"stranger"),
        Hello(name="stranger", services=[REMOTE_SERVICE], heartbeat=10.0),
        {Build: lambda _request: structs.replace(built, **said)},
    )

    def work() -> None:
        worker.join(PATIENCE)
        worker.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with pytest.raises(StartError, match=told):
            BusVectorEnv(["CartPole-v1"], remote_actors=1, bind=endpoint)
    finally:
        worker.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rewards": np.ones(1)}, r"rewards of shape \(1,\) for 2 envs"),
        ({"observation_arrays": [np.ones((1, 4), np.float32)]}, r"observations of shape \(1, 4\)"),
        ({"infos": Tree(5)}, "infos that are no list"),
    ],
)
def test_a_remote_actor_whose_rows_do_not_fit_is_let_go_and_others_go_on(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    actor = EnvActor()

    def step(request: Step) -> StepResult:
        return structs.replace(actor.step(request), **change)

    endpoint = f"ipc://{tmp_path}/bus"
    worker = Worker(
        ZmqPeer(endpoint, b"stranger"),
        Hello(name="stranger", services=[REMOTE_SERVICE], heartbeat=10.0, capacity=9),
        {**actor.handlers, Step: step},
    )

    def work() -> None:
        worker.join(PATIENCE)
        worker.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        pool = ActorPool(
            ["CartPole-v1"] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            restart=True,
        )
        pool.reset(seed=0)
        pool.recv(min_envs=4, timeout=PATIENCE)
        pool.send(np.zeros(4, np.int64))
        faults, stepped = [], set[int]()
        while len(faults) < 2 or len(stepped) < 2:
            batch = pool.recv(timeout=PATIENCE)
            faults += batch.faults
            stepped |= set(batch.env_ids.tolist())
        assert stepped == {0, 1}
        assert [fault.env_id for fault in faults] == [2, 3]
        assert all(re.search(told, fault.message) for fault in faults)
        pool.send(np.zeros(2, np.int64), np.arange(2))
        assert pool.recv(min_envs=2, timeout=PATIENCE).env_ids.tolist() == [0, 1]
        pool.close()
    finally:
        worker.stop()
        thread.join(PATIENCE)
        actor.close()


@pytest.mark.parametrize("phase", ["build", "step"])
def test_a_remote_actor_has_no_constructor_called_by_its_name(phase: str, tmp_path: Path) -> None:
    canary = str(tmp_path / "canary")
    error = SlotError(
        slot=0,
        phase=phase,
        type_module=__name__,
        type_name="CalledError",
        message=canary,
        traceback="",
        args=Tree((canary,)),
    )
    actor = EnvActor()

    def build(request: Build) -> Built:
        built = actor.build(request)
        return structs.replace(built, errors=[error] if phase == "build" else [])

    def step(request: Step) -> StepResult:
        return structs.replace(actor.step(request), errors=[error])

    endpoint = f"ipc://{tmp_path}/bus"
    worker = Worker(
        ZmqPeer(endpoint, b"stranger"),
        Hello(name="stranger", services=[REMOTE_SERVICE], heartbeat=10.0, capacity=9),
        {**actor.handlers, Build: build, Step: step},
    )

    def work() -> None:
        worker.join(PATIENCE)
        worker.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with pytest.raises(EnvError, match="CalledError"):
            make_and_step(endpoint)
    finally:
        worker.stop()
        thread.join(PATIENCE)
        actor.close()
    assert not os.path.exists(canary)
