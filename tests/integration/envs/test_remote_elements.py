"""A remote actor that lies within elements is let go, and the learner goes on."""

from __future__ import annotations

import collections
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from msgspec import structs

from envbus.actors.arrays.packing import unpack_records
from envbus.actors.env.actor import EnvActor
from envbus.actors.process.remote import REMOTE_SERVICE
from envbus.actors.protocol import Reset, Step, StepResult
from envbus.bus.peer.worker import Worker
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.messages import Hello, Tree
from envbus.runner import (
    ActorLostError,
    ActorPool,
    BusVectorEnv,
    EnvRunner,
    Fault,
    Hooks,
    RunnerConfig,
)
from envbus.runner.policies.policy import Policy, PolicyOutput
from tests.integration.faulty import RESTART
from tests.runner.pool_envs import receive_until_back

pytestmark = pytest.mark.timeout(60)

PATIENCE = 30.0
SEEN = spaces.Box(-1.0, 1.0, (2,), np.float32)
#: Changes what an actor answers.
Lie = Callable[[StepResult], StepResult]


class TextEnv(gymnasium.Env[Any, Any]):
    """Its observations have no fixed size."""

    observation_space = spaces.Dict(at=SEEN, text=spaces.Text(5))
    action_space = spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self._observe(), 1.0, self.time >= 5, False, {"time": self.time}

    def _observe(self) -> Any:
        return {"at": np.full(2, self.time / 10, np.float32), "text": "a" * (self.time % 4)}


class PairEnv:
    """PettingZoo's form; both agents leave after five steps."""

    possible_agents = ("a", "b")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return SEEN

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time = ["a", "b"], 0
        return self._by_agent(np.zeros(2, np.float32)), self._by_agent({})

    def step(self, actions: Any) -> Any:
        self.time += 1
        over = self.time >= 5
        told = [np.full(2, self.time / 10, np.float32), 1.0, over, False, {}]
        returned = tuple(self._by_agent(one) for one in told)
        self.agents = [] if over else self.agents
        return returned

    def _by_agent(self, value: Any) -> Any:
        return dict.fromkeys(self.agents, value)


class GrowingEnv(PairEnv):
    """Names who lives only, and another agent comes."""

    possible_agents = ()
    agents = ("a", "b")

    def step(self, actions: Any) -> Any:
        if self.time == 1:
            self.agents = [*self.agents, "c"]
        return super().step(actions)

    def _by_agent(self, value: Any) -> Any:
        info = collections.OrderedDict(time=self.time) if isinstance(value, dict) else value
        return dict.fromkeys(self.agents, info)


class ListEnv(TextEnv):
    """What it returns is no tuple, and its space takes it."""

    observation_space = spaces.Tuple([SEEN, spaces.Discrete(9)])

    def _observe(self) -> Any:
        return [np.full(2, self.time / 10, np.float32), self.time]


TEXT, PAIR, GROWING, LIST = (
    f"{__name__}:{cls.__name__}" for cls in (TextEnv, PairEnv, GrowingEnv, ListEnv)
)


class CheckingPolicy(Policy):
    """Takes what was agreed only, as a network does."""

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        for row in observations:
            at = row["at"] if isinstance(row, dict) else row
            assert at.shape == (2,)
            assert at.dtype == np.float32
        return PolicyOutput(np.zeros(len(observations), np.int64))


@contextlib.contextmanager
def elsewhere(endpoint: str, name: str, lie: Lie | None = None) -> Iterator[None]:
    """Let an actor join in a thread; its steps are answered by what `lie` makes of them."""
    actor = EnvActor()

    def step(request: Step) -> StepResult:
        reply = actor.step(request)
        return reply if lie is None else lie(reply)

    hello = Hello(name=name, services=[REMOTE_SERVICE], heartbeat=10.0, capacity=9)
    handlers = {**actor.handlers, Step: step}
    worker = Worker(ZmqPeer(endpoint, name.encode()), hello, handlers)

    def work() -> None:
        worker.join(PATIENCE)
        worker.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(PATIENCE)
        actor.close()
    assert not thread.is_alive()


