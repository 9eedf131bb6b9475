"""Policy workers that are killed, stopped or kill themselves; and owners that are gone."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from envbus.bus.errors import ClosedError, PeerLostError, RestartLimitError, TransportError
from envbus.bus.process.process_group import ProcessGroup
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST, LocalLinkEnd
from envbus.runner.inference import policy_processes
from envbus.runner.inference.policy_protocol import OpenLocalLink
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.inference.remote_policy import PolicyHandle
from envbus.runner.inference.worker_discovery import StatusFile, hand_over, handover_path
from tests.integration.group_children import PATIENCE, Driver, is_alive, traced, wait_until
from tests.integration.policies_under_test import Picky, Probe, hold, kill, make_probe, rows

pytestmark = [
    pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here"),
    pytest.mark.timeout(120),
]

OFTEN = RestartPolicy(max_restarts=20, backoff=0.01, max_backoff=0.05)


def test_requests_of_a_worker_that_is_killed_go_to_another_and_it_is_replaced() -> None:
    with PolicyWorkers(make_probe, 2, restart=OFTEN) as workers:
        policy = workers.policy()
        workers.set_weights({"offset": 1.0}, 7)
        tickets = [policy.submit_actions(hold(i, 0.3), None) for i in range(6)]
        victim = workers.pids()[0]
        os.kill(victim, signal.SIGKILL)
        for i, ticket in enumerate(tickets):
            out = policy.collect_actions(ticket)
            assert out.actions.tolist() == [i + 1]
            assert out.versions is not None
            assert out.versions.tolist() == [7]
        wait_until(lambda: workers.statistics().workers_ready == 2, "a replacement")
        assert victim not in workers.pids()
        assert workers.statistics().restarts == 1


def test_the_replacement_is_given_the_weights_and_their_version() -> None:
    with PolicyWorkers(make_probe, restart=OFTEN) as workers:
        policy = workers.policy()
        workers.set_weights({"offset": 1.0})
        workers.set_weights({"offset": 2.0}, 12)
        (victim,) = workers.pids()
        os.kill(victim, signal.SIGKILL)
        workers.set_weights({"offset": 3.0})  # whether it is down, starting or up
        out = policy.compute_actions(rows(0), None)
        assert out.versions is not None
        assert (out.actions.tolist(), out.versions.tolist()) == ([3.0], [13])
        assert workers.pids() != [victim]


def test_the_replacement_goes_on_with_the_weights_that_were_taken_over_last() -> None:
    with PolicyWorkers(Picky(), restart=OFTEN) as workers:
        policy = workers.policy()
        workers.set_weights({"offset": 1.0}, 7)
        assert policy.get_versioned_weights() == ({"offset": 1.0}, 7)
        for _ in range(3):
            workers.set_weights({"offset": -1.0})
            (victim,) = workers.pids()
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: workers.pids() not in ([], [victim]), "a replacement")  # noqa: B023
            out = policy.compute_actions(rows(0), None)
            assert out.versions is not None
            assert (out.actions.tolist(), out.versions.tolist()) == ([1.0], [7])


def test_a_worker_is_replaced_while_its_owner_does_something_else() -> None:
    with PolicyWorkers(make_probe, restart=OFTEN) as workers:
        (victim,) = workers.pids()
        os.kill(victim, signal.SIGKILL)
        # Nothing is asked of `workers` but this.
        wait_until(lambda: workers.pids() not in ([], [victim]), "a replacement")


def test_a_worker_is_started_once_more_if_there_was_no_memory_for_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise MemoryError
        return really_start(*args, **kwargs)

    failed: list[bool] = []
    really_start = ProcessGroup.start
    with PolicyWorkers(make_probe, restart=OFTEN) as workers:
        (victim,) = workers.pids()
        monkeypatch.setattr(ProcessGroup, "start", start)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: workers.pids() not in ([], [victim]), "a replacement")
    assert failed


def test_a_worker_that_was_replaced_while_the_disk_was_full_is_found_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_status(_folder: Path, status: StatusFile) -> None:
        refused.extend((worker.incarnation, worker.state) for worker in status.workers)
        raise OSError(errno.ENOSPC, "No space left on device")

    refused: list[tuple[int, str]] = []
    with PolicyWorkers(make_probe, restart=OFTEN, timeout=20.0) as workers:
        policy = workers.policy()
        (victim,) = workers.pids()
        with monkeypatch.context() as full:
            full.setattr(policy_processes, "write_status", write_status)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: (1, "up") in refused, "a replacement")
            assert "nobody new can find the policy workers: [Errno 28]" in caplog.text
        assert policy.compute_actions(rows(3), None).actions.tolist() == [3]


class Failing(logging.Handler):
    """Fails once, when this is said of a worker: an error in who looks after the workers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.failed = threading.Event()
        self._text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage() and not self.failed.is_set():
            self.failed.set()
            raise ZeroDivisionError("a defect")


