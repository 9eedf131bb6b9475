"""What a newcomer does wrong is refused at once, in words that say what to write."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.spaces import Box, Discrete

from envbus.actors import AsyncExternalEnvClient, ClientTimeouts, ExternalEnvClient
from envbus.bus.errors import ConfigError
from envbus.runner import (
    ActorPool,
    BusVectorEnv,
    Callbacks,
    EnvRunner,
    EnvRunnerGroup,
    ExternalEnvBridge,
    GroupConfig,
    Hooks,
    PolicyWorkers,
    RecycleAfter,
    RunnerConfig,
    VideoConfig,
    make_vec,
)
from envbus.runner.bridge import EpisodeLimits
from envbus.runner.policies import MlpPolicy, RandomPolicy
from envbus.runner.policies.connectors import (
    ClipActions,
    Flatten,
    FrameStack,
    Normalize,
    OneHot,
    RescaleActions,
)
from tests.runner.pool_envs import PATIENCE, GatedEnv
from tests.waiting import wait_until

#: What nobody checks by types: these are the mistakes.
wrong: Any = {
    "text": "CartPole-v1",
    "number": 5,
    "dict": {"rollout_fragment_length": 5},
    "path": Path("sim-1"),
}


BOX = Box(0.0, 1.0, (2,))


@pytest.fixture(scope="module")
def pool() -> Iterator[ActorPool]:
    with ActorPool(["CartPole-v1"], num_actors=0) as pool:
        yield pool


def random(pool: ActorPool) -> RandomPolicy:
    return RandomPolicy(pool.single_action_space, None)


@pytest.mark.parametrize("timeout", ["5", math.nan])
def test_a_time_out_that_is_no_number_is_refused(timeout: Any) -> None:
    with ActorPool(["CartPole-v1"], num_actors=0, autoreset_mode="Disabled") as pool:
        for call in (
            lambda: pool.poll(timeout),
            lambda: pool.poll(batch_wait=timeout),
            lambda: pool.try_reset(0, wait=True, timeout=timeout),
            lambda: pool.close(timeout=timeout),
        ):
            with pytest.raises(ConfigError, match=r"(timeout|batch_wait) must be a number or None"):
                call()
        assert list(pool.poll().observations) == [0]
    envs = BusVectorEnv(["CartPole-v1"], num_actors=0)
    with pytest.raises(ConfigError, match="timeout must be a number or None"):
        envs.close(timeout=timeout)
    envs.close()


def test_a_name_that_is_no_text_is_refused(pool: ActorPool) -> None:
    envs = BusVectorEnv(["CartPole-v1"], num_actors=0)
    (env,) = pool.get_sub_environments()
    for call in (
        lambda: envs.call(wrong["number"]),
        lambda: envs.get_attr(wrong["number"], [0]),
        lambda: envs.set_attr(wrong["number"], 1),
        lambda: env.call(wrong["number"]),
        lambda: env.set_attr(wrong["number"], 1),
    ):
        with pytest.raises(ConfigError, match="name must be str"):
            call()
    envs.close()


@pytest.mark.parametrize("kind", [BusVectorEnv, ActorPool])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"env_fns": wrong["text"]}, r'env_fns is a sequence, \["CartPole-v1"\] \* 8 for example'),
        ({"env_fns": wrong["number"]}, "env_fns is a sequence"),
        ({"timeouts": wrong["number"]}, r"timeouts must be Timeouts, Timeouts\(step=5\)"),
        ({"timeouts": 0}, "timeouts must be Timeouts"),
        ({"hooks": print}, r"hooks must be Hooks, Hooks\(on_fault=print\)"),
        ({"preload": "numpy"}, r"preload is a sequence, \[\"numpy\"\]"),
        ({"bind": 5555}, "bind is a sequence"),
        ({"bind": ["tcp://127.0.0.1:*", 5555]}, 'bind must be str, "tcp://127.0.0.1:5555" for'),
        ({"check_finite": []}, "check_finite must be True, False or 'warn'"),
        ({"memory_limit_mb": "2000"}, "memory_limit_mb must be a number or None"),
        ({"recycle_after": 5}, r"recycle_after must be RecycleAfter, RecycleAfter\(episodes=500\)"),
        ({"restart": 5}, "restart must be True, False or a RestartPolicy"),
        ({"wait": "sleep"}, "wait must be one of 'auto', 'spin', 'block', not 'sleep'"),
        ({"threads_per_process": 0}, "threads_per_process must be .auto., a positive integer"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_before_anything_starts(
    kind: Any, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        kind(**{"env_fns": ["CartPole-v1"], **arguments})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda _: EnvRunner(wrong["text"], wrong["number"]), "envs must be an ActorPool"),
        (lambda _: EnvRunner(None, wrong["number"]), "envs must be an ActorPool"),  # type: ignore[arg-type]  # is the mistake
        (lambda pool: EnvRunner(pool, MlpPolicy), "is the class MlpPolicy; give an object"),
        (lambda pool: EnvRunner(pool, random(pool), wrong["dict"]), "config must be RunnerConfig"),
        (lambda pool: EnvRunnerGroup(wrong["text"], [], random(pool)), "num_runners must be"),
        (lambda pool: EnvRunnerGroup(1, wrong["text"], random(pool)), "envs is a sequence"),
        (lambda pool: EnvRunnerGroup(1, [], random(pool), wrong["dict"]), "config must be Runner"),
        (lambda _: PolicyWorkers(wrong["number"], 1), "a function that makes one, or 'module:f"),
        (lambda _: ExternalEnvBridge(bind=wrong["number"]), "bind is a sequence"),
    ],
)
def test_what_samples_and_serves_says_what_it_wants(
    pool: ActorPool, make: Callable[[ActorPool], object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make(pool)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: RunnerConfig(rollout_fragment_length="5"),
            "length must be a whole number, not '5'",
        ),  # type: ignore[arg-type]  # is the mistake
        (lambda: RunnerConfig(rollout_fragment_length=2.5), "must be a whole number, not 2.5"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(enough_envs="all"), "enough_envs must be a number, not 'all'"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(seed="a"), "seed must be a whole number or None"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(callbacks=Callbacks), "callbacks must be Callbacks"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(video=wrong["text"]), "video must be VideoConfig"),
        (lambda: RunnerConfig(policy_mapping_fn=wrong["text"]), "policy_mapping_fn must be a func"),
        (lambda: RunnerConfig(observation_connector=print), "observation_connector must be Conn"),  # type: ignore[arg-type]
        (lambda: VideoConfig(folder="films", episodes="all"), "episodes must be a whole number"),  # type: ignore[arg-type]
        (lambda: VideoConfig(folder="films", env_ids=0), "VideoConfig.env_ids is a sequence"),  # type: ignore[arg-type]
        (lambda: RecycleAfter(rss_mb="100"), "RecycleAfter.rss_mb must be a number or None"),  # type: ignore[arg-type]
        (lambda: RecycleAfter(episodes=1.5), "RecycleAfter.episodes must be a whole number"),  # type: ignore[arg-type]
        (lambda: GroupConfig(sample_timeout="3"), "sample_timeout must be a number or None"),  # type: ignore[arg-type]
        (
            lambda: GroupConfig(restart=wrong["number"]),
            "restart must be True, False or a RestartPolicy",
        ),
        (lambda: Hooks(on_fault=wrong["number"]), "Hooks.on_fault must be a function, not 5"),
        (lambda: GroupConfig(threads_per_process=0), "threads_per_process must be"),
        (lambda: GroupConfig(pool_settings=wrong["number"]), "pool_settings must be Mapping"),
        (lambda: EpisodeLimits(max_version_lag="1"), "max_version_lag must be a whole number"),  # type: ignore[arg-type]
        (lambda: ClientTimeouts(connect="1"), "ClientTimeouts.connect must be a number"),  # type: ignore[arg-type]
        (lambda: ClientTimeouts(patience=-1.0), "ClientTimeouts.patience must be at least 0"),
        (lambda: ExternalEnvClient(wrong["number"]), "the address 5 is no text: write tcp://"),
        (lambda: ExternalEnvClient("tcp://127.0.0.1:9", timeouts=wrong["number"]), "timeouts must"),
        (lambda: ExternalEnvClient("tcp://127.0.0.1:9", name=wrong["path"]), "name must be a text"),
        (
            lambda: AsyncExternalEnvClient("tcp://127.0.0.1:9", name=wrong["path"]),
            "name must be a text",
        ),
        (lambda: ExternalEnvBridge(limits=wrong["number"]), "limits must be EpisodeLimits"),
        (lambda: ExternalEnvBridge(gateway=wrong["text"]), "gateway must be GatewayConfig"),
        (lambda: ExternalEnvBridge(policy_ids="learner"), "policy_ids is a sequence"),
        (
            lambda: ExternalEnvBridge(policy_ids=[wrong["number"]]),
            'id of a policy must be str, "default_policy"',
        ),
        (lambda: EnvRunner.from_factories(wrong["number"], print), "make_env must be a function"),
        (lambda: EnvRunner.from_factories(print, wrong["number"]), "make_module must be a func"),
        (lambda: FrameStack(BOX, wrong["text"]), "num_frames must be a positive integer, not 'C"),
        (lambda: Normalize(BOX, clip=wrong["text"]), "clip must be a number, not 'CartPole-v1'"),
        *(
            (lambda kind=kind: kind(wrong["number"]), "space must be Space, .* not 5")
            for kind in (ClipActions, Flatten, Normalize, OneHot, RescaleActions)
        ),
        (lambda: make_vec("CartPole-v1", 10**30), "num_envs must be at most 1e[+]06, not 1000"),
        (lambda: PolicyWorkers(print, 10**7), "n must be at most 1024, not 10000000"),
        (lambda: PolicyWorkers(print, 1, timeout="3"), "timeout must be a number"),  # type: ignore[arg-type]
        (
            lambda: PolicyWorkers(print, 1, restart=wrong["number"]),
            "restart must be True, False or a RestartPolicy",
        ),
        (lambda: PolicyWorkers(print, 1, threads_per_process=0), "threads_per_process must be"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_its_name(
    make: Callable[[], object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda runner: runner.envs.recv(min_envs="2"), "min_envs must be a whole number, not '2'"),
        (lambda runner: runner.envs.recv(timeout="2"), "timeout must be a number, not '2'"),
        (lambda runner: runner.sample(num_env_steps="5"), "num_env_steps must be a whole number"),
        (lambda runner: runner.sample(timeout="5"), "timeout must be a number or None, not '5'"),
        (
            lambda runner: runner.set_state({}),
            "a state is what `get_state` returned, with",
        ),
        (lambda runner: runner.set_state(None), "a state is what `get_state` returned"),
        (lambda runner: runner.envs.reset(options=5), 'options must be Mapping, {"difficulty": 3}'),
        (lambda runner: runner.set_weights({}, 2**64), r"version must be .*at most 4.6\d+e\+18"),
        (
            lambda runner: EnvRunner(runner.envs, {7: print}),
            'the id of a policy must be str, "default_policy" for example; not 7',
        ),
        (
            lambda runner: EnvRunner(runner.envs, print, make_column=wrong["number"]),
            "make_column must be a function, not 5",
        ),
        (lambda runner: runner.set_weights(3), r'weights must be .*"default_policy": policy.get_w'),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_its_name(
    pool: ActorPool, call: Callable[[Any], object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        call(EnvRunner(pool, random(pool)))


def test_a_policy_that_is_refused_changes_nothing() -> None:
    with ActorPool(["CartPole-v1"], num_actors=0, autoreset_mode="Disabled") as pool:
        runner = EnvRunner(pool, {"a": random(pool)}, RunnerConfig(vectorized=False))
        with pytest.raises(ConfigError, match="the id of a policy must be str"):
            runner.add_policy(wrong["number"], random(pool))
        with pytest.raises(ConfigError, match="policy_mapping_fn must be a function"):
            runner.add_policy("b", random(pool), wrong["text"])
        assert list(runner.policies) == ["a"]
        with pytest.raises(ConfigError, match="policy_mapping_fn must be a function"):
            runner.policy_mapping_fn = wrong["text"]
        runner.add_policy("b", random(pool))
        with pytest.raises(ConfigError, match="policy_mapping_fn must be a function"):
            runner.remove_policy("b", wrong["text"])
        assert list(runner.policies) == ["a", "b"]


@pytest.mark.slow
def test_a_version_that_no_message_can_carry_is_refused() -> None:
    with PolicyWorkers(lambda: print, 1) as workers:
        for version in (2**64, -(2**63)):
            with pytest.raises(ConfigError, match="version must be at "):
                workers.set_weights({}, version)
        assert workers.set_weights({}) == 1


def test_options_of_a_reset_are_a_dict() -> None:
    envs = BusVectorEnv(["CartPole-v1"], num_actors=0)
    with pytest.raises(ConfigError, match="options must be Mapping"):
        envs.reset(options=wrong["number"])
    envs.close()


def test_a_policy_for_other_observations_says_so(pool: ActorPool) -> None:
    policy = MlpPolicy(Box(0.0, 1.0, (7,)), pool.single_action_space)
    with pytest.raises(ValueError, match="for observations of 7 numbers, and one here has 4"):
        EnvRunner(pool, policy).sample(num_env_steps=4)


def test_env_ids_are_a_sequence(pool: ActorPool) -> None:
    for mistake in (wrong["number"], wrong["text"]):
        with pytest.raises(TypeError, match=r"env_ids is a sequence of ids, \[0, 3\]"):
            pool.send(np.array([0]), mistake)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda pool: pool.env_groups(0), ConfigError, "count must be a positive integer, not 0"),
        (lambda pool: pool.try_render("a"), TypeError, "env_id has integers, .* not 'a'"),
        (lambda pool: pool.send_actions(None), TypeError, "actions are a dict of dicts, .* None"),
    ],
)
def test_what_a_pool_is_given_wrongly_is_told_by_its_name(
    call: Callable[[ActorPool], object], error: type[Exception], told: str
) -> None:
    with (
        ActorPool(["CartPole-v1"], num_actors=0, autoreset_mode="Disabled") as pool,
        pytest.raises(error, match=told),
    ):
        call(pool)


def test_a_pool_that_was_closed_has_no_rows_to_share() -> None:
    with ActorPool(["CartPole-v1"], num_actors=1) as pool:
        assert pool.shared_rows() is not None
    with pytest.raises(ClosedEnvironmentError):
        pool.shared_rows()


def test_what_belongs_to_a_process_says_so_where_it_is_pickled_or_copied(pool: ActorPool) -> None:
    with ExternalEnvBridge() as bridge:
        for thing in (pool, EnvRunner(pool, random(pool)), bridge):
            for action in (pickle.dumps, copy.copy, copy.deepcopy):
                name = type(thing).__name__
                with pytest.raises(TypeError, match=f"^a {name} belongs to the process"):
                    action(thing)
    for kind in (BusVectorEnv, EnvRunnerGroup, PolicyWorkers, ExternalEnvClient):
        with pytest.raises(TypeError, match="send a function that makes one"):
            pickle.dumps(kind.__new__(kind))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda bridge: bridge.poll(wrong["text"]), "timeout must be a number or None, not 'Cart"),
        (lambda bridge: bridge.poll(-1), "timeout must be at least 0 or None, not -1"),
        (lambda bridge: bridge.poll(0.0, min_envs=0), "min_envs must be at least 1, not 0"),
        (lambda bridge: bridge.poll(0.0, max_envs="2"), "max_envs must be a whole number or None"),
        (lambda bridge: bridge.send_actions(wrong["number"]), r"actions are {episode_id: .* not 5"),
    ],
)
def test_what_a_bridge_cannot_take_is_refused_by_its_name(
    call: Callable[[ExternalEnvBridge], object], told: str
) -> None:
    with ExternalEnvBridge() as bridge, pytest.raises((ConfigError, TypeError), match=told):
        call(bridge)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool", "group"])
def test_a_thread_that_asks_while_another_waits_is_told_so(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    envs = [partial(GatedEnv, gate)] * 3
    results: list[object] = []
    owner: ActorPool | EnvRunnerGroup
    wait: Callable[[], object]
    ask: Callable[[], object]
    if kind == "pool":
        owner = ActorPool(envs)
        owner.reset()
        owner.recv(3)
        owner.send([0, 0], [0, 1])
        wait, ask = partial(owner.recv, 2), partial(owner.send, [0], [2])
    else:
        owner = EnvRunnerGroup(1, envs, RandomPolicy(Discrete(2)))
        wait, ask = partial(owner.sample, 3), partial(owner.set_weights, {})
    with owner:
        first = threading.Thread(target=lambda: results.append(wait()))
        first.start()
        group = owner._fleet if isinstance(owner, ActorPool) else owner._worker_group
        wait_until(lambda: group._polled_by is not None, "its wait")
        try:
            with pytest.raises(AlreadyPendingCallError, match="one thread uses them, or a lock"):
                ask()
        finally:
            gate.touch()
            first.join(PATIENCE)
        assert len(results) == 1
        ask()
