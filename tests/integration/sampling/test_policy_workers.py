"""Policy workers that are well, asked from this process."""

from __future__ import annotations

import functools
import os
import pickle
import resource
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envbus.actors.protocol import MapBlocks
from envbus.actors.testing import CountingEnv
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    OverloadedError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RequestTimeoutError,
    StartError,
)
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST
from envbus.runner.batches.nested import as_rows
from envbus.runner.inference.policy_processes import MAX_UNDER_WAY
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.policies.policy import FunctionPolicy, Policy, PolicyOutput, TwoStepPolicy
from envbus.runner.policies.policy_map import PolicyMap
from envbus.runner.pool.pool import ActorPool
from tests.integration.group_children import refused_in_a_fork, wait_until
from tests.integration.policies_under_test import Picky, Probe, hold, make_probe, rows, spoil
from tests.runner.sampling.test_inference import (
    UsesBuffersAgain,
    WritesToItsStates,
)

pytestmark = pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")

#: A window that nobody waits for: batches go when they are full.
NEVER = 1000.0


@pytest.fixture(scope="module")
def pair() -> Iterator[PolicyWorkers]:
    """Two workers with three policies."""
    policies = {
        "probe": make_probe,
        "stateful": functools.partial(Probe, stateful=True),
        "double": lambda: lambda observations: 2 * observations[:, 0],
    }
    with PolicyWorkers(policies, 2) as workers:
        yield workers


@pytest.fixture(scope="module")
def triples() -> Iterator[PolicyWorkers]:
    """One worker that waits until three rows are there."""
    with PolicyWorkers(make_probe, max_batch=3, max_wait=NEVER) as workers:
        yield workers


class PoolOf:
    """What a runner shares of a pool: rows in a memory that may be too small."""

    closed = False

    def __init__(self, memory: int, size: int, layout: MapBlocks) -> None:
        self._shared = memory, size, layout

    def shared_rows(self) -> tuple[int, int, MapBlocks]:
        return self._shared


def test_rows_that_a_worker_could_not_take_over_are_shared_anew() -> None:
    seen = np.zeros((1, 4), np.int64)
    memory = os.memfd_create("rows")
    with (
        ActorPool([CountingEnv]) as pool,
        PolicyWorkers(lambda: lambda rows: rows[:, 0], timeout=2.0, share_from=0) as workers,
        workers.policy() as policy,
    ):
        shared = pool.shared_rows()
        assert shared is not None
        _, size, layout = shared
        late = PoolOf(memory, size, layout)
        assert policy.share_rows(late)
        with pytest.raises((PeerLostError, RequestTimeoutError)):
            policy.collect_actions(policy.submit_actions(seen, None, env_ids=np.array([0])))
        os.ftruncate(memory, size)
        out = policy.collect_actions(policy.submit_actions(seen, None, env_ids=np.array([0])))
        assert np.asarray(out.actions).tolist() == [0]
    os.close(memory)


# --- batches --------------------------------------------------------------------------------


def test_requests_of_several_runners_go_in_one_batch(triples: PolicyWorkers) -> None:
    askers = [triples.policy() for _ in range(3)]
    tickets = [asker.submit_actions(rows(i), None) for i, asker in enumerate(askers)]
    for i, (asker, ticket) in enumerate(zip(askers, tickets, strict=True)):
        out = asker.collect_actions(ticket)
        assert out.actions.tolist() == [i]
        assert out.extras["rows"].tolist() == [3]


def test_answers_go_back_to_the_right_rows_even_if_a_batch_is_split(
    triples: PolicyWorkers,
) -> None:
    one, other = triples.policy(), triples.policy()
    short = other.submit_actions(rows(100), None)
    long = one.submit_actions(rows(*range(8)), None)
    out = one.collect_actions(long)
    assert out.actions.tolist() == list(range(8))
    assert out.extras["rows"].tolist() == [3] * 8
    assert out.versions is not None
    assert out.versions.tolist() == [0] * 8
    assert other.collect_actions(short).actions.tolist() == [100]