def singles(change: Callable[[Any], Any]) -> Lie:
    def lie(reply: StepResult) -> StepResult:
        assert reply.observations is not None
        changed = [change(one) for one in unpack_records(reply.observations.value)]
        return structs.replace(reply, observations=Tree(changed))

    return lie


def records(change: Callable[[dict[str, Any]], Any]) -> Lie:
    """Have each record be changed in place."""

    def lie(reply: StepResult) -> StepResult:
        assert reply.observations is not None
        found = unpack_records(reply.observations.value)
        for record in found:
            change(record)
        return structs.replace(reply, observations=Tree(found))

    return lie


#: Records of which a hundred bytes tell.
MILLIONS = {"observations": {"layouts": [["a"]], "which": [0], "values": [1, np.zeros((2**24, 0))]}}
SINGLE_LIES = [
    (singles(lambda _: None), "observation that is None"),
    (singles(lambda one: {"at": one["at"]}), r"with the keys \['at'\]"),
    (singles(lambda one: {**one, "at": np.zeros(3)}), r"observation\['at'\] of shape \(3,\)"),
    (singles(lambda one: {**one, "text": 5}), r"observation\['text'\] that is 5"),
    (lambda reply: structs.replace(reply, observations=None), "no observations"),
    (lambda reply: structs.replace(reply, rewards=np.array(["x"] * 2)), "cannot be read"),
]
RECORD_LIES = [
    (singles(lambda _: None), "record that is None"),
    (records(lambda one: one.pop("rewards")), r"record\['rewards'\] that is None"),
    (records(lambda one: one["rewards"].update(a="x")), r"\['rewards'\]\['a'\] that is 'x'"),
    (records(lambda one: one["terminateds"].pop("__all__")), "without '__all__'"),
    (records(lambda one: one["observations"].update(b=np.zeros(3))), r"\['b'\] of shape \(3,\)"),
    (records(lambda one: one["observations"].update(c=[1] * 7)), r"\['c'\] of no form"),
    (records(lambda one: one["infos"].update(a=None)), r"\['infos'\]\['a'\] that is None"),
    (records(lambda one: one["truncateds"].update(__all__=True)), "that is True, and False for"),
    (lambda reply: structs.replace(reply, observations=Tree(MILLIONS)), "cannot be unpacked"),
]


def assert_let_go(faults: list[Fault], told: str) -> None:
    assert [fault.env_id for fault in faults] == [2, 3]
    for fault in faults:
        assert fault.cause.value == "crash"
        assert re.search(
            f"actor-1 .remote liar.* is let go, as it has answered .*{told}", fault.message, re.S
        )


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("lie", "told"), SINGLE_LIES)
def test_a_pool_batches_what_others_bring(lie: Lie, told: str, tmp_path: Path) -> None:
    endpoint, options = f"ipc://{tmp_path}/bus", {"num_actors": 2, "remote_actors": 1}
    with elsewhere(endpoint, "liar", lie):
        pool = ActorPool([TEXT] * 4, bind=endpoint, **RESTART, **options)
        pool.reset(seed=0)
        pool.recv(min_envs=4, timeout=PATIENCE)
        pool.send(np.zeros(4, np.int64))
        faults, seen = [], {}
        while len(faults) < 2 or len(seen) < 2:
            batch = pool.recv(timeout=PATIENCE)
            faults += batch.faults
            seen |= {int(i): batch.observations["at"][k, 0] for k, i in enumerate(batch.env_ids)}
        assert seen == {0: np.float32(0.1), 1: np.float32(0.1)}
        assert_let_go(faults, told)
        with elsewhere(endpoint, "honest"):
            pool.send(np.zeros(2, np.int64), [0, 1])
            batch = receive_until_back(pool, 3)
            assert batch.observations["at"][list(batch.env_ids).index(3)].tolist() == [0.0, 0.0]
            pool.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("lie", "told"), SINGLE_LIES[:2])
