"""Simulators that choose actions by weights that their bridge hands out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.aio import AsyncExternalEnvClient
from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import EpisodeBusyError, EpisodeError
from envbus.actors.external.local_policy import LocalSettings
from envbus.actors.external.verbs import ClientTimeouts
from envbus.bus.errors import ClosedError, ConfigError, PeerLostError, RequestTimeoutError
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.vocabulary import EpisodeLimits
from envbus.runner.policies.mlp import MlpPolicy, policy_from_weights
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.runner.simulators import ACTIONS, COUNTS, PATIENCE, address, for_ever, obs, play_episode
from tests.runner.simulators import simulators as _simulators

TIMEOUTS = ClientTimeouts(connect=PATIENCE, action=PATIENCE, other=PATIENCE, patience=1.0)


def make(policy: Policy, bridge: ExternalEnvBridge | None = None, **config: Any) -> EnvRunner:
    bridge = bridge or ExternalEnvBridge(COUNTS, ACTIONS)
    return EnvRunner(bridge, policy, RunnerConfig(publish=True, explore=False, **config))


def simulators(address: str, *plays: Any, **more: Any) -> Any:
    return _simulators(
        address,
        *plays,
        inference="client",
        policy=more.pop("policy", policy_from_weights),
        update_interval=0.05,
        local=LocalSettings(explore=False, **more),
    )


@contextmanager
def tasks(
    address: str, *plays: Callable[[AsyncExternalEnvClient], Awaitable[object]], **more: Any
) -> Iterator[list[BaseException]]:
    """As `simulators`, in tasks of one loop, which share a client. Yield what else went wrong."""
    settings = {"inference": "client", "policy": more.pop("policy", policy_from_weights)}
    errors: list[BaseException] = []

    async def play_all() -> None:
        local = LocalSettings(explore=False, **more)
        async with AsyncExternalEnvClient(
            address, timeouts=TIMEOUTS, update_interval=0.05, local=local, **settings
        ) as client:
            await asyncio.gather(*(play(client) for play in plays))

    def run() -> None:
        try:
            asyncio.run(play_all())
        except (ClosedError, PeerLostError, RequestTimeoutError, EpisodeError):
            pass  # the bridge was stopped
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        thread.join(PATIENCE)


async def play_in_task(client: AsyncExternalEnvClient, length: int = 25) -> None:
    """As `play_episode`."""
    episode = await client.start_episode()
    for t in range(length):
        await client.get_action(episode, obs(t))
        await client.log_returns(episode, float(t))
    await client.end_episode(episode, obs(length))


async def play_in_task_for_ever(client: AsyncExternalEnvClient) -> None:
    while True:
        await play_in_task(client)


class Recurrent(Policy):
    """Acts by how often it was asked in this episode."""

    def initial_state(self) -> Any:
        return np.zeros(1, np.float32)

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        after = states + 1
        return PolicyOutput(after[:, 0].astype(np.int64), after, {"vf_preds": observations[:, 0]})


class Watching(Policy):
    """Acts by what it sees; the runner's own also wants to be told what was done before."""

    wanted_inputs = ("prev_actions", "prev_rewards")

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True, **told: Any
    ) -> PolicyOutput:
        return PolicyOutput(observations[:, 0].astype(np.int64) + 1, states)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("policy", [MlpPolicy(COUNTS, ACTIONS, seed=1), Recurrent(), Watching()])
def test_the_same_simulator_gives_the_same_batches_with_inference_on_either_side(
    policy: Any,
) -> None:
    batches = []
    for inference in ("server", "client", "asyncio"):
        runner = make(policy)
        where = address(runner)
        local: dict[str, Any] = {"fragment_length": 7}
        if not isinstance(policy, MlpPolicy):
            local["policy"] = lambda *_: type(policy)()
        if inference == "server":
            sims: Any = _simulators(where, for_ever(play_episode))
        elif inference == "client":
            sims = simulators(where, for_ever(play_episode), **local)
        else:
            sims = tasks(where, play_in_task_for_ever, **local)
        with sims, runner:
            samples = [runner.sample(num_episodes=2, timeout=PATIENCE) for _ in range(2)]
            batches.append(
                sorted(
                    (part for sample in samples for part in sample.single().split_by_episode()),
                    key=lambda part: int(part["eps_id"][0]),
                )
            )
    for one, *others in zip(*batches, strict=True):
        for other in others:
            assert one.columns.keys() == other.columns.keys()
            for name in one.columns.keys() - {"env_id", "unroll_id"}:  # their order is free
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        assert one["policy_version"].tolist() == [0] * 25
        assert not one["off_policy"].any()
        if isinstance(policy, Watching):
            assert one["prev_actions"].tolist() == [*range(25)]
            assert one["prev_rewards"].tolist() == [0.0, *range(24)]