def test_one_bad_observation_fails_only_its_own_request(triples: PolicyWorkers) -> None:
    askers = [triples.policy() for _ in range(3)]
    tickets = [
        asker.submit_actions(seen, None)
        for asker, seen in zip(askers, (rows(1), spoil(2), rows(3)), strict=True)
    ]
    assert askers[0].collect_actions(tickets[0]).actions.tolist() == [1]
    with pytest.raises(RemoteError, match="spoiled in a batch of 1") as caught:
        askers[1].collect_actions(tickets[1])
    assert caught.value.remote_type == "builtins.ArithmeticError"
    assert "compute_actions" in caught.value.remote_traceback
    assert askers[2].collect_actions(tickets[2]).actions.tolist() == [3]


@pytest.mark.parametrize("kind", [UsesBuffersAgain, WritesToItsStates])
def test_a_policy_that_uses_arrays_again_and_begins_by_its_weights(kind: Any) -> None:
    with PolicyWorkers(kind(), max_batch=3) as workers:
        policy = workers.policy()
        states = {"n": np.arange(16.0).reshape(8, 2)}  # more rows than one batch takes

        def ask() -> Any:
            out = policy.compute_actions(rows(*range(8)), states)
            assert out.states["n"].tolist() == (states["n"] + 1).tolist()
            assert out.extras["seen"].tolist() == (2 * states["n"][:, 0] + 2).tolist()
            return out

        assert policy.initial_state()["n"].tolist() == [0.0, 0.0]
        workers.set_weights({"begin": np.full(2, 5.0)})
        wait_until(lambda: ask().versions[-1] == 1, "the weights to be taken over")
        assert policy.initial_state()["n"].tolist() == [5.0, 5.0]


def test_explore_is_told_and_does_not_mix(triples: PolicyWorkers) -> None:
    asker = triples.policy()
    greedy = [asker.submit_actions(rows(i), None, explore=False) for i in range(2)]
    out = asker.compute_actions(rows(1, 2, 3), None)
    assert out.extras["explored"].tolist() == [True] * 3
    last = asker.compute_actions(rows(4), None, explore=False)
    assert last.extras["explored"].tolist() == [False]
    assert all(asker.collect_actions(ticket).extras["rows"].tolist() == [3] for ticket in greedy)


# --- requests -------------------------------------------------------------------------------


def test_actions_in_two_steps_are_collected_in_any_order(pair: PolicyWorkers) -> None:
    probe = pair.policy("probe")
    assert isinstance(probe, TwoStepPolicy)
    tickets = [probe.submit_actions(rows(i, -i), None) for i in range(5)]
    probe.discard_actions(tickets.pop(2))
    for i, ticket in reversed(list(zip((0, 1, 3, 4), tickets, strict=True))):
        assert probe.collect_actions(ticket).actions.tolist() == [i, -i]
    probe.discard_actions(tickets[0])  # no error


def test_requests_go_to_the_least_loaded_worker(pair: PolicyWorkers) -> None:
    probe = pair.policy("probe")
    tickets = [probe.submit_actions(hold(i, 0.05), None) for i in range(4)]
    found = [int(probe.collect_actions(ticket).extras["worker"][0]) for ticket in tickets]
    assert sorted(found) == [0, 0, 1, 1]


def test_the_state_of_rows_is_kept_by_who_asks(pair: PolicyWorkers) -> None:
    policy = pair.policy("stateful")
    first = policy.initial_state()
    assert first.tolist() == [0, 0]
    states = np.stack([first, first + 10])
    for turn in range(1, 6):  # whichever worker
        states = policy.compute_actions(rows(1, 2), states).states
        assert states.tolist() == [[turn, turn], [10 + turn, 10 + turn]]


def test_there_may_be_several_policies_in_each_worker(pair: PolicyWorkers) -> None:
    with pytest.raises(ConfigError, match="which policy"):
        pair.policy()
    with pytest.raises(ConfigError, match="no policy 'other'"):
        pair.policy("other")
    assert pair.policy("double").compute_actions(rows(3), None).actions.tolist() == [6]
    assert pair.policy("probe").compute_actions(rows(3), None).actions.tolist() == [3]


