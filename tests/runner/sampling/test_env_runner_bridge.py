from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import (
    ActionTimeoutError,
    SimulatorError,
    SpaceMismatchError,
)
from envbus.actors.external.external_env import ExternalEnv
from envbus.bus.errors import EnvbusError
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.errors import FaultCause
from envbus.runner.policies.policy import PolicyOutput
from envbus.runner.sampling.callbacks import CallbackError, Callbacks
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.runner.sampling_scenes import Log, zeros
from tests.runner.simulators import (
    ACTIONS,
    COUNTS,
    PATIENCE,
    address,
    for_ever,
    make,
    obs,
    play_episode,
    simulators,
)


@pytest.mark.parametrize(("mode", "rows"), [("truncate", 40), ("complete", 50)])
def test_fragments_are_exact_and_whole_episodes_are_packed(mode: str, rows: int) -> None:
    runner = make(rollout_fragment_length=40, batch_mode=f"{mode}_episodes")
    with simulators(address(runner), for_ever(play_episode)), runner:
        batches = [runner.sample(timeout=PATIENCE).single() for _ in range(3)]
        assert [len(batch) for batch in batches] == [rows] * 3
        t = np.concatenate([batch["t"] for batch in batches])
        assert t.tolist() == [i % 25 for i in range(3 * rows)]
        assert [int(batch["unroll_id"][0]) for batch in batches] == [0, 1, 2]


def test_on_and_off_policy_steps_mix_and_the_batch_has_what_was_done() -> None:
    def policy(observations: Any) -> PolicyOutput:
        rows = len(observations)
        extras = {"action_logp": np.full(rows, -1.0), "vf_preds": observations[:, 0]}
        return PolicyOutput(np.full(rows, 7), None, extras)

    runner = make(policy)
    play = functools.partial(play_episode, length=6, log=lambda t: 42 if t in (0, 1, 5) else None)
    with simulators(address(runner), for_ever(play)), runner:
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
    off = [True, True, False, False, False, True] * 2
    assert batch["off_policy"].tolist() == off
    assert batch["actions"].tolist() == [42 if own else 7 for own in off]
    assert batch["policy_version"].tolist() == [-1 if own else 0 for own in off]
    assert np.isnan(batch["action_logp"]).tolist() == off
    assert batch["vf_preds"].tolist() == [*range(6)] * 2
    assert batch["rewards"].tolist() == [*range(6)] * 2


def test_episodes_that_are_not_to_be_trained_on_are_answered_and_counted_apart() -> None:
    def play(client: Any) -> None:
        assert play_episode(client, 5, training_enabled=False, episode_id=None) == [0] * 5
        play_episode(client, 4)

    runner = make(rollout_fragment_length=8)
    with simulators(address(runner), play, play), runner:
        sample = runner.sample(timeout=PATIENCE)
        assert sample.single()["t"].tolist() == [0, 1, 2, 3] * 2
        assert sorted(e.length for e in sample.episodes if not e.training_enabled) == [5, 5]
        metrics = runner.get_metrics()
    assert (metrics["num_untrained_episodes"], metrics["num_untrained_env_steps"]) == (2, 10)
    assert (metrics["num_env_steps_sampled"], metrics["episode_len_max"]) == (8, 4)


def test_an_episode_that_is_ended_at_once_disturbs_nobody() -> None:
    def play(client: Any) -> None:
        client.end_episode(client.start_episode(), obs(0))
        play_episode(client, 4)

    runner = make()
    with simulators(address(runner), for_ever(play)), runner:
        sample = runner.sample(num_episodes=2, timeout=PATIENCE)
        assert sample.single()["t"].tolist() == [0, 1, 2, 3] * 2
        assert [episode.length for episode in sample.episodes] == [4, 4]


def test_a_row_that_waits_for_the_next_sample_is_truncated_before_a_gap() -> None:
    both, given_up = threading.Barrier(2), threading.Barrier(3)

    def play(client: Any) -> None:
        episode = client.start_episode()
        both.wait(PATIENCE)
        for t in range(2):
            client.get_action(episode, obs(t))
        with pytest.raises(ActionTimeoutError):
            client.get_action(episode, obs(2), timeout=1.0)
        given_up.wait(PATIENCE)
        for t in range(3, 100):
            client.get_action(episode, obs(t))

    runner = make(min_envs=2, envs_per_bridge=2)
    with simulators(address(runner), play, play), runner:
        first = runner.sample(num_env_steps=3, timeout=PATIENCE).single()
        assert sorted(first["obs"][:, 0].tolist()) == [0, 0, 1]
        given_up.wait(PATIENCE)
        batch = runner.sample(num_env_steps=12, timeout=PATIENCE).single()
    assert len(batch.split_by_episode()) == 2
    for run in batch.split_by_trajectory():
        assert run["obs"][1:].tolist() == run["next_obs"][:-1].tolist()
    assert batch["obs"][batch["truncateds"]].tolist() == [[1.0]]


