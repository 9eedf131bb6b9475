"""`EnvRunnerGroup` where nothing fails; faults are in tests/integration."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError, EncodeError, EnvbusError, RemoteError
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.group.protocol import RollCall
from envbus.runner.group.rounds import Rounds, RunnerProcess
from envbus.runner.policies.connectors import ClipRewards, Normalize, Pipeline
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.actors.agent_envs import RoundRobinEnv
from tests.runner.pool_envs import PATIENCE, GatedEnv
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

Make = Callable[..., EnvRunnerGroup]


class Steps(Policy):
    """Counts what it is asked; its weights are one number, which is its action."""

    def __init__(self) -> None:
        self.number = np.zeros(1, np.int64)

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        return PolicyOutput(np.repeat(self.number, len(observations)))

    def get_weights(self) -> Any:
        return {"number": self.number.copy()}

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        self.number = np.array(weights["number"])
        super().set_weights(weights, version)


@pytest.fixture
def make() -> Iterator[Make]:
    groups: list[EnvRunnerGroup] = []

    def _make(
        envs: Any = None, policies: Any = None, runners: int = 2, **config: Any
    ) -> EnvRunnerGroup:
        envs = envs or [functools.partial(CountingEnv, 5)] * 4
        group = EnvRunnerGroup(runners, envs, policies or Steps(), RunnerConfig(**config))
        groups.append(group)
        return group

    yield _make
    for group in groups:
        group.stop(terminate=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvRunnerGroup]:
    """Two runners of two envs each, for tests that leave them as they are."""
    with EnvRunnerGroup(2, [functools.partial(CountingEnv, 5)] * 4, Steps()) as group:
        yield group


def _lean(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(np.int64)


def all_columns(batch: Any) -> dict[str, Any]:
    return {name: batch[name] for name in batch.columns if name not in ("eps_id", "unroll_id")}


def test_a_group_samples_the_rows_that_one_runner_over_all_its_envs_samples(make: Make) -> None:
    envs = ["CartPole-v1"] * 5
    config: Any = {"seed": 11, "rollout_fragment_length": 40}
    with ActorPool(envs, num_actors=1) as pool:
        group = make(envs, _lean, **config)
        one = EnvRunner(pool, _lean, RunnerConfig(**config))
        for call in ({}, {"num_env_steps": 35}, {"num_episodes": 10}, {}):
            theirs, mine = one.sample(**call), group.sample(**call, timeout=PATIENCE)
            assert mine.runners == (0, 1)
            columns = all_columns(theirs.single())
            assert columns.keys() == all_columns(mine.single()).keys()
            for name, column in columns.items():
                assert np.array_equal(mine.single()[name], column), name
            assert mine.env_steps == theirs.env_steps
            assert sorted(e.episode_return for e in mine.episodes) == sorted(
                e.episode_return for e in theirs.episodes
            )
        told, expected = group.get_metrics(), one.get_metrics()
        for name in expected:
            if not name.endswith("_ms"):
                assert told[name] == pytest.approx(expected[name]), name
        assert told["mean_env_wait_ms"] > 0.0
        assert group.get_metrics()["num_episodes"] == 0
        assert group.get_spaces() == one.get_spaces()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["get_weights", "get_state"])
def test_ctrl_c_takes_nothing_out_of_what_has_come_while_weights_are_waited_for(
    shared: EnvRunnerGroup, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def ready(rounds: Rounds) -> list[RunnerProcess]:
        return really_ready(rounds) if taken else []

    def take_events(rounds: Rounds, timeout: float) -> None:
        signal.raise_signal(signal.SIGINT)
        taken.append(timeout)
        really_take(rounds, timeout)

    taken: list[float] = []
    really_ready, really_take = Rounds.ready, Rounds.take_events
    monkeypatch.setattr(Rounds, "ready", ready)
    monkeypatch.setattr(Rounds, "take_events", take_events)
    with pytest.raises(KeyboardInterrupt):
        getattr(shared, verb)()
    assert taken


def test_numbers_are_shared_out_and_met_exactly(shared: EnvRunnerGroup) -> None:
    for number in (1, 7, 100, 0):
        assert shared.sample(number, timeout=PATIENCE).env_steps == number
    sample = shared.sample(num_episodes=7, timeout=PATIENCE)
    assert [episode.length for episode in sample.episodes] == [5] * 7
    assert sorted(np.bincount(sample.single()["env_id"]).tolist()) == [5, 10, 10, 10]
    with pytest.raises(ValueError, match="not both"):
        shared.sample(1, 1)


def test_episode_ids_are_unique_over_runners(shared: EnvRunnerGroup) -> None:
    batch = shared.sample(80, timeout=PATIENCE).single()
    assert len({(e, i) for e, i in zip(batch["eps_id"], batch["env_id"], strict=True)}) == 16
    assert len(set(batch["eps_id"].tolist())) == 16
    assert len(set(batch["unroll_id"].tolist())) == 2


def test_several_agents_and_policies(make: Make) -> None:
    def pool(index: int) -> ActorPool:
        return ActorPool([RoundRobinEnv] * (index + 1), num_actors=1, autoreset_mode="Disabled")

    group = make(
        pool,
        {"even": Steps(), "odd": Steps()},
        policy_mapping_fn=lambda agent_id, _: "odd" if agent_id % 2 else "even",
        infos=True,
    )
    assert group.num_envs == 3
    sample = group.sample(75, timeout=PATIENCE)
    assert sample.env_steps == 75
    assert set(sample.policy_batches) == {"even", "odd"}
    assert set(sample["odd"]["env_id"].tolist()) == {0, 1, 2}
    assert set(sample["odd"]["agent_id"].tolist()) == {1, 3}
    assert isinstance(sample["odd"]["infos"][0], dict)
    group.set_weights({"odd": {"number": np.array([1])}})
    sample = group.sample(75, timeout=PATIENCE)
    assert set(sample["odd"]["policy_version"].tolist()) <= {0, 1}
    assert set(sample["even"]["policy_version"].tolist()) == {0}


def test_sample_async_collects_whoever_is_ready(make: Make, tmp_path: Path) -> None:
    gates = [tmp_path / "0", tmp_path / "1"]
    group = make([functools.partial(GatedEnv, gate) for gate in gates])
    with pytest.raises(NoAsyncCallError):
        group.collect()
    gates[0].touch()
    assert group.sample_async(20) == (0, 1)
    assert group.sample_async(20) == ()
    first = group.collect(timeout=PATIENCE)
    assert (first.runners, first.env_steps) == ((0,), 20)
    assert group.sample_async(10) == (0,)
    status = group.probe(timeout=PATIENCE)
    assert status[1].state == "sampling"
    assert status[1].sampling_for > 0.0
    wait_until(lambda: group.probe(timeout=PATIENCE)[0].state == "ready", "its ten steps")
    late = group.collect(2, timeout=0.1)
    assert (late.runners, late.late_runners, late.env_steps) == ((0,), (1,), 10)
    gates[1].touch()
    # What is under way is the runner's part of the next sample, whatever it comes by.
    rest = group.sample(50, timeout=PATIENCE)
    assert rest.env_steps == 50
    assert np.bincount(rest.single()["env_id"]).tolist() == [30, 20]


def test_an_answer_that_is_there_counts_however_late_its_taker_looks(make: Make) -> None:
    group = make(runners=1)
    rounds = group._rounds
    ticket = rounds.ask_all(rounds.ready(), RollCall(), PATIENCE)
    assert select.select([group._worker_group], [], [], PATIENCE)[0]
    assert group._wait(lambda: not ticket.open, time.monotonic() - 1.0)


@pytest.mark.slow
def test_at_a_timeout_what_is_there_is_returned_and_the_late_envs_are_named(
    make: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    envs = [CountingEnv, functools.partial(GatedEnv, gate)]
    group = make(envs)
    # So few steps that env 0 has made them by then, however busy the machine is.
    sample = group.sample(4, timeout=2.0)
    while sample.late_runners:  # what they have by then has a fifth of a second for its way
        sample = group.sample(4, timeout=2.0)
    assert (sample.runners, sample.late, sample.env_steps) == ((0, 1), (1,), 2)
    gate.touch()
    assert group.sample(40, timeout=PATIENCE).env_steps == 40


def _stand_still(gate: Path, observations: Any) -> Any:
    while not gate.exists():
        pass
    return np.zeros(len(observations), np.int64)


@pytest.mark.slow
def test_a_runner_that_does_not_answer_is_late_and_its_rows_come_later(
    make: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def policies(pool: ActorPool, index: int) -> Any:
        return functools.partial(_stand_still, gate if index else Path("/"))

    envs = [functools.partial(CountingEnv, 5)] * 2
    with EnvRunnerGroup(2, envs, make_policies=policies) as group:
        # So few steps that runner 0 has made them by then, however busy the machine is.
        first = group.sample(4, timeout=1.5)
        assert (first.runners, first.late_runners, first.env_steps) == ((0,), (1,), 2)
        again = group.sample(6, timeout=1.5)
        assert (again.runners, again.late_runners, again.env_steps) == ((0,), (1,), 4)
        assert group.probe(timeout=PATIENCE)[1].state == "sampling"
        gate.touch()
        rest = group.sample(timeout=PATIENCE)  # a fragment of runner 0, what runner 1 owes
        assert (rest.runners, rest.late_runners) == ((0, 1), ())
        assert group.sample(30, timeout=PATIENCE).env_steps == 30


@pytest.mark.slow
def test_set_weights_waits_for_nobody_and_holds_from_the_next_fragment_on(
    make: Make, tmp_path: Path
) -> None:
    gates = [tmp_path / "0", tmp_path / "1"]
    group = make([functools.partial(GatedEnv, gate) for gate in gates])
    gates[0].touch()
    group.sample_async(6)
    group.collect(timeout=PATIENCE)
    for number in range(1, 51):  # do not pile up before the one that is at work
        group.set_weights({"default_policy": {"number": np.array([number])}})
    assert group.sample_async(6) == (0,)
    batch = group.collect(timeout=PATIENCE).single()
    assert batch["policy_version"].tolist() == [50] * 6
    assert batch["actions"].tolist() == [50] * 6
    gates[1].touch()
    batch = group.collect(timeout=PATIENCE).single()
    assert set(batch["env_id"].tolist()) == {1}
    assert batch["policy_version"].tolist() == [0] * 6  # within a fragment they do not change
    batch = group.sample(12, timeout=PATIENCE).single()
    assert batch["policy_version"].tolist() == [50] * 12
    assert group.policy_versions == {"default_policy": 50}
    assert group.get_weights()["default_policy"]["number"].tolist() == [50]
    group.set_weights({"default_policy": {"number": np.array([3])}}, version=7000)
    assert group.foreach(EnvRunner.get_weights)[1]["default_policy"]["number"].tolist() == [3]
    with pytest.raises(ConfigError, match="no policy 'other'"):
        group.set_weights({"other": {}})


def test_weights_are_copied_when_they_are_set_and_when_they_are_got(
    shared: EnvRunnerGroup,
) -> None:
    group = shared
    first = group.get_weights()["default_policy"]["number"]
    first[:] = 1
    group.set_weights({"default_policy": {"number": first}})
    first += 1
    assert group.get_weights()["default_policy"]["number"].tolist() == [1]
    assert group.sample(4, timeout=PATIENCE).single()["actions"].tolist() == [1] * 4


def test_a_version_of_weights_that_is_no_number_is_refused(shared: EnvRunnerGroup) -> None:
    before = shared.policy_versions
    with pytest.raises(ConfigError, match="version must be a whole number or None, not '3'"):
        shared.set_weights(shared.get_weights(), "3")  # type: ignore[arg-type]
    assert shared.policy_versions == before


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda group: group.foreach(id, runners=3), "runners is a sequence of ids"),
        (lambda group: group.foreach(3), "function must be callable, not 3"),
        (lambda group: group.get_weights(5), "policy_ids are a list .* not 5"),
        (lambda group: group.get_weights("default_policy"), "policy_ids are a list"),
        (lambda group: group.get_weights([["a"]]), "there is no policy"),
        (lambda group: group.set_weights({"w": 1}), r"weights are by policy id, as {'default_poli"),
        (lambda group: group.foreach(id, runners=[False]), "runners has integers"),
        (lambda group: group.foreach(id, timeout="1"), "timeout must be a number or None"),
        (lambda group: group.probe("1"), "timeout must be a number or None"),
        (lambda group: group.restart("0"), "runner has integers"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_its_name(
    shared: EnvRunnerGroup, call: Callable[[Any], object], told: str
) -> None:
    with pytest.raises((ConfigError, TypeError), match=told):
        call(shared)


def test_arguments_mean_what_they_mean_for_one_runner_and_are_looked_at_first(
    shared: EnvRunnerGroup,
) -> None:
    wrong: Any = ("1", float("nan"))
    for timeout in wrong:
        for call in (shared.sample, shared.sample_async):
            with pytest.raises(ConfigError, match="timeout must be a number"):
                call(4, timeout=timeout)
    with pytest.raises(ConfigError, match="timeout must be over 0"):
        shared.foreach(id, timeout=0)
    odd: Any = [{"force_reset": 1}, {"explore": 0}, {"explore": np.False_}]
    for keywords in (*odd, {"timeout": float("inf")}, {"timeout": 10**400}):
        assert shared.sample(4, **keywords).env_steps == 4
        shared.sample_async(2, **keywords)
        assert shared.collect(2, timeout=float("inf")).env_steps == 4
    assert shared.foreach(lambda _: 1, timeout=float("inf")) == {0: 1, 1: 1}


def test_foreach_calls_a_function_beside_each_runner(shared: EnvRunnerGroup) -> None:
    group = shared
    offset = 10
    found = group.foreach(lambda runner, i, *, k: runner.envs.num_envs + i + k + offset, 1, k=2)
    assert found == {0: 15, 1: 15}
    assert group.foreach(lambda runner: runner.config.worker_index, runners=[1]) == {1: 1}
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        group.foreach(lambda runner: 1 // (runner.config.worker_index - 1))
    with pytest.raises(ValueError, match="unknown runner 2"):
        group.foreach(len, runners=[2])
    with pytest.raises(EncodeError, match="pickled"):
        group.foreach(len, (number for number in range(3)))
    assert group.sample(8, timeout=PATIENCE).env_steps == 8


def test_policies_that_a_runner_has_no_more_get_no_weights_and_are_not_told(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    envs = functools.partial(_general_pool, 1)
    group = make(envs, {"a": Steps(), "b": Steps(), "c": Steps()}, policy_mapping_fn=_to_a)
    new = {"number": np.array([7])}
    group.set_weights({"b": new})
    assert group.policy_versions == {"a": 0, "b": 1, "c": 0}
    group.foreach(lambda runner: runner.remove_policy("b"))
    group.foreach(lambda runner: runner.remove_policy("c"), runners=[0])
    for _ in range(2):
        group.set_weights({"a": new, "b": new})
        sample = group.sample(4, timeout=PATIENCE)
        assert sample["a"]["actions"].tolist() == [7] * 4
    assert caplog.text.count("has no policy 'b'") == 1
    # Runner 1 has one that runner 0 has not; nobody has the other.
    assert group.get_weights().keys() == group.get_state()["weights"].keys() == {"a", "c"}
    assert group.policy_versions == {"a": 2, "c": 0}
    group.foreach(lambda runner: runner.remove_policy("c"), runners=[1])
    assert group.get_weights().keys() == {"a"}
    with pytest.raises(ConfigError, match=r"no policy 'c'; there are \['a'\]"):
        group.get_weights(["c"])


def test_weights_of_a_policy_that_was_removed_are_not_those_of_one_added_later(make: Make) -> None:
    group = make(functools.partial(_general_pool, 1), {"a": Steps()}, policy_mapping_fn=_to_a)
    new = {"number": np.array([7])}
    group.foreach(_add_b)
    group.set_weights({"b": new})
    group.foreach(lambda runner: runner.remove_policy("b"), runners=[0])
    group.set_weights({"a": new})
    assert group.get_weights()["b"]["number"].tolist() == [7]  # runner 1 has it
    group.foreach(lambda runner: runner.remove_policy("b"), runners=[1])
    group.foreach(_add_b)
    group.set_weights({"a": new})
    numbers = group.foreach(lambda runner: int(runner.policies["b"].get_weights()["number"][0]))
    assert numbers == {0: 0, 1: 0}
    assert group.get_weights()["b"]["number"].tolist() == [0]


def _add_b(runner: EnvRunner) -> None:
    runner.add_policy("b", Steps())


def _general_pool(num_envs: int, index: int) -> ActorPool:
    envs = [functools.partial(CountingEnv, 5)] * num_envs
    return ActorPool(envs, num_actors=0, autoreset_mode="Disabled")


def _to_a(*_: Any) -> str:
    return "a"


@pytest.mark.slow
def test_a_function_that_takes_too_long_is_left_out(shared: EnvRunnerGroup, tmp_path: Path) -> None:
    group = shared
    begun, gate = tmp_path / "begun", tmp_path / "gate"

    def stand_still(runner: EnvRunner) -> int:
        if runner.config.worker_index:
            begun.touch()
            _stand_still(gate, [0])
        return 0

    assert group.foreach(stand_still, timeout=1.5) == {0: 0}
    wait_until(begun.exists, "its begin")
    assert [one.state for one in group.probe(timeout=1.0)] == ["ready", "silent"]
    gate.touch()
    assert [one.state for one in group.probe(timeout=PATIENCE)] == ["ready", "ready"]


@pytest.mark.slow
def test_filters_of_connectors_are_merged_over_runners(make: Make) -> None:
    space = CountingEnv.observation_space
    group = make(observation_connector=Normalize(space), rollout_fragment_length=10)
    for _ in range(3):
        group.sample(timeout=PATIENCE)
    states = group.foreach(lambda runner: runner.config.connectors()["observation"].get_state())
    merged = group.get_state()["connectors"]["observation"]
    counts = [states[index]["count"] for index in (0, 1)]
    total = merged["count"]
    assert total == 2 * (total // 2)
    # Each had the others' observations up to the sample before when it took the last one.
    assert all(total * 2 / 3 - 4 <= count < total for count in counts)


@pytest.mark.slow
def test_a_connector_of_two_policies_learns_once_from_each_row_and_not_while_it_is_switched_off(
    make: Make,
) -> None:
    def pool(index: int) -> ActorPool:
        envs = [functools.partial(CountingEnv, 1000)] * 2
        return ActorPool(envs, num_actors=1, autoreset_mode="Disabled")

    normalize = Normalize(CountingEnv.observation_space)
    group = make(
        pool,
        {"a": Steps(), "b": Steps()},
        policy_mapping_fn=_by_turns,
        observation_connector={"a": normalize, "b": Pipeline([normalize])},
    )

    def count() -> int:
        (state,) = group.get_state()["connectors"].values()
        found: int = state["count"]
        return found

    # An observation more per env than there are rows.
    for number in (1, 2, 3):
        group.sample(20, timeout=PATIENCE)
        assert count() == number * 20 + 4
    group.sample(20, explore=False, timeout=PATIENCE)
    assert count() == 64
    normalize.update = False
    group.sample(20, timeout=PATIENCE)
    assert count() == 64
    normalize.update = True
    group.sample(20, timeout=PATIENCE)
    assert count() == 84


def _noting(rows: SampleBatch, policy: Any) -> SampleBatch:
    pids = np.full(len(rows), os.getpid())
    return rows.with_columns(pid=pids, version=np.full(len(rows), policy.policy_version))


@pytest.mark.slow
def test_rows_are_postprocessed_and_connectors_are_timed_in_each_runner(make: Make) -> None:
    group = make(postprocess=_noting, reward_connector=ClipRewards(12.0), rollout_fragment_length=5)
    batch = group.sample(timeout=PATIENCE).single()
    pids = set(batch["pid"].tolist())
    assert (len(pids), os.getpid() in pids) == (2, False)
    assert set(batch["version"].tolist()) == {0}
    assert set(batch["rewards"].tolist()) == {11.0, 12.0}
    metrics = group.get_metrics()
    assert metrics["episode_return_mean"] == 11 + 12 + 13 + 14 + 15
    assert metrics["mean_connector_ms"]["reward"] > 0.0
    assert metrics["connector_metrics"] == {}


class Keeping(Callbacks):
    def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
        episode.hist_data["policies"] = [len(self.runner.policies)]
        episode.media["pid"] = os.getpid()


@pytest.mark.slow
def test_what_callbacks_keep_of_episodes_comes_from_all_runners(make: Make) -> None:
    def pool(index: int) -> ActorPool:
        envs = [functools.partial(CountingEnv, 5)] * 2
        return ActorPool(envs, num_actors=1, autoreset_mode="Disabled")

    group = make(pool, callbacks=Keeping(), rollout_fragment_length=5)
    sample = group.sample(timeout=PATIENCE)
    assert [result.hist_data for result in sample.episodes] == [{"policies": [1.0]}] * 4
    metrics = group.get_metrics()
    assert metrics["hist_data"] == {"policies": [1.0] * 4}
    assert len(set(metrics["episode_media"]["pid"])) == 2


@pytest.mark.slow
def test_a_state_is_taken_over_by_another_group(make: Make) -> None:
    space = CountingEnv.observation_space
    group = make(observation_connector=Normalize(space))
    group.set_weights({"default_policy": {"number": np.array([9])}}, version=5)
    group.sample(20, timeout=PATIENCE)
    state = group.get_state()
    other = make(observation_connector=Normalize(space), envs=[CountingEnv], runners=1)
    other.set_state(state)
    batch = other.sample(3, timeout=PATIENCE).single()
    assert batch["actions"].tolist() == [9] * 3
    assert batch["policy_version"].tolist() == [5] * 3
    count = other.get_state()["connectors"]["observation"]["count"]
    assert count > state["connectors"]["observation"]["count"] > 0
    assert other.get_metrics()["num_env_steps_sampled_lifetime"] == 23
    with pytest.raises(ConfigError, match="no policy"):
        other.set_state({**state, "weights": {"other": {}}})
    with pytest.raises(ConfigError, match=r"nothing of the connectors \['observation'\]"):
        other.set_state({**state, "connectors": {}})
    before = other.get_state()
    odd = {"count": 3, "means": [np.zeros(99)], "m2s": [np.zeros(99)]}
    with pytest.raises(ConfigError, match=r"rows of shapes \[\(99,\)\], its space"):
        other.set_state(
            {**state, "connectors": {"observation": odd}, "metrics": {"num_episodes": 9}}
        )
    assert other.get_state()["metrics"] == before["metrics"]
    assert repr(other.get_state()["connectors"]) == repr(before["connectors"])
    with pytest.raises(ConfigError, match=r"no policy_versions of \['default_policy'\]"):
        other.set_state({**state, "policy_versions": {}})
    with pytest.raises(ConfigError, match=r"policy_versions\['default_policy'\] must be a whole"):
        other.set_state({**state, "policy_versions": {"default_policy": "six"}})
    with pytest.raises(ConfigError, match="weights of 'default_policy' must be Mapping"):
        other.set_state({**state, "weights": {"default_policy": 5}})
    uncopied = {"default_policy": {"number": threading.Lock()}}
    with pytest.raises(TypeError, match="pickle"):
        other.set_state({**state, "weights": uncopied, "metrics": {"num_episodes": 9}})
    assert other.get_state()["metrics"] == before["metrics"]
    assert repr(other.get_state()["connectors"]) == repr(before["connectors"])
    assert other.policy_versions == {"default_policy": 5}


@pytest.mark.slow
def test_a_group_that_takes_a_state_over_uses_no_id_again(make: Make) -> None:
    ids: list[int] = []
    unrolls: list[int] = []
    state: Any = None
    for _ in range(2):
        group = make(envs=[functools.partial(CountingEnv, 3)] * 2)
        if state is not None:
            group.set_state(state)
        for number in (30, 12):
            batch = group.sample(number, timeout=PATIENCE).single()
            ids += set(batch["eps_id"].tolist())
            unrolls += set(batch["unroll_id"].tolist())
        state = group.get_state()
        group.stop()
    assert len(set(ids)) == len(ids) == 2 * 14
    assert len(set(unrolls)) == len(unrolls) == 2 * 2 * 2


def test_an_exception_in_one_runner_is_raised_and_the_others_rows_come_next(
    shared: EnvRunnerGroup,
) -> None:
    group = shared
    group.foreach(lambda runner: setattr(runner.policies["default_policy"], "number", "no array"))
    group.foreach(EnvRunner.set_weights, {"default_policy": {"number": [1]}}, runners=[0])
    with pytest.raises(RemoteError, match="Remote traceback"):
        group.sample(8, timeout=PATIENCE)
    group.foreach(EnvRunner.set_weights, {"default_policy": {"number": [2]}}, runners=[1])
    assert group.sample(8, timeout=PATIENCE).env_steps == 8


class _LocksAt60(gym.Env[Any, Any]):
    """Its observations are the number of the step; what it says of one of these cannot be sent."""

    observation_space = gym.spaces.Box(0.0, np.inf, (2000,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        infos = {"lock": threading.Lock()} if self.steps == 60 else {}
        return self._seen(), 0.0, False, False, infos

    def _seen(self) -> Any:
        return np.full(2000, self.steps, np.float32)


def test_after_a_sample_that_cannot_be_sent_others_have_their_own_rows(make: Make) -> None:
    def pool(index: int) -> ActorPool:
        return ActorPool([_LocksAt60], num_actors=0, autoreset_mode="Disabled")

    group = make(pool, runners=1, infos=True)
    first = 0
    for number in (10, 100, 10, 20, 100):
        if number == 100 and first == 10:
            with pytest.raises(EnvbusError, match="cannot be pickled"):
                group.sample(number, timeout=PATIENCE)
        else:
            batch = group.sample(number, timeout=PATIENCE).single()
            assert batch["obs"][:, 0].tolist() == list(range(first, first + number))
            assert np.array_equal(batch["obs"][:, 0], batch["t"])
        first += number


class Picky(Steps):
    """Refuses negative weights."""

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        if weights["number"][0] < 0:
            raise ValueError("negative weights")
        super().set_weights(weights, version)


@pytest.mark.slow
def test_weights_that_all_runners_refuse_are_told_once_and_each_sample_has_its_own_rows(
    make: Make,
) -> None:
    def pool(index: int) -> ActorPool:
        return ActorPool([CountingEnv] * 2, num_actors=1, autoreset_mode="Disabled")

    group = make(pool, {"a": Picky(), "b": Picky()}, policy_mapping_fn=_by_turns)
    pairs = {"a": {"number": np.array([-1])}, "b": {"number": np.array([1])}}
    group.set_weights(pairs)
    told: list[str] = []
    numbers = []
    for number in (10, 20, 30, 40, 50):
        try:
            numbers.append((number, group.sample(number, timeout=PATIENCE).env_steps))
        except RemoteError as exc:
            told.append(str(exc))
    assert len(told) == 1
    assert "negative weights" in told[0]
    # What was asked in the call that raised is there with the next one; then all is as asked.
    assert numbers[1:] == [(asked, asked) for asked, _ in numbers[1:]]
    batches = group.sample(40, timeout=PATIENCE).policy_batches
    assert set(batches["a"]["actions"].tolist()) == {0}
    assert set(batches["b"]["actions"].tolist()) == {1}
    assert group.policy_versions == {"a": 0, "b": 1}
    group.set_weights({"a": {"number": np.array([2])}})
    batches = group.sample(40, timeout=PATIENCE).policy_batches
    assert set(batches["a"]["actions"].tolist()) == {2}
    group.set_weights({"a": {"number": np.array([-2])}}, version=9)
    with pytest.raises(RemoteError, match="negative weights"):
        group.sample(40, timeout=PATIENCE)
    # A later life, and whoever takes over the state, have what was taken over last.
    state = group.get_state()
    assert state["policy_versions"] == {"a": 1, "b": 1}
    assert state["weights"]["a"]["number"].tolist() == [2]


class _Stays:
    """Can be copied, and not sent."""

    def __deepcopy__(self, memo: Any) -> _Stays:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


@pytest.mark.slow
def test_weights_that_cannot_be_sent_are_refused_at_once_and_all_goes_on(make: Make) -> None:
    group = make()
    state = group.get_state()
    group.sample_async()
    group.set_weights({"default_policy": {"number": np.array([1])}})  # those after it have to wait
    stays = {"default_policy": {"number": _Stays()}}
    with pytest.raises(EncodeError, match="it stays here"):
        group.set_weights(stays)
    with pytest.raises(EncodeError, match="it stays here"):
        group.set_state({**state, "weights": stays})
    group.collect(2, timeout=PATIENCE)
    batch = group.sample(40, timeout=PATIENCE).single()
    assert set(batch["actions"].tolist()) == set(batch["policy_version"].tolist()) == {1}
    assert group.policy_versions == {"default_policy": 1}


@pytest.mark.slow
def test_weights_of_one_policy_leave_alone_what_a_function_gave_another(make: Make) -> None:
    def pool(index: int) -> ActorPool:
        return ActorPool([CountingEnv] * 2, num_actors=1, autoreset_mode="Disabled")

    def give(runner: EnvRunner) -> None:
        runner.set_weights({"b": {"number": np.array([7])}}, 50)

    group = make(pool, {"a": Picky(), "b": Picky()}, policy_mapping_fn=_by_turns)
    group.set_weights({name: {"number": np.array([1])} for name in "ab"})
    group.foreach(give)
    group.set_weights({"a": {"number": np.array([2])}})
    batches = group.sample(8, timeout=PATIENCE).policy_batches
    assert set(batches["a"]["actions"].tolist()) == {2}
    assert set(batches["b"]["actions"].tolist()) == {7}
    assert set(batches["b"]["policy_version"].tolist()) == {50}


def _by_turns(agent_id: Any, episode: Any) -> str:
    return "ab"[episode.env_id % 2]


@pytest.mark.slow
def test_stop_twice_and_after_it_each_call_says_so(make: Make) -> None:
    with make([CountingEnv], runners=1) as group:
        assert len(group.runner_pids()) == 1
        group.assert_healthy()
    group.stop()
    for call in (group.sample, group.sample_async, group.collect, group.probe):
        with pytest.raises(ClosedEnvironmentError):
            call()
    with pytest.raises(ClosedEnvironmentError):
        group.set_weights({})


@pytest.mark.slow
def test_what_keeps_a_runner_from_its_start_is_raised_and_nothing_stays() -> None:
    def pool(index: int) -> ActorPool:
        raise OSError(f"no simulator for runner {index}")

    with pytest.raises(RemoteError, match="no simulator for runner"):
        EnvRunnerGroup(2, pool, Steps())
    with pytest.raises(ConfigError, match="policies or make_policies"):
        EnvRunnerGroup(2, pool)
    with pytest.raises(EncodeError, match="pickled"):
        EnvRunnerGroup(1, [CountingEnv], {"default_policy": (number for number in range(3))})
    with pytest.raises(RemoteError, match="at least one policy"):
        EnvRunnerGroup(1, [CountingEnv], {})


class _Pictures(gym.Env[Any, Any]):
    """Shows noise of its own, 16 kB; episodes of seven steps."""

    observation_space = gym.spaces.Box(0, 255, (128, 128), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._look(), float(action), self.steps == 7, False, {}

    def _look(self) -> Any:
        return self.np_random.integers(0, 255, (128, 128), np.uint8)


@pytest.mark.slow
def test_large_samples_lie_side_by_side_in_memory_that_is_used_again(make: Make) -> None:
    config: Any = {"seed": 3, "rollout_fragment_length": 12}
    with ActorPool([_Pictures] * 3, num_actors=1) as pool:
        group = make([_Pictures] * 3, _lean_on_pixels, **config)
        one = EnvRunner(pool, _lean_on_pixels, RunnerConfig(**config))
        addresses = []
        before = (np.zeros(1), np.zeros(1))
        for number in (None, None, None, None, 30, *[None] * 6):
            theirs, mine = one.sample(number), group.sample(number, timeout=PATIENCE)
            for name, column in all_columns(theirs.single()).items():
                assert np.array_equal(mine.single()[name], column), name
            obs = mine.single()["obs"]
            addresses.append(None if obs.base is None else obs.__array_interface__["data"][0])
            assert np.array_equal(*before)  # the caller has it still
            before = (obs, obs.copy())
    is_shared = [address is not None for address in addresses]
    assert is_shared == [False] * 2 + [True] * 2 + [False] * 3 + [True] * 4
    assert len(set(addresses[-4:])) == 2


@pytest.mark.slow
def test_a_group_that_was_stopped_holds_no_memory_but_that_of_samples(make: Make) -> None:
    def arenas() -> set[int]:
        """Of those that are open: tests before may have left some, which close at any time."""
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "envbus-arena" in os.readlink(f"/proc/self/fd/{name}"):
                    found.add(os.fstat(int(name)).st_ino)
        return found

    before = arenas()
    group = make([_Pictures] * 3, _lean_on_pixels, seed=3, rollout_fragment_length=12)
    samples = [group.sample(timeout=PATIENCE) for _ in range(4)]
    obs = samples[-1].single()["obs"]
    kept = obs.copy()
    assert arenas() - before
    group.stop()
    assert np.array_equal(obs, kept)
    del samples, obs
    assert not arenas() - before


@pytest.mark.slow
def test_rows_that_a_time_out_leaves_behind_are_whole_in_the_next_sample(make: Make) -> None:
    group = make([_Pictures] * 3, _lean_on_pixels, seed=3, rollout_fragment_length=12)
    for timeout in (PATIENCE, PATIENCE, PATIENCE, 0.0, 0.002, 0.0, PATIENCE, PATIENCE, PATIENCE):
        batch = group.sample(timeout=timeout)
        for rows in (part.split_by_trajectory() for part in batch.policy_batches.values()):
            for row in rows:
                assert np.array_equal(row["obs"][1:], row["next_obs"][:-1])
                assert (row["obs"] != row["next_obs"]).any(axis=(1, 2)).all()


def _lean_on_pixels(observations: Any) -> Any:
    return (observations[:, 0, 0] > 100).astype(np.int64)