def test_nested_observations_and_actions_cross() -> None:
    def mirror(observations: Any) -> Any:
        return {"a": observations["a"], "b": (observations["b"][0] + 1,)}

    with PolicyWorkers(lambda: mirror) as workers:
        seen = {"a": np.arange(3), "b": (np.ones((3, 2)),)}
        actions = workers.policy().compute_actions(seen, None).actions
    assert actions["a"].tolist() == [0, 1, 2]
    assert actions["b"][0].tolist() == [[2, 2]] * 3
    actions["a"] += 1  # they are the caller's


def test_observations_and_actions_without_a_fixed_size_cross() -> None:
    with PolicyWorkers(lambda: lambda texts: [text[::-1] for text in texts]) as workers:
        out = workers.policy().compute_actions(as_rows(["ab", "", "xyz"]), None)
    assert out.actions == ["ba", "", "zyx"]


# --- weights --------------------------------------------------------------------------------


def test_weights_are_pushed_without_stopping_inference() -> None:
    with PolicyWorkers(make_probe, 2) as workers:
        policy = workers.policy()
        busy = [policy.submit_actions(hold(0, 0.3), None) for _ in range(2)]
        offset = np.array(1.5)
        assert workers.set_weights({"offset": offset}) == 1  # though both are busy
        offset[...] = 99.0  # it was copied
        later = [policy.submit_actions(rows(1), None) for _ in range(4)]
        assert policy.policy_version == 1
        for ticket in busy:  # they were computed with what was there when they began
            out = policy.collect_actions(ticket)
            assert out.versions is not None
            assert out.actions.tolist() == [1.5 * out.versions[0]]
        for ticket in later:
            out = policy.collect_actions(ticket)
            assert out.versions is not None
            assert (out.actions.tolist(), out.versions.tolist()) == ([2.5], [1])
        policy.set_weights({"offset": 3}, version=40)  # as a policy of its own
        assert policy.compute_actions(rows(1), None).versions.tolist() == [40]  # type: ignore[union-attr]
        assert policy.get_weights() == {"offset": 3.0}


def test_a_version_of_weights_that_is_no_number_is_refused(pair: PolicyWorkers) -> None:
    with pytest.raises(ConfigError, match="version must be a whole number or None, not '3'"):
        pair.set_weights({}, "3", policy_id="probe")  # type: ignore[arg-type]
    assert pair.policy("probe").compute_actions(rows(1), None).actions.tolist() == [1]


def test_what_are_no_weights_is_refused_where_it_is_set(pair: PolicyWorkers) -> None:
    with pytest.raises(ConfigError, match=r"weights .*not None"):
        pair.set_weights(None, policy_id="probe")  # type: ignore[arg-type]  # on purpose
    assert pair.policy("probe").compute_actions(rows(1), None).versions == [0]


def test_weights_that_were_pushed_are_those_that_are_got() -> None:
    with PolicyWorkers(make_probe, 2) as workers:
        policy = workers.policy()
        for number in range(MAX_UNDER_WAY):  # more may wait until a worker has looked at some
            workers.set_weights({"offset": float(number)})
            assert policy.get_weights()["offset"] == number


def test_weights_are_pushed_while_another_thread_makes_policies() -> None:
    over, usual = threading.Event(), sys.getswitchinterval()
    with PolicyWorkers(make_probe) as workers:
        kept = [workers.policy() for _ in range(2000)]

        def make() -> None:
            while not over.is_set():
                workers.policy()

        maker = threading.Thread(target=make)
        sys.setswitchinterval(1e-6)
        maker.start()
        try:
            versions = [workers.set_weights({"offset": 1.0}) for _ in range(100)]
        finally:
            over.set()
            sys.setswitchinterval(usual)
            maker.join()
        assert {policy.policy_version for policy in kept} == {versions[-1]}


def test_a_state_pairs_weights_with_their_version_after_many_pushes_and_refused_ones() -> None:
    with PolicyWorkers(Picky(), 2) as workers:
        policies = PolicyMap(workers.policy())
        for number in range(1, 5 * MAX_UNDER_WAY):
            workers.set_weights({"offset": float(number)}, 100 + number)
        assert policies.get_state() == {"default_policy": ({"offset": number}, 100 + number)}
        workers.set_weights({"offset": -1.0})
        assert policies.get_state() == {"default_policy": ({"offset": number}, 100 + number)}