def test_queued_steps_and_the_end_behind_them_all_arrive() -> None:
    play = functools.partial(play_episode, length=30, log=lambda t: t, truncated=True)
    runner = make()
    with simulators(address(runner), play), runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        assert batch["actions"].tolist() == [*range(30)]
        assert batch["truncateds"].tolist() == [False] * 29 + [True]
        assert not batch["terminateds"].any()


def test_many_clients_with_many_episodes_each_give_whole_trajectories() -> None:
    def play(client: Any) -> None:
        episodes = {client.start_episode(): 0 for _ in range(5)}
        while episodes:
            for episode in list(episodes):
                t = episodes[episode]
                if t == 4:
                    client.end_episode(episode, obs(t))
                    del episodes[episode]
                else:
                    client.get_action(episode, obs(t))
                    client.log_returns(episode, 1.0)
                    episodes[episode] += 1

    runner = make()
    with simulators(address(runner), *[for_ever(play)] * 6), runner:
        samples = [runner.sample(num_env_steps=n, timeout=PATIENCE) for n in (33, 50, 17)]
        assert [len(sample.single()) for sample in samples] == [33, 50, 17]
        assert max(int(s.single()["env_id"].max()) for s in samples) < 30
    for sample in samples:
        for rows in sample.single().split_by_trajectory():
            assert (np.diff(rows["t"]) == 1).all()
            assert rows["obs"][:, 0].tolist() == rows["t"].tolist()
            assert np.array_equal(rows["obs"][1:], rows["next_obs"][:-1])


def test_a_time_out_gives_what_is_there_and_the_rest_comes_later() -> None:
    runner = make()
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        play_episode(client, 5)
        ended.set()

    with simulators(address(runner), play), runner:
        rows = []
        while not ended.is_set():
            rows += runner.sample(num_env_steps=100, timeout=0.05).policy_batches.values()
        rows += runner.sample(num_env_steps=100, timeout=0.05).policy_batches.values()
        assert np.concatenate([batch["t"] for batch in rows]).tolist() == [0, 1, 2, 3, 4]
        assert len(runner.sample(num_env_steps=100, timeout=0.0)) == 0


def test_whole_episodes_are_not_had_of_one_that_has_left_in_part() -> None:
    runner = make()
    with simulators(address(runner), for_ever(play_episode)), runner:
        first = runner.sample(num_env_steps=10, timeout=PATIENCE).single()
        whole = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        assert whole["t"].tolist() == [*range(25)]
        assert not set(first["eps_id"]) & set(whole["eps_id"])
        again = runner.sample(num_env_steps=10, force_reset=True, timeout=PATIENCE).single()
        assert again["t"].tolist() == [*range(10)]
        assert len({*first["eps_id"], *whole["eps_id"], *again["eps_id"]}) == 3


# --- faults -----------------------------------------------------------------------------------


def vanish(client: ExternalEnvClient) -> None:
    episode = client.start_episode("lost one")
    for t in range(5):
        client.get_action(episode, obs(t))
        client.log_returns(episode, 1.0)


@pytest.mark.parametrize("keep", [False, True])
def test_the_episode_of_a_client_that_vanishes_is_faulty_and_others_go_on(keep: bool) -> None:
    """Kept: the rows up to the fault; the last action has no outcome."""
    log = Ends()
    settings: Any = {"faulty_episodes": "truncate" if keep else "drop", "callbacks": log}
    runner = make(lease=0.3, **settings)

    def play(client: ExternalEnvClient) -> None:
        assert log.fault_told.wait(PATIENCE)
        play_episode(client, 8)

    with simulators(address(runner), vanish, for_ever(play)), runner:
        sample = runner.sample(num_env_steps=20, timeout=PATIENCE)
        whole = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        metrics = runner.get_metrics()
    (fault,) = sample.faults
    assert (fault.cause, log.calls) == (FaultCause.LOST, [("lost one", FaultCause.LOST), "fault"])
    (result,) = [episode for episode in sample.episodes if episode.faulty]
    assert (result.episode_id, result.fragments) == ("lost one", int(keep))
    assert (metrics["num_faulty_episodes"], metrics["num_dropped_rows"]) == (1, 0 if keep else 4)
    batch = sample.single()
    own = batch[batch["eps_id"] == result.eps_id]
    assert own["t"].tolist() == ([*range(4)] if keep else [])
    assert own["truncateds"].tolist() == ([False] * 3 + [True] if keep else [])
    assert (len(batch), whole["t"].tolist()) == (20, [*range(8)])