def test_tasks_of_one_loop_play_side_by_side_and_by_new_weights() -> None:
    policy = MlpPolicy(COUNTS, ACTIONS, seed=1)
    runner = make(policy)
    told: list[Any] = []

    async def play_until_told(client: AsyncExternalEnvClient) -> None:
        assert client.local is not None
        while client.local.policy_version != 7:
            await play_in_task(client, 200)
        told.append(client.local.num_unsent)

    async def look(client: AsyncExternalEnvClient) -> None:
        waits = asyncio.create_task(play_until_told(client))
        looks = 0
        episode = await client.start_episode()
        await client.get_action(episode, obs(0))
        with pytest.raises(ValueError, match="expected Box"):
            await client.get_action(episode, np.zeros(2, np.float32))
        await client.log_action(episode, obs(1), 42)
        await client.end_episode(episode, obs(2), truncated=True)
        while not waits.done():
            await asyncio.sleep(0)
            looks += 1
        await waits
        await client.close()
        with pytest.raises(ClosedError):
            await client.get_action(episode, obs(0))
        told.append(looks > 200)

    with tasks(address(runner), look) as errors, runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        other = MlpPolicy(COUNTS, ACTIONS, seed=2).get_weights()
        runner.set_weights({"default_policy": other}, version=7)
        while len(told) < 2 and not errors:
            runner.serve(0.05)
    assert errors == []
    assert told == [0, True]
    assert {len(part) for part in batch.split_by_episode()} <= {2, 200}


def test_new_weights_reach_the_simulator_and_its_rows_say_which_have_chosen() -> None:
    policy = MlpPolicy(COUNTS, ACTIONS, seed=1)
    runner = make(policy)
    with simulators(address(runner), for_ever(play_episode)), runner:
        first = runner.sample(50, timeout=PATIENCE).single()
        other = MlpPolicy(COUNTS, ACTIONS, seed=2).get_weights()
        runner.set_weights({"default_policy": other}, version=7)
        batch = first
        while (batch["policy_version"] != 7).any():
            batch = runner.sample(25, timeout=PATIENCE).single()
            assert set(batch["policy_version"].tolist()) <= {0, 7}
        assert first["policy_version"].tolist() == [0] * 50
        expected = policy.compute_actions(batch["obs"], None, explore=False)
        assert batch["actions"].tolist() == expected.actions.tolist()
        np.testing.assert_allclose(
            batch["vf_preds"], expected.extras["vf_preds"], rtol=1e-5, atol=1e-6
        )


def test_logged_actions_mix_and_untrained_episodes_leave_no_rows() -> None:
    def play(client: ExternalEnvClient) -> None:
        play_episode(client, 5, training_enabled=False)
        play_episode(client, 6, log=lambda t: 42 if t in (0, 3) else None, truncated=True)

    runner = make(MlpPolicy(COUNTS, ACTIONS, seed=1))
    with simulators(address(runner), play, fragment_length=2), runner:
        sample = runner.sample(num_episodes=1, timeout=PATIENCE)
        batch = sample.single()
    off = [True, False, False, True, False, False]
    assert batch["off_policy"].tolist() == off
    assert (batch["actions"] == 42).tolist() == off
    assert batch["policy_version"].tolist() == [-1 if own else 0 for own in off]
    assert np.isnan(batch["action_logp"]).tolist() == off
    assert batch["rewards"].tolist() == [*range(6)]
    assert batch["truncateds"].tolist() == [False] * 5 + [True]
    assert sorted(episode.length for episode in sample.episodes) == [5, 6]


def test_interleaved_episodes_of_one_client_are_whole_and_apart() -> None:
    def play(client: ExternalEnvClient) -> None:
        one, other = client.start_episode(), client.start_episode()
        for t in range(9):
            client.get_action(one, obs(t))
            client.log_returns(one, 1.0)
            if t < 5:
                client.get_action(other, obs(100 + t))
                client.log_returns(other, 2.0)
        client.end_episode(one, obs(9))
        client.end_episode(other, obs(105))

    runner = make(MlpPolicy(COUNTS, ACTIONS, seed=1))
    with simulators(address(runner), play, fragment_length=3), runner:
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
    parts = sorted(batch.split_by_episode(), key=len)
    assert [part["t"].tolist() for part in parts] == [[*range(5)], [*range(9)]]
    assert [set(part["rewards"].tolist()) for part in parts] == [{2.0}, {1.0}]
    assert parts[0]["obs"][:, 0].tolist() == [*range(100, 105)]