def test_each_action_says_which_weights_chose_it_when_replicas_differ() -> None:
    with PolicyWorkers(lambda index: Probe(index, deaf=1), 2) as workers:
        policy = workers.policy()
        workers.set_weights({"offset": 1.0}, 7)
        found = set()
        for _ in range(10):
            tickets = [policy.submit_actions(rows(0), None) for _ in range(2)]
            for ticket in tickets:
                out = policy.collect_actions(ticket)
                assert out.versions is not None
                found.add((int(out.extras["worker"][0]), int(out.versions[0]), *out.actions))
        assert found == {(0, 7, 1.0), (1, 0, 0.0)}
        assert policy.policy_version == 7
        versions = workers.statistics().policies["default_policy"].versions
        assert versions == {"policy-worker-0": 7, "policy-worker-1": 0}


def test_a_worker_that_is_too_far_behind_is_passed_over() -> None:
    with PolicyWorkers(lambda index: Probe(index, deaf=1), 2, max_version_lag=1) as workers:
        policy = workers.policy()
        workers.set_weights({"offset": 1.0})
        both = [policy.submit_actions(rows(0), None) for _ in range(2)]
        assert {int(policy.collect_actions(one).extras["worker"][0]) for one in both} == {0, 1}
        workers.set_weights({"offset": 2.0})
        many = [policy.submit_actions(rows(0), None) for _ in range(8)]
        for ticket in many:
            out = policy.collect_actions(ticket)
            assert (out.actions.tolist(), out.extras["worker"].tolist()) == ([2.0], [0])
        assert workers.statistics().policies["default_policy"].behind > 0


def test_no_answer_is_better_than_one_that_is_too_old() -> None:
    with PolicyWorkers(
        lambda index: Probe(index, deaf=0), max_version_lag=0, timeout=0.8
    ) as workers:
        workers.set_weights({"offset": 1.0})
        policy = workers.policy()
        for _ in range(5):  # time is over while it waits to ask again, or for another answer
            with pytest.raises(RequestTimeoutError, match="policy-worker-0 has push 0"):
                policy.compute_actions(rows(1), None)


# --- limits ---------------------------------------------------------------------------------


def test_more_requests_than_allowed_are_refused_at_once() -> None:
    with PolicyWorkers(make_probe, max_batch=3, max_wait=NEVER, max_in_flight=2) as workers:
        policy, other = workers.policy(), workers.policy()
        tickets = [policy.submit_actions(rows(i), None) for i in range(2)]
        with pytest.raises(OverloadedError, match="raise max_in_flight"):
            policy.submit_actions(rows(2), None)
        assert other.compute_actions(rows(2), None).actions.tolist() == [2]
        assert [policy.collect_actions(one).actions.tolist() for one in tickets] == [[0], [1]]
        assert policy.compute_actions(rows(3, 4, 5), None).actions.tolist() == [3, 4, 5]


def test_requests_that_nobody_collects_are_in_flight_only_until_they_have_ended() -> None:
    with PolicyWorkers(make_probe, max_in_flight=1) as workers:
        policy = workers.policy()
        policy.submit_actions(rows(1), None)  # whoever asked has failed meanwhile

        def is_answered() -> bool:
            try:
                return policy.compute_actions(rows(2), None).actions.tolist() == [2]
            except OverloadedError:
                return False

        wait_until(is_answered, "an answer")


def test_a_request_that_takes_too_long_fails_with_the_worker_s_name_and_others_go_on() -> None:
    with PolicyWorkers(make_probe, 2, timeout=1.2) as workers:
        policy = workers.policy()
        slow = policy.submit_actions(hold(1, 2.2), None)
        with pytest.raises(RequestTimeoutError, match=r"policy-worker-\d"):
            policy.collect_actions(slow)
        for i in range(3):
            assert policy.compute_actions(rows(i), None).actions.tolist() == [i]