class Ends(Callbacks):
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fault_told = threading.Event()

    def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
        if fault is not None:
            self.calls.append((episode.episode_id, fault.cause))

    def on_fault(self, *, fault: Any) -> None:
        self.calls.append("fault")
        self.fault_told.set()


class BrokenPolicy:
    """Fails on observations of 3, as long as it is told to."""

    policy_version = 0

    def __init__(self) -> None:
        self.broken = True

    def __call__(self, observations: Any) -> Any:
        if self.broken and (observations == 3).any():
            raise ZeroDivisionError("no action for 3")
        return zeros(observations)


def test_a_policys_error_reaches_sample_and_the_waiting_client() -> None:
    policy = BrokenPolicy()
    runner = make(policy)
    told: list[BaseException] = []

    def play(client: ExternalEnvClient) -> None:
        try:
            play_episode(client, 6, episode_id="first")
        except ZeroDivisionError as exc:
            told.append(exc)
        client.end_episode("first", obs(4))
        play_episode(client, 6)

    with simulators(address(runner), play), runner:
        with pytest.raises(ZeroDivisionError, match="no action for 3"):
            runner.sample(num_env_steps=20, timeout=PATIENCE)
        policy.broken = False
        sample = runner.sample(num_episodes=1, timeout=PATIENCE)
    assert [str(exc) for exc in told] == ["no action for 3"]
    assert sample.single()["t"].tolist() == [*range(6)]
    # The one in which it happened gives no rows.
    assert [episode.length for episode in sample.episodes] == [6]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["created", "start", "step", "end"])
def test_a_callback_that_raises_is_told_to_who_waits_and_later_episodes_are_whole(
    name: str,
) -> None:
    log = Log(failing=name)
    runner = make(callbacks=log)

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(4):
            with contextlib.suppress(CallbackError):
                client.get_action(episode, obs(t))
        client.end_episode(episode, obs(4))

    with simulators(address(runner), for_ever(play)), runner:
        with pytest.raises(CallbackError, match=f"on_episode_{name} raised RuntimeError: no"):
            runner.sample(num_env_steps=20, timeout=PATIENCE)
        log.failing = ""
        batch = runner.sample(num_episodes=3, timeout=PATIENCE).single()
    assert batch["t"].tolist() == [*range(4)] * 3


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("no")