def test_a_vector_env_steps_on(lie: Lie, told: str, tmp_path: Path) -> None:
    endpoint, faults = f"ipc://{tmp_path}/bus", list[Fault]()
    with elsewhere(endpoint, "liar", lie):
        envs = BusVectorEnv(
            [TEXT] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            shared_memory=False,
            **RESTART,
            hooks=Hooks(on_fault=faults.append),
        )
        envs.reset(seed=0)
        observations, rewards, _, truncations, infos = envs.step(np.zeros(4, np.int64))
        assert truncations.tolist() == [False, False, True, True]
        assert rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
        assert observations["at"][:2, 0].tolist() == [np.float32(0.1)] * 2
        assert re.search(told, infos["fault"]["error"][3])
        assert_let_go(faults, told)
        with elsewhere(endpoint, "honest"):
            for _ in range(3):
                observations, *_, truncations, infos = envs.step(np.zeros(4, np.int64))
            assert observations["at"][:, 0].tolist() == np.float32([0.4, 0.4, 0.2, 0.2]).tolist()
            assert not truncations.any()
            assert envs.statistics().restarts == 1
            envs.close()


def test_without_restart_it_is_lost_by_name(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    with elsewhere(endpoint, "liar", SINGLE_LIES[0][0]):
        pool = ActorPool([TEXT] * 2, num_actors=1, remote_actors=1, bind=endpoint)
        pool.reset(seed=0)
        pool.recv(min_envs=2, timeout=PATIENCE)
        pool.send(np.zeros(2, np.int64))
        with pytest.raises(ActorLostError, match="for env 0: observation that is None"):
            pool.recv(timeout=PATIENCE)
        pool.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("source", "lie", "told"),
    [*((PAIR, *one) for one in RECORD_LIES), *((TEXT, *one) for one in SINGLE_LIES[:2])],
)
def test_a_runner_samples_on_what_others_bring(
    source: str, lie: Lie, told: str, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    with elsewhere(endpoint, "liar", lie):
        pool = ActorPool(
            [source] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            **RESTART,
            autoreset_mode="Disabled",
        )
        config = RunnerConfig(rollout_fragment_length=10, infos=True)
        runner = EnvRunner(pool, CheckingPolicy(), config)
        with elsewhere(endpoint, "honest"):
            faults = list[Fault]()
            for _ in range(3):
                sample = runner.sample()
                faults += sample.faults
                batch = sample.policy_batches["default_policy"]
                # Each env's episodes are of five steps, whoever brings them.
                for row in range(len(batch)):
                    seen = batch["obs"][row]
                    at = seen["at"] if isinstance(seen, dict) else seen
                    assert at[0] == np.float32((batch["t"][row]) / 10)
            assert_let_go(faults, told)
            assert sample.env_steps == 40
            pool.close()


def test_an_agent_that_is_done_and_comes_back_is_the_fault_of_its_actor(tmp_path: Path) -> None:
    steps = iter(range(1000))

    def change(record: dict[str, Any]) -> None:
        # First a flag without an observation, then observations without a flag.
        if next(steps) < 2:
            del record["observations"]["b"]
            record["terminateds"]["b"] = True

    endpoint = f"ipc://{tmp_path}/bus"
    with elsewhere(endpoint, "liar", records(change)):
        pool = ActorPool(
            [PAIR] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            **RESTART,
            autoreset_mode="Disabled",
        )
        runner = EnvRunner(pool, CheckingPolicy(), RunnerConfig(rollout_fragment_length=10))
        with elsewhere(endpoint, "honest"):
            sample = runner.sample()
            assert_let_go(list(sample.faults), r"record\['observations'\]\['b'\] of an agent that")
            assert sample.env_steps == 40
            pool.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("value", ["s", {"y": 1}, np.zeros(3)])
def test_infos_that_do_not_fit_those_of_others_are_left_out(value: Any, tmp_path: Path) -> None:
    def lie(reply: StepResult) -> StepResult:
        return structs.replace(reply, infos=Tree([{"time": 7}, {"time": value}]))

    endpoint = f"ipc://{tmp_path}/bus"
    with elsewhere(endpoint, "liar", lie):
        envs = BusVectorEnv(
            [TEXT] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            shared_memory=False,
            **RESTART,
        )
        envs.reset(seed=0)
        *_, truncations, infos = envs.step(np.zeros(4, np.int64))
        assert infos["time"].tolist() == [1, 1, 7, 0]
        assert infos["_time"].tolist() == [True, True, True, False]
        assert not truncations.any()
        *_, truncations, infos = envs.step(np.zeros(4, np.int64))
        assert truncations.tolist() == [False, False, True, True]
        assert "the info of env 3 cannot be merged" in infos["fault"]["error"][3]
        assert infos["time"].tolist() == [2, 2, 0, 0]
        envs.close(terminate=True)


def test_infos_of_a_batch_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    def lie(reply: StepResult) -> StepResult:
        return structs.replace(reply, infos=Tree([{"time": "x"}, {"time": "y"}]))

    endpoint = f"ipc://{tmp_path}/bus"
    with elsewhere(endpoint, "liar", lie):
        pool = ActorPool([TEXT] * 4, num_actors=2, remote_actors=1, bind=endpoint, **RESTART)
        pool.reset(seed=0)
        pool.recv(min_envs=4, timeout=PATIENCE)
        pool.send(np.zeros(4, np.int64))
        batch = pool.recv(min_envs=4, timeout=PATIENCE)
        told = dict(zip(batch.env_ids.tolist(), batch.infos["time"].tolist(), strict=True))
        assert told == {0: 1, 1: 1, 2: 0, 3: 0}
        assert pool.recv(timeout=PATIENCE).faults[0].env_id == 2
        pool.close()


def test_records_of_an_honest_actor_are_sampled_as_those_of_this_host(tmp_path: Path) -> None:
    config = RunnerConfig(rollout_fragment_length=12, infos=True)
    samples = []
    for remote in (0, 1):
        endpoint = f"ipc://{tmp_path}/bus{remote}"
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {}
            if remote:
                stack.enter_context(elsewhere(endpoint, "honest"))
                options = {"remote_actors": 1, "bind": endpoint}
            pool = ActorPool([PAIR] * 2, num_actors=2, autoreset_mode="Disabled", **options)
            runner = EnvRunner(pool, CheckingPolicy(), config)
            samples.append(runner.sample().policy_batches["default_policy"])
            pool.close()
    for name in ("obs", "t", "terminateds", "agent_id", "rewards"):
        assert np.array_equal(samples[0][name], samples[1][name])


def test_a_reset_is_checked_likewise(tmp_path: Path) -> None:
    actor = EnvActor()

    def reset(request: Reset) -> StepResult:
        return singles(lambda _: {"text": "x"})(actor.reset(request))

    endpoint = f"ipc://{tmp_path}/bus"
    hello = Hello(name="liar", services=[REMOTE_SERVICE], heartbeat=10.0, capacity=9)
    worker = Worker(ZmqPeer(endpoint, b"liar"), hello, {**actor.handlers, Reset: reset})
    thread = threading.Thread(target=lambda: (worker.join(PATIENCE), worker.run()))
    thread.start()
    try:
        envs = BusVectorEnv(
            [TEXT], remote_actors=1, num_actors=1, bind=endpoint, shared_memory=False
        )
        with pytest.raises(ActorLostError, match=r"for env 0: observation with the keys"):
            envs.reset(seed=0)
        envs.close(terminate=True)
    finally:
        worker.stop()
        thread.join(PATIENCE)
        actor.close()


def test_an_agent_that_comes_later_is_one_like_those_that_were_named(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    rows = []
    for settings in ({}, {"remote_actors": 1, "bind": endpoint}):
        with (
            elsewhere(endpoint, "honest") if settings else contextlib.nullcontext(),
            ActorPool([GROWING], num_actors=1, autoreset_mode="Disabled", **settings) as pool,
            EnvRunner(pool, lambda seen: np.zeros(len(seen), np.int64)) as runner,
        ):
            rows.append(runner.sample(num_env_steps=7).single())
    assert "c" in rows[0]["agent_id"].tolist()
    for name in ("agent_id", "obs", "next_obs", "rewards", "terminateds"):
        assert rows[0][name].tolist() == rows[1][name].tolist()


def test_a_last_observation_may_be_whatever_its_row_may_be(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    with elsewhere(endpoint, "honest"):
        envs = BusVectorEnv(
            [LIST] * 2,
            num_actors=1,
            remote_actors=1,
            bind=endpoint,
            autoreset_mode="SameStep",
        )
        envs.reset(seed=0)
        for _ in range(5):
            *_, terminations, _, infos = envs.step(np.zeros(2, np.int64))
        assert terminations.all()
        assert [last[1] for last in infos["final_obs"]] == [5, 5]
        envs.close()