def test_several_agents_act_by_one_policy_of_the_client() -> None:
    bridge = ExternalEnvBridge({"x": COUNTS, "y": COUNTS}, {"x": ACTIONS, "y": ACTIONS})

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        assert client.get_action(episode, {"x": obs(0), "y": obs(10)}).keys() == {"x", "y"}
        client.log_returns(episode, {"x": 1.0, "y": 5.0}, truncateds={"y": True})
        assert client.get_action(episode, {"x": obs(1), "y": obs(11)}).keys() == {"x"}
        client.log_returns(episode, {"x": 2.0})
        client.end_episode(episode, {"x": obs(2)})

    runner = make(MlpPolicy(COUNTS, ACTIONS, seed=1), bridge)
    with simulators(address(runner), play), runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
    rows = {part["agent_id"][0]: part for part in batch.split_by_trajectory()}
    assert rows["x"]["rewards"].tolist() == [1.0, 2.0]
    assert rows["y"]["rewards"].tolist() == [5.0]
    assert rows["y"]["truncateds"].tolist() == [True]
    assert not batch["off_policy"].any()


def test_steps_of_weights_that_are_too_old_become_no_rows_and_their_client_is_told() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS, limits=EpisodeLimits(max_version_lag=1))
    policy = MlpPolicy(COUNTS, ACTIONS, seed=1)
    runner = make(policy, bridge)
    with runner:
        done: list[int] = []

        def play() -> None:
            with ExternalEnvClient(
                bridge.address,
                inference="client",
                policy=policy_from_weights,
                update_interval=1000.0,
                timeouts=TIMEOUTS,
                local=LocalSettings(fragment_length=1),
            ) as client:
                assert client.local is not None
                runner.set_weights({"default_policy": policy.get_weights()}, version=5)
                while client.local.policy_version != 5:
                    play_episode(client, 10)
                for _ in range(5):
                    play_episode(client, 10)
                done.append(client.local.num_dropped)

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        versions: set[int] = set()
        while not versions or not done:
            for batch in runner.sample(10, timeout=1.0).policy_batches.values():
                versions |= set(batch["policy_version"].tolist())
        while thread.is_alive():
            runner.serve(0.05)
        assert done[0] > 0
        assert versions == {5}
        assert bridge.statistics().stale_actions == done[0]


def test_an_observation_outside_its_space_is_refused_at_once_and_the_episode_goes_on() -> None:
    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        with pytest.raises(ValueError, match="expected Box"):
            client.get_action(episode, np.zeros(2, np.float32))
        client.get_action(episode, obs(0))
        with pytest.raises(ValueError, match="a reward is a number"):
            client.log_returns(episode, "1")
        client.end_episode(episode, obs(1))
        with pytest.raises(ValueError, match="not found"):
            client.get_action(episode, obs(0))

    runner = make(MlpPolicy(COUNTS, ACTIONS, seed=1))
    with simulators(address(runner), play), runner:
        assert len(runner.sample(num_episodes=1, timeout=PATIENCE).single()) == 1


class Raising(MlpPolicy):
    """Has nothing to say to 2."""

    def compute_actions(self, observations: Any, *args: Any, **kwargs: Any) -> PolicyOutput:
        if (observations == obs(2)).any():
            raise ValueError("two")
        return super().compute_actions(observations, *args, **kwargs)


def test_an_observation_that_gets_no_answer_is_a_gap_and_no_row_leads_over_it() -> None:
    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(4):
            with suppress(ValueError):
                client.get_action(episode, obs(t))
            client.log_returns(episode, 10.0**t)
        client.end_episode(episode, obs(4))

    policy = Raising(COUNTS, ACTIONS)
    runner = make(MlpPolicy(COUNTS, ACTIONS))
    with runner, simulators(address(runner), play, policy=policy):
        sample = runner.sample(num_episodes=1, timeout=PATIENCE)
        runner.stop()
    batch = sample.single()
    assert batch["obs"][:, 0].tolist() == [0, 1, 3]
    assert batch["rewards"].tolist() == [1, 10, 1000]
    assert batch["next_obs"][:, 0].tolist() == [1, 2, 4]
    assert batch["truncateds"].tolist() == [False, True, False]
    assert batch["terminateds"].tolist() == [False, False, True]
    assert sample.episodes[0].episode_return == 1111
    assert sample.episodes[0].unrecorded_reward == 100