class BrokenOff(Callbacks):
    """Something happens when the first episode is opened."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens
        self._is_first = True

    def on_sub_environment_created(self, *, env_id: int, incarnation: int) -> None:
        if self._is_first:
            self._is_first = False
            self._happens()


@pytest.mark.parametrize(("happens", "error"), [(fail, CallbackError), (ctrl_c, KeyboardInterrupt)])
def test_a_sample_that_is_broken_off_while_an_episode_is_opened_is_not_the_last(
    happens: Callable[[], None], error: type[BaseException]
) -> None:
    runner = make(callbacks=BrokenOff(happens), min_envs=2)

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(4):
            with contextlib.suppress(EnvbusError):
                client.get_action(episode, obs(t))
        client.end_episode(episode, obs(4))

    with simulators(address(runner), *[for_ever(play)] * 2), runner:
        with pytest.raises(error):
            runner.sample(num_episodes=2, timeout=PATIENCE)
        batch = runner.sample(num_episodes=4, timeout=PATIENCE).single()
    assert batch["t"].tolist() == [*range(4)] * 4


class ThenCtrlC(ExternalEnvBridge):
    """Ctrl-C comes right after a first poll that has told of an episode, which began or goes on."""

    begins = False
    is_over = False

    def poll(self, timeout: float | None = None, **numbers: Any) -> BridgeResult:
        result = super().poll(timeout, **numbers)
        if result.observations and bool(result.started) is self.begins and not self.is_over:
            self.is_over = True
            ctrl_c()
        return result


@pytest.mark.parametrize("begins", [True, False])
def test_who_waits_is_told_of_ctrl_c_that_comes_as_soon_as_the_bridge_has_told_of_it(
    begins: bool,
) -> None:
    bridge = ThenCtrlC(COUNTS, ACTIONS)
    bridge.begins = begins
    runner = EnvRunner(bridge, zeros)
    told: list[str] = []

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(3):
            try:
                client.get_action(episode, obs(t))
            except EnvbusError as exc:
                told.append(str(exc))
        client.end_episode(episode, obs(3))

    with simulators(address(runner), for_ever(play)), runner:
        with pytest.raises(KeyboardInterrupt):
            runner.sample(num_env_steps=20, timeout=PATIENCE)
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
    assert len(told) == 1
    assert "KeyboardInterrupt" in told[0]
    assert batch["t"].tolist() == [*range(3)] * 2


class Unreadable(dict[Any, Any]):
    """There is no memory to look through it, the first time."""

    is_read = False

    def items(self) -> Any:
        if not self.is_read:
            self.is_read = True
            raise MemoryError
        return super().items()


class ShortOfMemory(ExternalEnvBridge):
    """Memory runs out once: when its owner takes in an observation or an end, or sends actions."""

    place = ""

    def poll(self, timeout: float | None = None, **numbers: Any) -> BridgeResult:
        result = super().poll(timeout, **numbers)
        due = {"observation": result.observations, "end": result.ended}
        if due.get(self.place):
            self.place = ""
            result.choices = Unreadable()
        return result

    def send_actions(self, actions: Any, **settings: Any) -> None:
        if self.place == "send":
            self.place = ""
            raise MemoryError
        super().send_actions(actions, **settings)


@pytest.mark.parametrize("place", ["observation", "end", "send"])
def test_who_waits_is_told_where_memory_runs_out_on_the_way_to_the_policy_or_back(
    place: str,
) -> None:
    told: list[int] = []

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(3):
            try:
                client.get_action(episode, obs(t))
            except MemoryError:
                told.append(t)
        try:
            client.end_episode(episode, obs(3))
        except MemoryError:
            told.append(3)

    bridge = ShortOfMemory(COUNTS, ACTIONS, confirm_ends=True)
    bridge.place = place
    runner = EnvRunner(bridge, zeros)
    with simulators(address(runner), for_ever(play)), runner:
        with pytest.raises(MemoryError):
            runner.sample(num_episodes=2, timeout=PATIENCE)
        sample = runner.sample(num_episodes=2, timeout=PATIENCE)
    assert told == [3 if place == "end" else 0]
    assert sample.single()["t"].tolist()[-3:] == [*range(3)]
    assert set(sample.single()["env_id"]) == {0}  # of what was over nothing is kept


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_is_told_when_the_callback_has_returned_where_it_is_to_be_confirmed(
    fails: bool,
) -> None:
    """So what `on_episode_end` writes is there before anybody relies on it."""
    bridge = ExternalEnvBridge(COUNTS, ACTIONS, confirm_ends=True)
    log = Writing(fails=fails)
    told: list[str] = []

    def play(client: ExternalEnvClient) -> None:
        for name in ("one", "two"):
            client.start_episode(name)
            client.get_action(name, obs(0))
            if fails and name == "one":
                with pytest.raises(CallbackError, match="the disk is full"):
                    client.end_episode(name, obs(1))
                continue
            client.end_episode(name, obs(1))
            assert log.written[-1] == name
            told.append(name)
        client.start_episode("empty")
        client.end_episode("empty", obs(0))  # of which there is nothing to confirm

    with (
        simulators(bridge.address, play),
        EnvRunner(bridge, zeros, RunnerConfig(callbacks=log)) as runner,
    ):
        if fails:
            with pytest.raises(CallbackError, match="the disk is full"):
                runner.sample(num_env_steps=2, timeout=PATIENCE)
            log.fails = False
        while bridge.statistics().empty == 0:
            runner.sample(num_env_steps=1, timeout=0.2)
    assert told == ["two"] if fails else ["one", "two"]
    assert bridge.statistics().unconfirmed_now == 0


class Writing(Callbacks):
    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.written: list[str] = []

    def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.written.append(episode.episode_id)


def test_an_agent_that_comes_back_though_it_is_done_is_in_no_row_and_disturbs_nobody() -> None:
    agents = ["x", "y"]
    bridge = ExternalEnvBridge(dict.fromkeys(agents, COUNTS), dict.fromkeys(agents, ACTIONS))
    runner = EnvRunner(bridge, zeros, RunnerConfig())
    acted = []

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(5):
            acted.append(sorted(client.get_action(episode, dict.fromkeys(agents, obs(t)))))
            client.log_returns(episode, dict.fromkeys(agents, 1.0), terminateds={"x": t == 1})
        client.end_episode(episode, dict.fromkeys(agents, obs(5)))

    with simulators(address(runner), play), runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
    assert acted == [["x", "y"]] * 2 + [["y"]] * 3
    assert batch["agent_id"].tolist() == ["x"] * 2 + ["y"] * 5
    assert batch["terminateds"].tolist() == [False, True, False, False, False, False, True]


def test_an_action_that_came_too_late_is_in_no_row() -> None:
    late = threading.Event()

    def policy(observations: Any) -> Any:
        if (observations == 2).any():
            assert late.wait(PATIENCE)
        return zeros(observations)

    runner = make(policy)

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(5):
            try:
                client.get_action(episode, obs(t), timeout=0.2 if t == 2 else PATIENCE)
            except ActionTimeoutError:
                assert t == 2
                late.set()
            client.log_returns(episode, float(t))
        client.end_episode(episode, obs(5))

    with simulators(address(runner), play), runner:
        sample = runner.sample(num_episodes=1, timeout=PATIENCE)
    batch = sample.single()
    assert batch["obs"][:, 0].tolist() == [0, 1, 3, 4]
    assert batch["next_obs"][:, 0].tolist() == [1, 2, 4, 5]
    assert batch["rewards"].tolist() == [0, 1, 3, 4]
    assert batch["truncateds"].tolist() == [False, True, False, False]
    assert batch["terminateds"].tolist() == [False, False, False, True]
    assert (sample.episodes[0].episode_return, sample.episodes[0].unrecorded_reward) == (10, 2)


def test_an_action_outside_the_space_is_told_to_both() -> None:
    broken = [True]

    def policy(observations: Any) -> Any:
        return zeros(observations) + (1000 if broken else 0)

    runner = make(policy)
    told = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        with pytest.raises(SpaceMismatchError, match=r"Discrete\(100\)"):
            play_episode(client, 6)
        told.set()
        play_episode(client, 6)

    with simulators(address(runner), play), runner:
        with pytest.raises(SpaceMismatchError, match=r"Discrete\(100\)"):
            runner.sample(num_env_steps=6, timeout=PATIENCE)
        assert told.wait(PATIENCE)
        broken.clear()
        batch = runner.sample(num_env_steps=6, timeout=PATIENCE).single()
    assert batch["t"].tolist() == [*range(6)]


def test_an_action_that_leaves_its_box_is_clipped_on_its_way_to_a_simulator() -> None:
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    got: list[Any] = []

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        got.extend(client.get_action(episode, obs(t)).tolist() for t in range(3))
        client.end_episode(episode, obs(3))

    runner = EnvRunner(
        ExternalEnvBridge(COUNTS, box),
        lambda observations: np.full((len(observations), 2), [5.0, -5.0], np.float32),
    )
    with simulators(address(runner), play), runner:
        batch = runner.sample(num_env_steps=3, timeout=PATIENCE).single()
    assert got == [[1.0, -1.0]] * 3
    assert batch["actions"].tolist() == [[5.0, -5.0]] * 3


class Ending(ExternalEnv):
    """Plays as many episodes as it is told to, and fails."""

    def __init__(self, episodes: int) -> None:
        super().__init__(ACTIONS, COUNTS)
        self.episodes = episodes

    def run(self) -> None:
        for _ in range(self.episodes):
            play_episode(self.client, 4)
        raise ZeroDivisionError("worn out")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("mixed", [False, True])
def test_a_hosted_simulators_end_comes_out_of_sample_and_costs_no_rows(mixed: bool) -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    go_on = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode("the other one")
        client.get_action(episode, obs(0))
        assert go_on.wait(PATIENCE)
        client.get_action(episode, obs(1))
        client.end_episode(episode, obs(2))

    more = [ExternalEnvBridge(COUNTS, ACTIONS)] if mixed else []
    runner = EnvRunner([bridge, *more], zeros)
    with simulators(bridge.address, play), runner:
        bridge.host(Ending(3))
        with pytest.raises(SimulatorError, match="worn out"):
            runner.sample(num_env_steps=1000, timeout=PATIENCE)
        go_on.set()
        number, timeout = (28, 5.0) if mixed else (14, PATIENCE)
        sample = runner.sample(num_env_steps=number, timeout=timeout)
    ts = [rows["t"].tolist() for rows in sample.single().split_by_episode()]
    assert sorted(ts) == [[0, 1], *[[0, 1, 2, 3]] * 3]
    assert {e.episode_id for e in sample.episodes} >= {"the other one"}