def test_latency_and_batch_sizes_are_readable(triples: PolicyWorkers) -> None:
    asker = triples.policy()
    before = triples.statistics().policies["default_policy"]
    asker.compute_actions(rows(1, 2, 3), None)
    statistics = triples.statistics()
    after = statistics.policies["default_policy"]
    assert (statistics.workers, statistics.workers_ready, statistics.silent) == (1, 1, [])
    assert after.rows - before.rows == 3
    assert after.batch_sizes[3] - before.batch_sizes.get(3, 0) == 1
    assert after.latency_p50_ms is not None
    assert after.latency_p50_ms > 0
    assert "rows" in after.describe()
    assert repr(triples) == "<PolicyWorkers default_policy: 1 of 1 ready>"


# --- beginning and end ----------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "maker",
    [
        Probe(0),
        "tests.integration.policies_under_test:make_probe",
        lambda: FunctionPolicy(lambda seen: seen[:, 0]),
    ],
    ids=["object", "import path", "closure"],
)
def test_policies_come_as_objects_import_paths_and_closures(maker: Any) -> None:
    with PolicyWorkers(maker) as workers:
        assert workers.policy().compute_actions(rows(1, 2), None).actions.tolist() == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("preload", "threads"), [((), 1), (("torch",), 3)])
def test_torch_has_the_threads_of_its_process_also_where_it_is_preloaded(
    preload: tuple[str, ...], threads: int
) -> None:
    pytest.importorskip("torch")

    def make() -> Any:
        import torch

        found = torch.get_num_threads()
        return FunctionPolicy(lambda seen: np.full(len(seen), found))

    with PolicyWorkers(make, n=2, preload=preload, threads_per_process=threads) as workers:
        assert workers.policy().compute_actions(rows(1), None).actions.tolist() == [threads]


@pytest.mark.slow
def test_a_torch_policy_works() -> None:
    torch = pytest.importorskip("torch")

    def make() -> Any:
        from envbus.runner.adapters.torch_policy import TorchPolicy

        class Actor(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(3, 2)

            def act(self, observations: Any, states: Any, explore: bool) -> Any:
                return self.linear(observations).argmax(-1), states, {}

        torch.manual_seed(0)
        return TorchPolicy(Actor())

    local = make()
    seen = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    with PolicyWorkers(make) as workers:
        policy = workers.policy()
        assert (
            policy.compute_actions(seen, None).actions.tolist()
            == local.compute_actions(seen, None).actions.tolist()
        )
        flipped = {name: -np.asarray(value) for name, value in policy.get_weights().items()}
        policy.set_weights(flipped)
        local.set_weights(flipped)
        assert (
            policy.compute_actions(seen, None).actions.tolist()
            == local.compute_actions(seen, None).actions.tolist()
        )


def test_a_policy_that_cannot_be_made_is_told_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> Any:
        raise LookupError("no such model")

    with pytest.raises(StartError, match="LookupError: no such model"):
        PolicyWorkers(broken, 2)
    with pytest.raises(StartError, match="must have compute_actions, or be a function, not 5"):
        PolicyWorkers(lambda: 5)
    with pytest.raises(
        StartError, match=r"'default_policy' has no initial_state, .*derive it from"
    ):
        PolicyWorkers(SimpleNamespace(compute_actions=make_probe))
    with pytest.raises(StartError, match="wants prev_actions, which a policy worker is not told"):
        PolicyWorkers(Repeating)
    assert caplog.messages == []


class Repeating(Policy):
    wanted_inputs = ("prev_actions",)

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True, prev_actions: Any = None
    ) -> PolicyOutput:
        return PolicyOutput(prev_actions, states)


def test_what_cannot_be_pickled_is_told() -> None:
    function = functools.partial(print, (number for number in ()))
    with pytest.raises(ConfigError, match=r"'default_policy' cannot be pickled.* it refers to"):
        PolicyWorkers(function)
    with pytest.raises(ConfigError, match=r"cannot be pickled.*give a factory instead"):
        PolicyWorkers(FunctionPolicy(function))