def test_a_bridge_without_models_says_how_to_have_them() -> None:
    errors: list[Exception] = []

    def join() -> None:
        settings: Any = {"policy": policy_from_weights, "timeouts": TIMEOUTS}
        try:
            ExternalEnvClient(address(runner), inference="client", **settings)
        except ConfigError as exc:
            errors.append(exc)
        client = AsyncExternalEnvClient(address(runner), inference="client", **settings)
        try:
            asyncio.run(client.connect())
        except ConfigError as exc:
            errors.append(exc)

    with EnvRunner(ExternalEnvBridge(COUNTS, ACTIONS), MlpPolicy(COUNTS, ACTIONS)) as runner:
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        while thread.is_alive():
            runner.serve(0.05)
    assert ["RunnerConfig(publish=True)" in str(error) for error in errors] == [True, True]


def test_a_model_in_onnx_is_handed_out_and_chooses_at_the_client() -> None:
    pytest.importorskip("onnxruntime")
    onnx: Any = pytest.importorskip("onnx")
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["obs", "weight"], ["logits"]),
            helper.make_node("ReduceSum", ["obs", "axis"], ["vf_preds"], keepdims=0),
        ],
        "policy",
        [helper.make_tensor_value_info("obs", 1, ["rows", 1])],
        [helper.make_tensor_value_info(name, 1, None) for name in ("logits", "vf_preds")],
        [
            onnx.numpy_helper.from_array(np.eye(1, 100, 7, dtype=np.float32), "weight"),
            onnx.numpy_helper.from_array(np.array([1]), "axis"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    weights = {"model": bytes(model.SerializeToString())}
    runner = make(policy_from_weights(COUNTS, ACTIONS, weights))
    with simulators(address(runner), for_ever(play_episode)), runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
    assert batch["actions"].tolist() == [0] + [7] * 24
    assert batch["vf_preds"].tolist() == [*range(25)]
    assert not batch["off_policy"].any()


class Gaussian(Policy):
    """Its actions leave their Box."""

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        return PolicyOutput(np.full((len(observations), 2), [5.0, -5.0], np.float32), states, {})


def test_an_action_of_the_clients_policy_that_leaves_its_box_is_clipped() -> None:
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    got: list[Any] = []

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        got.extend(client.get_action(episode, obs(t)).tolist() for t in range(3))
        client.end_episode(episode, obs(3))

    runner = make(Gaussian(), ExternalEnvBridge(COUNTS, box))
    with simulators(address(runner), play, policy=lambda *_: Gaussian()), runner:
        batch = runner.sample(num_env_steps=3, timeout=PATIENCE).single()
    assert got == batch["actions"].tolist() == [[1.0, -1.0]] * 3


def test_a_policy_that_asks_its_own_client_is_an_error_and_no_wait_for_itself() -> None:
    class Asking(MlpPolicy):
        def compute_actions(self, observations: Any, states: Any = None, **more: Any) -> Any:
            return clients[0].get_action("e", obs(0))

    def play(client: ExternalEnvClient) -> None:
        clients.append(client)
        client.start_episode("e")
        with pytest.raises(EpisodeBusyError, match="the policy asks its own client"):
            client.get_action("e", obs(0))
        refused.append(client.name)

    clients: list[ExternalEnvClient] = []
    refused: list[str] = []
    with (
        make(MlpPolicy(COUNTS, ACTIONS, seed=1)) as runner,
        simulators(address(runner), play, policy=Asking(COUNTS, ACTIONS)) as (thread,),
    ):
        while thread.is_alive():
            runner.serve(0.05)
    assert refused


def test_a_state_whose_weights_cannot_be_handed_out_changes_nothing() -> None:
    policy = MlpPolicy(COUNTS, ACTIONS)
    with make(policy) as runner:
        before = runner.get_state()
        weights, version = before["policies"]["default_policy"]
        refused = {"policies": {"default_policy": (weights, -3)}, "next_eps_id": 500}
        with pytest.raises(ConfigError, match="-3"):
            runner.set_state({**before, **refused})
        assert policy.policy_version == version
        assert runner.ids_reached() == (before["next_eps_id"], before["num_samples"])