def test_who_has_failed_to_look_after_the_workers_pauses_and_hinders_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("envbus.runner.inference.policy_processes._FAILED_PAUSE", 200.0)
    caplog.set_level(logging.INFO, "envbus.runner.inference.policy_workers")
    logger, handler = logging.getLogger("envbus.runner.inference.policy_workers"), Failing("again")
    with PolicyWorkers(make_probe, 2, restart=OFTEN) as workers:
        logger.addHandler(handler)
        try:
            os.kill(workers.pids()[0], signal.SIGKILL)
            assert handler.failed.wait(60)
        finally:
            logger.removeHandler(handler)
        wait_until(lambda: "looking after policy workers failed" in caplog.text, "the pause")
        workers.set_weights({"offset": 3.0})  # both wait for the lock
        assert workers.policy().compute_actions(rows(0), None).actions.tolist() == [3.0]
    # And closing waits for no pause.


def test_a_worker_is_replaced_whose_end_was_not_taken_note_of_at_first() -> None:
    logger, handler = logging.getLogger("envbus.runner.inference.policy_workers"), Failing("ended:")
    with PolicyWorkers(make_probe, restart=OFTEN) as workers:
        logger.addHandler(handler)
        try:
            (victim,) = workers.pids()
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: workers.pids() not in ([], [victim]), "a replacement")
        finally:
            logger.removeHandler(handler)
    assert handler.failed.is_set()


def test_a_request_that_cannot_be_sent_again_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(end: LocalLinkEnd, packet: bytes) -> bool:
        if failures and b"ChooseActions" in packet:
            raise failures.pop()
        return really_write(end, packet)

    failures: list[TransportError] = []
    really_write = LocalLinkEnd.write
    monkeypatch.setattr(LocalLinkEnd, "write", write)
    with PolicyWorkers(make_probe, restart=OFTEN) as workers:
        policy = workers.policy()
        tickets = [policy.submit_actions(hold(i, 0.2), None) for i in range(3)]
        failures.append(TransportError("no descriptor"))
        os.kill(workers.pids()[0], signal.SIGKILL)
        with pytest.raises(TransportError, match="no descriptor"):
            policy.collect_actions(tickets[0])
        found = [policy.collect_actions(ticket).actions.tolist() for ticket in tickets[1:]]
        assert found == [[1], [2]]


def test_requests_survive_the_end_of_all_workers() -> None:
    with PolicyWorkers(make_probe, 2, restart=OFTEN) as workers:
        policy, other = workers.policy(), workers.handle().policy()
        tickets = [
            (asker, asker.submit_actions(hold(i, 0.2), None))
            for i in range(3)
            for asker in (policy, other)
        ]
        for pid in workers.pids():
            os.kill(pid, signal.SIGKILL)
        found = [asker.collect_actions(ticket).actions.tolist() for asker, ticket in tickets]
        assert found == [[0], [0], [1], [1], [2], [2]]
        other.close()


def test_without_restart_the_last_worker_s_end_is_the_error() -> None:
    with PolicyWorkers(make_probe, 2, restart=False) as workers:
        policy = workers.policy()
        first, second = workers.pids()
        os.kill(first, signal.SIGKILL)
        assert policy.compute_actions(rows(1), None).actions.tolist() == [1]
        ticket = policy.submit_actions(hold(1, 60.0), None)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RestartLimitError, match="no policy worker is left") as caught:
            policy.collect_actions(ticket)
        for index, pid in enumerate((first, second)):
            assert f"policy-worker-{index} (pid {pid}, incarnation 0) ended: signal SIGKILL" in str(
                caught.value
            )
        with pytest.raises(RestartLimitError, match="signal SIGKILL"):
            policy.compute_actions(rows(1), None)


