"""`PolicyWorkers`: processes that choose actions for runners of this host.

Leaves out the processes' lives (`policy_processes.py`), what runs in them (`policy_worker.py`) and
how they are asked (`remote_policy.py`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from envbus.bus.errors import ClosedError, ConfigError, RequestError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import uninterrupted_call, without_interrupts
from envbus.bus.process.pickling import pickled
from envbus.bus.process.threads import ThreadsPerProcess, check_threads
from envbus.bus.settings import check_number, positive_int
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.cores import usable_cores
from envbus.runner.batches.episode import DEFAULT_POLICY_ID
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.inference.policy_batching import BatchingConfig
from envbus.runner.inference.policy_connections import PolicyConnections
from envbus.runner.inference.policy_processes import PolicyProcesses, WorkerSpec
from envbus.runner.inference.policy_protocol import (
    COUNTED,
    GetPolicyStatistics,
    PolicyCounts,
    PolicySums,
    PolicyWorkerCounts,
)
from envbus.runner.inference.remote_policy import SHARE_FROM, PolicyHandle, RemotePolicy
from envbus.runner.monitoring.figures import PartFigures
from envbus.runner.monitoring.registry import show, unshow
from envbus.runner.policies.policy import Policy, Weights
from envbus.runner.workers.config import check_kind, choose_start_method, list_of

__all__ = [
    "MOST_WORKERS",
    "PolicyMaker",
    "PolicyStatistics",
    "PolicyWorkers",
    "PolicyWorkersStatistics",
]

#: What makes a policy, in the worker: a policy (which is copied), `"module:factory"`, or a factory,
#: called with the worker's number if it takes an argument. It returns a policy, or a function
#: `observations -> actions`.
PolicyMaker: TypeAlias = "Policy | str | Callable[..., Any]"
#: Seconds for workers to say their counts; one that computes for longer is left out.
_COUNTS_TIMEOUT: Final = 2.0
#: The same for a window, which is drawn each second.
_GLANCE: Final = 0.3
#: More are a mistake; their preparation alone would take minutes.
MOST_WORKERS: Final = 1024


class PolicyStatistics(PolicySums, frozen=True, kw_only=True):
    """Counts of one policy, over the workers' present lives."""

    #: Version by worker.
    versions: dict[str, int]
    #: Calls of the policy; `rows / batches` is how much was gathered.
    batches: int
    #: In the worker, from a request's arrival to its answer; None: there was none.
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    #: Of one call of the policy.
    compute_p50_ms: float | None
    compute_p99_ms: float | None

    def describe(self) -> str:
        """Return them for people, with a bar for each batch size (in powers of two)."""
        if not self.batches:
            return "no batches"
        lines = [
            f"{self.requests} requests, {self.rows} rows in {self.batches} batches; latency "
            f"p50 {self.latency_p50_ms:.3g} ms, p99 {self.latency_p99_ms:.3g} ms; compute "
            f"p50 {self.compute_p50_ms:.3g} ms, p99 {self.compute_p99_ms:.3g} ms"
        ]
        buckets: Counter[int] = Counter()
        for size, count in self.batch_sizes.items():
            buckets[1 << (size - 1).bit_length()] += count
        most = max(buckets.values())
        for bound, count in sorted(buckets.items()):
            bar = "#" * max(1, round(30 * count / most))
            lines.append(f"  <= {bound:6} rows  {count:8}  {bar}")
        return "\n".join(lines)


class PolicyWorkersStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of all workers."""

    workers: int
    workers_ready: int
    #: Worker processes started again after they ended.
    restarts: int
    #: Rows that wait in all workers now.
    rows_waiting: int
    policies: dict[str, PolicyStatistics]
    #: Workers that did not answer when they were asked for their counts.
    silent: list[str]


class PolicyWorkers(StaysHere):
    """`n` processes, each with a copy of every policy, for any number of runners.

    A runner takes `workers.policy()` as any other policy; one in another process of this host takes
    `workers.handle().policy()`, or the `RemotePolicy` itself, pickled. Requests go to the
    least-loaded worker, and to another one if it ends meanwhile. Who ends is replaced.

    May be used by several threads; each `RemotePolicy` by one.

    Args:
        policies: One, or several by id: see `PolicyMaker`.
        n: Processes.
        max_batch: Most rows in one call of a policy.
        max_wait: Seconds that a request waits for others to go with it. 0: who comes while a batch
            is computed is in the next, and nobody waits for nothing.
        max_in_flight: Requests that one `RemotePolicy` may have under way; more are refused with
            `OverloadedError` at once.
        max_rows_waiting: Rows that may wait in one worker; requests beyond are refused alike.
        max_version_lag: By how many pushes of weights an action may be older than the latest that
            its asker knows of; a worker that is further behind is passed over. None: any number.
        share_from: Bytes of a request's observations from which workers read them in the pool's
            shared memory, where they can, instead of in the request; 0: always.
        timeout: Seconds that a request may take.
        start_timeout: Seconds for all policies to be built, at the beginning and by each worker
            that is started again, or it is killed and replaced, too.
        hang_timeout: Seconds that a worker may take for one call of a policy, or be stopped, before
            it is killed and replaced; noticed within half as much more. None: for ever.
        close_timeout: Seconds for workers to leave at the end before they are killed.
        restart: Start workers again that ended; a `RestartPolicy` says how often and how soon.
        context: None, "fork", "forkserver" or "spawn", as in `multiprocessing`.
        preload: Modules that are imported once, before workers are forked, e.g. `("torch",)`.
        threads_per_process: Threads that NumPy, PyTorch and their like start in each worker;
            "auto": usable cores over workers, at least one; None: as they choose. Where
            OMP_NUM_THREADS or another such variable is set, that holds.

    Raises:
        ConfigError: A setting is unusable, or a policy cannot be pickled.
        StartError: A policy could not be built; with the traceback.
    """

    def __init__(
        self,
        policies: PolicyMaker | Mapping[str, PolicyMaker],
        n: int = 1,
        *,
        max_batch: int = 256,
        max_wait: float = 0.0,
        max_in_flight: int = 64,
        max_rows_waiting: int = 65536,
        max_version_lag: int | None = None,
        share_from: int = SHARE_FROM,
        timeout: float = 60.0,
        start_timeout: float = 300.0,
        hang_timeout: float | None = 120.0,
        close_timeout: float = 10.0,
        restart: bool | RestartPolicy = True,
        context: str | None = None,
        preload: Sequence[str] = (),
        threads_per_process: ThreadsPerProcess = "auto",
    ) -> None:
        n, max_in_flight = (
            positive_int("n", n, most=MOST_WORKERS),
            positive_int("max_in_flight", max_in_flight),
        )
        for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
            check_number(name, seconds, over=0.0, finite=True)
        check_number("hang_timeout", hang_timeout, over=0.0, finite=True, optional=True)
        policy = RestartPolicy.chosen(restart)
        check_number("close_timeout", close_timeout, least=0.0)
        preload = list_of("preload", preload, '["torch"]')
        check_threads(threads_per_process)
        check_number("max_version_lag", max_version_lag, whole=True, least=0, optional=True)
        check_number("share_from", share_from, whole=True, least=0)
        by_id = policies if isinstance(policies, Mapping) else {DEFAULT_POLICY_ID: policies}
        if not by_id:
            raise ConfigError("no policy: name at least one")
        for name, maker in by_id.items():
            check_kind("the id of a policy", name, str, example='"default_policy"')
            if (
                not callable(maker)
                and not isinstance(maker, str)
                and not hasattr(maker, "compute_actions")
            ):
                raise ConfigError(
                    f"policy {name!r} is given as a policy, a function that makes one, or "
                    f"'module:function'; not as {maker!r:.80}"
                )
        self._close_timeout = close_timeout
        self._processes = PolicyProcesses(
            n,
            WorkerSpec(
                factories={name: _pickled(name, maker) for name, maker in by_id.items()},
                batching=BatchingConfig(
                    max_batch=max_batch, max_wait=max_wait, max_rows_waiting=max_rows_waiting
                ),
                method=choose_start_method(context),
                # One who spins per core, and the asker is one.
                spinning=usable_cores() - 1,
                start_timeout=start_timeout,
                hang_timeout=hang_timeout,
            ),
            policy,
            preload=preload,
            threads_per_process=threads_per_process,
        )
        self._num_workers = n
        self._handle = PolicyHandle(
            directory=str(self._processes.directory),
            policy_ids=tuple(by_id),
            timeout=timeout,
            max_in_flight=max_in_flight,
            max_version_lag=max_version_lag,
            share_from=share_from,
        )
        #: Those of this process, which are told what is pushed. No `WeakSet`: one that is listed
        #: while another thread adds to it raises.
        self._policies: set[weakref.ref[RemotePolicy]] = set()
        # The thread that watches the processes must not keep this object alive, nor outlive it.
        self._finalizer = weakref.finalize(self, without_interrupts()(self._processes.close), 0.0)
        try:
            self._processes.start()
        except BaseException:
            self._finalizer()
            raise
        show(self, type(self).__name__)

    def policy(self, policy_id: str | None = None) -> RemotePolicy:
        """Return one of the policies; None: the only one. It is used by one thread.

        Raises:
            ConfigError: There is no such policy.
        """
        name = self._handle.checked_id(policy_id)
        policy = RemotePolicy(self._handle, name, self._processes.push)
        policy.note_push(*self._processes.latest(name))
        self._policies.add(weakref.ref(policy, self._policies.discard))
        return policy

    def handle(self) -> PolicyHandle:
        """Return where the workers are, for runners in other processes."""
        return self._handle

    @uninterrupted_call
    def set_weights(
        self, weights: Weights, version: int | None = None, *, policy_id: str | None = None
    ) -> int:
        """Send weights to all workers, which take them over between two batches.

        Returns at once; inference does not stop. Requests that are made in this process after that
        are answered with these weights, unless a worker computes for so long that more than some
        pushes pass meanwhile; `max_version_lag` makes sure.

        Args:
            weights: As the policy's `set_weights` takes them. They are copied.
            version: None: the one after the present.
            policy_id: None: the only policy.

        Returns:
            The version.

        Raises:
            ConfigError: They are no weights, or there is no such policy. Nothing was sent.
        """
        check_kind("weights", weights, Mapping, example="policy.get_weights()")
        name = self._handle.checked_id(policy_id)
        push, version = self._processes.push(name, weights, version)
        for policy in self._living():
            if policy.policy_id == name:
                policy.note_push(push, version)
        return version

    @uninterrupted_call
    def statistics(self) -> PolicyWorkersStatistics:
        """Return counts of the workers' present lives, among them latency and sizes of batches."""
        counts, silent = self._counts(_COUNTS_TIMEOUT)
        policies: dict[str, dict[str, PolicyCounts]] = {}
        for worker, of_worker in counts.items():
            for name, of_policy in of_worker.policies.items():
                policies.setdefault(name, {})[worker] = of_policy
        return PolicyWorkersStatistics(
            workers=self._num_workers,
            workers_ready=len(self._processes.up()),
            restarts=self._processes.restarts(),
            rows_waiting=sum(of_worker.rows_waiting for of_worker in counts.values()),
            policies={name: summed(by_worker) for name, by_worker in policies.items()},
            silent=silent,
        )

    def figures(self, name: str) -> PartFigures:
        """Return what a window shows; asks the workers, for a moment."""
        processes = self._processes.figures()
        of_workers, _ = self._counts(_GLANCE)
        counts: dict[str, float] = {"restarts": self._processes.restarts()}
        levels: dict[str, float] = {
            "workers": len(processes),
            "workers_ready": sum(process.state == "ready" for process in processes),
            "rows_waiting": sum(one.rows_waiting for one in of_workers.values()),
        }
        latencies: dict[str, dict[int, int]] = {}
        for policy_id in self._handle.policy_ids:
            by_worker = [one.policies[policy_id] for one in of_workers.values()]
            for key in COUNTED:
                counts[f"{key}.{policy_id}"] = sum(getattr(one, key) for one in by_worker)
            levels[f"version.{policy_id}"] = self._processes.latest(policy_id)[1]
            total = LatencyHistogram()
            for one in by_worker:
                total.add_counts(one.latency)
            latencies[policy_id] = total.counts()
        return PartFigures(
            name=name,
            kind=type(self).__name__,
            counts=counts,
            levels=levels,
            latencies=latencies,
            processes=processes,
            faults=list(self._processes.ends),
            restarts=self._processes.is_supervised,
        )

    def pids(self) -> list[int]:
        """Return the process ids of the workers that run."""
        return self._processes.pids()

    @uninterrupted_call
    def close(self) -> None:
        """End all workers; those that do not leave within `close_timeout` are killed. Idempotent.

        What they have not answered by then fails with `ClosedError`.
        """
        self._finalizer.detach()
        unshow(self)
        self._processes.close(self._close_timeout)
        # Last: a thread that waits for an answer is told of its worker's end, and not of this.
        for policy in self._living():
            policy.close()

    def __enter__(self) -> PolicyWorkers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ids = ", ".join(self._handle.policy_ids)
        return f"<PolicyWorkers {ids}: {len(self._processes.up())} of {self._num_workers} ready>"

    def _living(self) -> list[RemotePolicy]:
        """Return the policies of this process that somebody has; other threads may make some."""
        return [policy for one in list(self._policies) if (policy := one()) is not None]

    def _counts(self, timeout: float) -> tuple[dict[str, PolicyWorkerCounts], list[str]]:
        """Ask all workers; return their counts by name, and who said nothing."""
        connections = PolicyConnections(Path(self._handle.directory), self._num_workers + 1)
        counts: dict[str, PolicyWorkerCounts] = {}
        silent: list[str] = []
        try:
            askings = {
                name: connections.ask(name, GetPolicyStatistics(), timeout)
                for name in self._processes.up()
            }
            for name, asking in askings.items():
                try:
                    counts[name] = connections.wait_for(asking, PolicyWorkerCounts)
                except (RequestError, ClosedError):  # closed: the folder is gone for good
                    silent.append(name)
        finally:
            connections.close()
        return counts, silent