@pytest.mark.parametrize(
    "setting",
    [
        {"n": 0},
        {"max_batch": 0},
        {"max_wait": -1.0},
        {"max_in_flight": 0},
        {"timeout": 0.0},
        {"max_version_lag": -1},
        {"share_from": -1},
        {"close_timeout": None},
        {"preload": "torch"},
        {"policies": {}},
        {"policies": {1: make_probe}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_unusable_settings_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PolicyWorkers(**{"policies": make_probe, **setting})


def test_fewer_descriptors_than_workers_take_are_told_before_any_is_started() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with pytest.raises(StartError, match=r"500 processes cannot be started.*`ulimit -n`"):
            PolicyWorkers(make_probe, 500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_closing_twice_does_nothing_and_later_requests_fail_clearly() -> None:
    workers = PolicyWorkers(make_probe)
    policy, elsewhere = workers.policy(), workers.handle().policy()
    assert elsewhere.compute_actions(rows(1), None).actions.tolist() == [1]
    under_way = elsewhere.submit_actions(hold(1, 0.2), None)
    workers.close()
    workers.close()
    assert workers.pids() == []
    with pytest.raises(ClosedError):
        policy.compute_actions(rows(1), None)
    with pytest.raises(ClosedError):
        workers.set_weights({})
    assert elsewhere.collect_actions(under_way).actions.tolist() == [1]  # it was let finish
    with pytest.raises(ClosedError, match="were closed"):
        elsewhere.compute_actions(rows(1), None)
    elsewhere.close()


@pytest.mark.parametrize("what", ["workers", "policy"])
def test_a_thread_that_waits_for_an_answer_is_told_at_once_of_a_close(what: str) -> None:
    workers = PolicyWorkers(make_probe, close_timeout=0.0)
    policy = workers.policy()
    told: list[Exception] = []

    def ask() -> None:
        try:
            policy.compute_actions(hold(1, 600.0), None)
        except ClosedError as exc:
            told.append(exc)

    asker = threading.Thread(target=ask)
    asker.start()
    assert asker.ident is not None
    ident = asker.ident
    waits = "_look"  # of the socket
    wait_until(lambda: sys._current_frames()[ident].f_code.co_name == waits, "the thread to wait")
    (policy if what == "policy" else workers).close()
    asker.join(10.0)
    assert len(told) == 1
    workers.close()


def test_with_closes_a_remote_policy_and_not_its_workers(pair: PolicyWorkers) -> None:
    with pair.handle().policy("double") as policy:
        assert policy.compute_actions(rows(3), None).actions.tolist() == [6]
    with pytest.raises(ClosedError):
        policy.compute_actions(rows(3), None)
    assert pair.policy("double").compute_actions(rows(3), None).actions.tolist() == [6]


def test_workers_that_are_dropped_are_ended() -> None:
    import psutil

    workers = PolicyWorkers(make_probe)
    (pid,) = workers.pids()
    del workers
    wait_until(lambda: not psutil.pid_exists(pid), "the worker's end")


@pytest.mark.slow
def test_a_garbage_collection_may_end_workers_at_any_line() -> None:
    workers = PolicyWorkers(make_probe)

    def collect() -> None:
        with workers._processes._lock:  # as where a policy of workers that nobody has pushes
            workers._finalizer()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(60.0)
    assert not collecting.is_alive()
    assert workers.pids() == []


def test_a_remote_policy_is_pickled_as_where_its_workers_are(pair: PolicyWorkers) -> None:
    policy = pair.policy("probe")
    policy.compute_actions(rows(1), None)
    with pickle.loads(pickle.dumps(policy)) as copy:
        assert copy.compute_actions(rows(2), None).actions.tolist() == [2]
        with pytest.raises(ConfigError, match=r"PolicyWorkers\.set_weights"):
            copy.set_weights({"offset": 1.0})
    assert pickle.loads(pickle.dumps(pair.handle())) == pair.handle()


def test_a_question_that_makes_no_sense_is_refused(pair: PolicyWorkers) -> None:
    probe = pair.policy("probe")
    with pytest.raises(ProtocolError, match="states"):
        probe.compute_actions(rows(1, 2), np.zeros((3, 1)))


def test_a_forked_copy_does_not_wait_for_what_its_owner_has_asked(pair: PolicyWorkers) -> None:
    policy = pair.policy("double")
    ticket = policy.submit_actions(rows(1, 2), None)
    refused_in_a_fork(ClosedError, lambda: policy.collect_actions(ticket))
    assert policy.collect_actions(ticket).actions.tolist() == [2, 4]
    policy.close()