class DiesWhenMadeAgain(Probe):
    def __init__(self, mark: str) -> None:
        super().__init__()
        if os.path.exists(mark):
            raise OSError("the model file is gone")
        Path(mark).touch()


def test_a_worker_that_does_not_come_up_again_is_given_up_with_the_reason(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    often = RestartPolicy(max_restarts=2, backoff=0.01)
    with PolicyWorkers(lambda: DiesWhenMadeAgain(mark), restart=often) as workers:
        policy = workers.policy()
        ticket = policy.submit_actions(hold(1, 60.0), None)
        os.kill(workers.pids()[0], signal.SIGKILL)
        with pytest.raises(RestartLimitError, match="failed again after 2 restarts") as caught:
            policy.collect_actions(ticket)
        assert "OSError: the model file is gone" in str(caught.value)


def test_an_observation_that_kills_whoever_computes_it_fails_with_the_worker_s_name() -> None:
    with PolicyWorkers(make_probe, 2, restart=OFTEN) as workers:
        policy, other = workers.policy(), workers.policy()
        deadly = policy.submit_actions(kill(0), None)
        with pytest.raises(PeerLostError, match=r"policy-worker-\d .*signal SIGKILL"):
            policy.collect_actions(deadly)
        assert other.compute_actions(rows(1), None).actions.tolist() == [1]
        assert workers.statistics().restarts <= 5


def test_a_stopped_worker_holds_up_its_own_requests_only() -> None:
    with PolicyWorkers(make_probe, 2, timeout=2.0) as workers:
        policy = workers.policy()
        policy.compute_actions(rows(0), None)
        stopped = workers.pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            late = []
            for i in range(10):
                try:
                    assert policy.compute_actions(rows(i), None).actions.tolist() == [i]
                except TimeoutError as exc:
                    late.append(str(exc))
            assert len(late) <= 1
            assert all("policy-worker-0" in text for text in late)
            workers.set_weights({"offset": 1.0})  # does not wait for it
        finally:
            os.kill(stopped, signal.SIGCONT)


def test_requests_for_which_there_is_no_room_on_their_way_go_once_there_is() -> None:
    with PolicyWorkers(make_probe, max_in_flight=200) as workers:
        policy = workers.policy()
        tickets = [policy.submit_actions(hold(0, 1.0), None)]
        # What the system takes on its way, and then more than the 64 MiB that may wait for it.
        for number, size in enumerate([2000] * 100 + [2**22] * 8, 1):
            observations = np.zeros((1, size), np.float32)
            observations[0, 0] = number
            tickets.append(policy.submit_actions(observations, None))
        found = [policy.collect_actions(ticket).actions.tolist() for ticket in tickets]
        assert found == [[number] for number in range(109)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["computes for ever", "is stopped"])
def test_a_worker_that_hangs_is_killed_and_replaced_and_its_request_goes_to_another(
    how: str, tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    with PolicyWorkers(lambda: HangsOnce(mark), restart=OFTEN, hang_timeout=1.2) as workers:
        policy = workers.policy()
        (victim,) = workers.pids()
        if how == "is stopped":
            Path(mark).touch()  # that will do
            os.kill(victim, signal.SIGSTOP)
        assert policy.compute_actions(rows(4), None).actions.tolist() == [4]
        assert workers.pids() != [victim]
        assert workers.statistics().restarts == 1
        assert not is_alive(victim)


class HangsOnce(Probe):
    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        if not os.path.exists(self._mark):
            Path(self._mark).touch()
            observations = hold(0, 600.0)
        return super().compute_actions(observations, states, explore=explore)


def test_a_worker_that_hangs_again_and_again_is_given_up_with_the_reason() -> None:
    limited = RestartPolicy(max_restarts=1, backoff=0.01)
    with PolicyWorkers(make_probe, restart=limited, hang_timeout=0.5) as workers:
        policy = workers.policy()
        with pytest.raises(RestartLimitError, match=r"no sign of life for 0\.5 s"):
            policy.compute_actions(hold(1, 60.0), None)


# --- the owner ------------------------------------------------------------------------------

OWNER = """
import json, sys, time
from policies_under_test import make_probe, hold, rows
from envbus.runner.inference.policy_workers import PolicyWorkers

workers = PolicyWorkers(make_probe, 2)
policy = workers.policy()
policy.compute_actions(rows(1), None)
handle = workers.handle()
print(json.dumps([workers.pids(), handle.directory]), flush=True)
{then}
"""


def owner(tmp_path: Path, then: str) -> Driver:
    return Driver(OWNER.format(then=then), tmp_path)


def asker_of(directory: str) -> Any:
    return PolicyHandle(
        directory=directory,
        policy_ids=("default_policy",),
        timeout=20.0,
        max_in_flight=8,
        max_version_lag=None,
    ).policy()


@pytest.mark.slow
def test_a_killed_owner_leaves_nothing_and_its_askers_are_told(tmp_path: Path) -> None:
    with owner(tmp_path, "time.sleep(600)") as driver:
        pids, directory = driver.read()
        asker = asker_of(directory)
        assert asker.compute_actions(rows(4), None).actions.tolist() == [4]
        ticket = asker.submit_actions(hold(1, 60.0), None)
        driver.kill()
        with pytest.raises(ClosedError, match="the process that had them ended"):
            asker.collect_actions(ticket)
        wait_until(lambda: not any(map(is_alive, pids)), "the workers' end")
        wait_until(lambda: not os.path.exists(directory), "the folder's removal")
        wait_until(lambda: not traced(driver.trace), "the end of all")
        asker.close()


@pytest.mark.slow
def test_requests_flow_while_the_owner_does_not_run(tmp_path: Path) -> None:
    with owner(tmp_path, "time.sleep(600)") as driver:
        _, directory = driver.read()
        program = psutil.Process(driver.process.pid)
        program.suspend()
        try:
            asker = asker_of(directory)
            for i in range(5):
                assert asker.compute_actions(rows(i), None).actions.tolist() == [i]
            asker.close()
        finally:
            program.resume()


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    ["", "workers.close(); workers.close()"],
    ids=["end", "closed twice"],
)
def test_an_owner_that_ends_leaves_nothing(then: str, tmp_path: Path) -> None:
    with owner(tmp_path, then) as driver:
        pids, directory = driver.read()
        _, _, err = driver.finish()
        assert "envbus" not in err.replace("/envbus", "")
        wait_until(lambda: not any(map(is_alive, pids)), "the workers' end")
        wait_until(lambda: not os.path.exists(directory), "the folder's removal")
        wait_until(lambda: not traced(driver.trace), "the end of all")


def test_ctrl_c_while_actions_are_awaited(tmp_path: Path) -> None:
    then = "print(1, flush=True)\npolicy.compute_actions(hold(1, 60.0), None)"
    with owner(tmp_path, then) as driver:
        pids, directory = driver.read()
        assert driver.read() == 1
        os.kill(driver.process.pid, signal.SIGINT)
        _, _, err = driver.finish()
        assert err.rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: not any(map(is_alive, pids)), "the workers' end")
        wait_until(lambda: not os.path.exists(directory), "the folder's removal")


def test_a_worker_outlives_descriptors_at_its_door_that_are_no_local_link() -> None:
    with PolicyWorkers(make_probe) as workers:
        policy = workers.policy()
        assert policy.compute_actions(rows(1), None).actions.tolist() == [1]
        pids = workers.pids()
        folder = Path(workers._processes.directory)
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, other, Path(__file__).open() as file:
            local_link = OpenLocalLink(identity=b"stranger", name="stranger", capacity=1)
            assert hand_over(
                handover_path(folder, "policy-worker-0", 0),
                local_link,
                [one.fileno(), file.fileno()],
            )
            one.close()
            other.settimeout(PATIENCE)
            assert other.recv(1) == b""  # it was taken, and let go of
        assert policy.compute_actions(rows(2), None).actions.tolist() == [2]
        assert workers.pids() == pids