def _pickled(policy_id: str, maker: PolicyMaker) -> bytes:
    try:
        return pickled(maker)
    except Exception as exc:  # any object's own code may run here
        advice = (
            "give a factory instead, which makes it in the worker"
            if hasattr(maker, "compute_actions")
            else "a factory takes along what it refers to: spaces will do, a pool will not"
        )
        raise ConfigError(
            f"policy {policy_id!r} cannot be pickled: {type(exc).__name__}: {exc}; {advice}"
        ) from exc


def summed(counts: Mapping[str, PolicyCounts]) -> PolicyStatistics:
    """Return the counts of one policy in all workers, which are given by name."""
    sizes: Counter[int] = Counter()
    latency, compute = LatencyHistogram(), LatencyHistogram()
    for one in counts.values():
        sizes.update(one.batch_sizes)
        latency.add_counts(one.latency)
        compute.add_counts(one.compute)
    return PolicyStatistics(
        versions={name: one.version for name, one in counts.items()},
        batches=sum(sizes.values()),
        batch_sizes=dict(sorted(sizes.items())),
        latency_p50_ms=_ms(latency.quantile(0.5)),
        latency_p99_ms=_ms(latency.quantile(0.99)),
        compute_p50_ms=_ms(compute.quantile(0.5)),
        compute_p99_ms=_ms(compute.quantile(0.99)),
        **{name: sum(getattr(one, name) for one in counts.values()) for name in COUNTED},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
