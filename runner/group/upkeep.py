"""What is done with the runners of a group besides sampling.

Start and stop, weights, functions, health, state. Leaves out samples (`../env_runner_group.py`).
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from gymnasium import Space
from gymnasium.error import ClosedEnvironmentError

from envbus.bus.errors import ConfigError, EnvbusError, RestartLimitError
from envbus.bus.interrupts import uninterrupted_call
from envbus.runner.actor import ActorState
from envbus.runner.config import FleetConfig
from envbus.runner.crew import CrewStatistics
from envbus.runner.env_runner import EnvRunner
from envbus.runner.faults import FaultCause
from envbus.runner.group.config import GroupConfig, RunnerStatus
from envbus.runner.group.protocol import Parts
from envbus.runner.group.rounds import Rounds, Ticket
from envbus.runner.group.runner_process import RunnerCrew, RunnerProcess
from envbus.runner.metrics import SampleMetrics
from envbus.runner.policies import Weights
from envbus.runner.policy_map import check_state, check_weights, checked_ids
from envbus.runner.sampling import RunnerConfig
from envbus.runner.trajectory import AgentID

__all__ = ["Upkeep"]

S = TypeVar("S", bound="Upkeep")
#: Longest single wait, in seconds; without a time-out the group waits again.
_LONGEST_WAIT = 3600.0
#: Seconds without any runner until the log says who is waited for, and at most until the next time.
_PROGRESS_AFTER, _MOST_PAUSE = 2.0, 60.0

logger = logging.getLogger("envbus.runner.group")


class Upkeep:
    """The runners of one group.

    Args:
        parts: What each is made of.
        config: Theirs.
        settings: How their processes are started and watched.
        elsewhere: Policies whose weights are not the runners'.

    Raises:
        EncodeError, StartError, RemoteError: As `EnvRunnerGroup`. No process is left.
    """

    def __init__(
        self,
        parts: Sequence[Parts],
        config: RunnerConfig,
        settings: GroupConfig,
        elsewhere: frozenset[str],
    ) -> None:
        self.config = config
        self.settings = settings
        self.closed = False
        self.metrics = SampleMetrics()
        self._elsewhere = elsewhere
        #: Envs that their runners have given up, by runner.
        self._lost_envs: dict[int, set[int]] = {}
        self._crew = RunnerCrew(
            parts,
            FleetConfig(
                context=settings.context,
                timeouts=settings.timeouts,
                restart=settings.restart,
                memory_limit_mb=settings.memory_limit_mb,
                preload=settings.preload,
                threads_per_process=settings.threads_per_process,
            ),
        )
        # Not `__del__`: see `BusVectorEnv`.
        self._finalizer = weakref.finalize(self, self._crew.abandon)
        try:
            self._crew.start()
            self._rounds = Rounds(
                self._crew,
                config.connectors(),
                self._crew.first_versions(),
                settings.sample_timeout,
            )
        except BaseException:
            self.stop(terminate=True)
            raise

    # --- weights and functions ---------------------------------------------------------------

    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id: those that were set last, else a runner's.

        Raises:
            ConfigError: There is no such policy.
            RestartLimitError: No runner is left to be asked.
            TimeoutError: None of them answers within `timeouts.call`.
        """
        self._assert_open()
        known = self._rounds.versions
        names = list(known) if policy_ids is None else list(policy_ids)
        if unknown := sorted(set(names) - known.keys()):
            raise ConfigError(f"there is no policy {unknown[0]!r}; there are {list(known)}")
        found = {name: self._rounds.weights.get(name) for name in names}
        missing = [name for name, weights in found.items() if weights is None]
        if missing:
            self._wait_for_someone(time.monotonic() + _LONGEST_WAIT)
            self._raise_if_none_left()
            first = self._rounds.ready()[0].index
            answers = self.foreach(EnvRunner.get_weights, missing, runners=[first])
            if first not in answers:
                raise TimeoutError(f"runner {first} did not tell its weights")
            found |= answers[first]
        # Copies, and writable ones, also of what has come in a message.
        return {name: copy.deepcopy(found[name] or {}) for name in names}

    @uninterrupted_call
    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Have all runners use weights, by policy id, from their next fragments on.

        Waits for nobody: a runner that samples goes on, and takes them before it samples again.
        Each row says by `policy_version` which weights chose its action.

        Args:
            weights: Copied.
            version: None: per policy, the one after the present.

        Raises:
            ConfigError: There is no such policy, or it is in policy workers. Nothing was sent.
        """
        self._assert_open()
        check_weights(weights, version)
        if elsewhere := sorted(weights.keys() & self._elsewhere):
            raise ConfigError(
                f"weights of {elsewhere[0]!r} are in policy workers: PolicyWorkers.set_weights "
                "changes them for all runners"
            )
        self._rounds.take_news(0.0)
        self._rounds.set_weights(weights, None if version is None else int(version))

    @uninterrupted_call
    def foreach(
        self,
        function: Callable[..., Any],
        *args: Any,
        runners: Sequence[int] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Call `function(runner, *args, **kwargs)` in each runner's process.

        A runner that samples does it afterwards. The function goes to the runner by cloudpickle,
        over the pipe that it has inherited; so does what it returns, where MessagePack has no
        form for it. Arrays in the results are read-only.

        Args:
            function: Any function; `runner` is the `EnvRunner`.
            *args: Its further arguments.
            runners: Which; None: all that run.
            timeout: Seconds; None: `timeouts.call`.
            **kwargs: Its keyword arguments.

        Returns:
            Results by index of the runner, without those that do not run, died, or were late.

        Raises:
            ValueError: There is no such runner.
            RemoteError: It raised in a runner; of several the one with the lowest index is told.
            EncodeError: Something cannot be pickled.
        """
        self._assert_open()
        chosen = self._choose(runners)
        limit = self.settings.timeouts.call if timeout is None else timeout
        ticket = self._rounds.apply(chosen, function, args, kwargs, limit)
        self._wait_for(ticket, limit)
        if ticket.errors:
            raise ticket.errors[min(ticket.errors)]
        return dict(sorted(ticket.values.items()))

    # --- about it ----------------------------------------------------------------------------

    @property
    def num_runners(self) -> int:
        """Runners, also those that were given up."""
        return len(self._crew.actors)

    @property
    def num_envs(self) -> int:
        """Envs of all runners."""
        return self._crew.num_envs

    @property
    def policy_versions(self) -> dict[str, int]:
        """Which weights each policy has, or will have before its next fragment."""
        return dict(self._rounds.versions)

    def runner_pids(self) -> list[int]:
        """Return the process ids of the runners that have a process."""
        return [actor.child.pid for actor in self._crew.actors if actor.child is not None]

    def get_spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the envs have them."""
        return self._crew.spaces()

    def statistics(self) -> CrewStatistics:
        """Return counts of processes since the start."""
        return self._crew.statistics()

    @uninterrupted_call
    def assert_healthy(self) -> None:
        """Raise if it cannot sample with all of its envs; runners that restart will be back.

        Raises:
            ClosedEnvironmentError: It was stopped.
            RestartLimitError: Runners, or envs of runners, were given up; they are named.
        """
        self._assert_open()
        self._rounds.take_news(0.0)
        lost = [actor.index for actor in self._rounds.lost()]
        if lost:
            raise RestartLimitError(
                f"runners {lost} of {self.num_runners} failed too often and were given up; the "
                "log and `runner_faults` of samples say why"
            )
        envs = sorted(set().union(*self._lost_envs.values()))
        if envs:
            raise RestartLimitError(
                f"envs {envs} of {self.num_envs} failed too often and were given up; the log and "
                "`faults` of samples say why"
            )

    @uninterrupted_call
    def probe(self, timeout: float = 5.0) -> list[RunnerStatus]:
        """Look after all runners; those that have nothing to do are asked for a sign of life.

        Args:
            timeout: Seconds to wait for it.
        """
        self._assert_open()
        self._rounds.take_news(0.0)
        busy = set(self._rounds.sampling())
        idle = [actor for actor in self._rounds.ready() if actor.index not in busy]
        ticket = self._rounds.roll_call(idle, timeout)
        asked = set(ticket.open)
        self._wait_for(ticket, timeout)
        silent = asked - ticket.values.keys()
        return [self._status(actor, silent) for actor in self._crew.actors]

    @uninterrupted_call
    def restart(self, runner: int, reason: str = "it was asked to restart") -> None:
        """Kill a runner, whatever it does, and start it again, if that is not too often.

        It is told in `runner_faults`, and counts as a failure. Returns at once.

        Raises:
            ValueError: There is no such runner.
        """
        self._assert_open()
        if not 0 <= runner < self.num_runners:
            raise ValueError(
                f"unknown runner {runner}; there are runners 0 to {self.num_runners - 1}"
            )
        actor = self._crew.actors[runner]
        if actor.child is not None and actor.child.exit_status is None:
            self._crew.kill(actor, FaultCause.REQUEST, reason)

    def get_state(self) -> dict[str, Any]:
        """Return weights, their versions, connectors' merged states and counts of a lifetime.

        Who takes it over uses no id of an episode, or of a sample, a second time.
        """
        next_eps_id, num_samples = self._rounds.ids_reached
        return {
            "weights": self.get_weights(),
            "policy_versions": self.policy_versions,
            "connectors": copy.deepcopy(self._rounds.connector_states),
            "metrics": self.metrics.get_state(),
            "num_samples": num_samples,
            "next_eps_id": next_eps_id,
        }

    @uninterrupted_call
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned, of this group or another; episodes go on.

        They keep their ids, as in `EnvRunner.set_state`. Samples under way come as they were asked,
        with what connectors have learnt in them: collect these before.

        Raises:
            ConfigError: It has a policy that is not here, or lacks a connector that is. Nothing was
                set.
            Exception: What a connector raises that does not take its part. Nothing was set.
        """
        self._assert_open()
        check_state(state, "weights", "policy_versions", "connectors", "metrics")
        check_state(state, "num_samples", "next_eps_id")
        rounds = self._rounds
        rounds.take_news(0.0)
        weights, connectors = state["weights"], state["connectors"]
        if unknown := sorted(weights.keys() - rounds.versions.keys()):
            raise ConfigError(
                f"there is no policy {unknown[0]!r}; there are {list(rounds.versions)}"
            )
        if missing := sorted(rounds.connector_states.keys() - connectors.keys()):
            raise ConfigError(f"the state has nothing of the connectors {missing}")
        versions = {policy_id: int(state["policy_versions"][policy_id]) for policy_id in weights}
        ids = checked_ids(state)
        rounds.check_connectors(connectors)
        self.metrics.set_state(state["metrics"])
        rounds.go_on_from(*ids)
        rounds.set_connectors({name: connectors[name] for name in rounds.connector_states})
        rounds.set_weights(weights, versions)

    def stop(self, *, terminate: bool = False) -> None:
        """Have all runners close their envs and leave; kill those that do not. Idempotent.

        Args:
            terminate: Do not ask, kill. Otherwise they have `timeouts.close`.
        """
        self.closed = True
        self._crew.close(terminate=terminate)
        self._finalizer.detach()
        if hasattr(self, "_rounds"):  # else no runner came up
            self._rounds.let_go()

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop(terminate=exc is not None)

    # --- private -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a call: take what has come, and raise what has to be."""
        self._assert_open()
        self._rounds.take_news(0.0)
        self._raise_errors()

    def _wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until something holds; return whether it did before the deadline."""
        while not done():
            left = _LONGEST_WAIT if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self._rounds.take_news(min(left, _LONGEST_WAIT))
            except EnvbusError:
                self._assert_open()  # it was stopped, by a signal's handler
                raise
        return True

    def _wait_for_someone(self, deadline: float | None) -> None:
        """Wait until a runner can be asked, or none is left; tell at times who is waited for."""
        pause = _PROGRESS_AFTER
        begun = time.monotonic()
        while True:
            until = time.monotonic() + pause
            if self._wait(self._someone, until if deadline is None else min(until, deadline)):
                return
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            starting = ", ".join(
                f"runner {actor.index} (life {actor.incarnation + 1})"
                for actor in self._crew.actors
                if actor.state is not ActorState.LOST
            )
            logger.warning(
                "no runner is there since %.0f s; being started again: %s", now - begun, starting
            )
            pause = min(2.0 * pause, _MOST_PAUSE)

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._wait(lambda: not ticket.open, deadline)

    def _raise_errors(self) -> None:
        if self._rounds.errors:
            raise self._rounds.errors.pop(0)

    def _someone(self) -> bool:
        """Whether there is a runner to ask, or none to wait for."""
        return bool(self._rounds.ready()) or not self._any_left()

    def _any_left(self) -> bool:
        return len(self._rounds.lost()) < self.num_runners

    def _raise_if_none_left(self) -> None:
        if not self._any_left():
            self.assert_healthy()

    def _choose(self, runners: Sequence[int] | None) -> list[RunnerProcess]:
        self._check_runners(runners or ())
        self._rounds.take_news(0.0)
        return [a for a in self._rounds.ready() if runners is None or a.index in runners]

    def _check_runners(self, runners: Iterable[int]) -> None:
        for index in runners:
            if not 0 <= index < self.num_runners:
                last = self.num_runners - 1
                raise ValueError(f"unknown runner {index}; there are runners 0 to {last}")

    def _status(self, actor: RunnerProcess, silent: set[int]) -> RunnerStatus:
        standing = self._rounds.standings[actor.index]
        state: Literal["ready", "sampling", "silent", "starting", "lost"]
        if actor.state is ActorState.LOST:
            state = "lost"
        elif actor.state is not ActorState.READY:
            state = "starting"
        elif standing.is_sampling:
            state = "sampling"
        else:
            state = "silent" if actor.index in silent else "ready"
        running = actor.child is not None and actor.child.exit_status is None
        return RunnerStatus(
            state=state,
            incarnation=actor.incarnation,
            pid=actor.child.pid if actor.child is not None and running else 0,
            sampling_for=time.monotonic() - standing.asked_at if standing.is_sampling else 0.0,
        )

    def _assert_open(self) -> None:
        if self.closed or self._crew.closed:
            raise ClosedEnvironmentError("Trying to operate on `EnvRunnerGroup`, after `stop()`.")
