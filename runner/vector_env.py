"""`BusVectorEnv`: a drop-in for `gymnasium.vector.AsyncVectorEnv` over env actors.

Leaves out processes, messages and waiting (`fleet.py`, `lockstep.py`).
"""

from __future__ import annotations

import enum
import logging
import multiprocessing
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)
from gymnasium.vector import AutoresetMode, VectorEnv

from envbus.actors.copies import own
from envbus.actors.protocol import (
    Call,
    CallResult,
    Exec,
    Rebuild,
    Reset,
    SetAttr,
    Step,
    StepResult,
)
from envbus.bus.codec import encode
from envbus.bus.errors import EnvbusError, RestartLimitError
from envbus.bus.keys import Allow, PathLike
from envbus.bus.messages import Request, Tree
from envbus.bus.restart import RestartPolicy
from envbus.runner.actions import ActionStore
from envbus.runner.config import FleetConfig, Timeouts
from envbus.runner.fault_log import FaultLog, Hooks
from envbus.runner.faults import (
    EnvError,
    Fault,
    FaultCause,
    as_cause,
    raise_env_errors,
    to_exception,
)
from envbus.runner.fleet import Actor, Fleet
from envbus.runner.lockstep import Encoded, Lockstep, Round
from envbus.runner.observations import ObservationStore
from envbus.runner.recovery import Lives, Recovery
from envbus.runner.seeding import spread_seeds
from envbus.runner.statistics import Statistics, gather
from envbus.runner.vector_spaces import check_max_concurrency, check_reset_mask, choose_spaces

__all__ = ["BusVectorEnv"]

logger = logging.getLogger("envbus.runner.vector_env")

#: What an actor is asked to advance all of its envs by actions that are in the arena.
_STEP_ALL = Encoded(Step.__name__, encode(Step()))


class _State(enum.Enum):
    """What is pending; the values are Gymnasium's, and stand in messages."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"


class BusVectorEnv(VectorEnv[Any, Any, npt.NDArray[Any]]):
    """Steps envs in supervised actor processes, each of which hosts several.

    A drop-in for `gymnasium.vector.AsyncVectorEnv`: same parameters in the same order, same
    results, same errors. What differs: no env is built in this process; replies are matched by
    id, so that a time-out never shifts the data; waits have deadlines; an env's exception keeps
    its type and brings its remote traceback; after an exception the envs can be used further.

    What an env raises in `reset`, `step` or a call is raised here once, as its own type where that
    is possible, with an `EnvError` (which env, which process, the remote traceback) as its cause;
    if several envs raise, the last one's is raised, with an `ExceptionGroup` of them all. What the
    others returned is kept: `step_wait()`, `reset_wait()` or `call_wait()`, called again, returns
    it. The row of an env that raised then has its former observation, reward 0, no flag and
    `infos["fault"]`; of a call, its result is None. After that, or without it, all envs can be
    reset, stepped or closed. Nothing is done to the env that raised: whether it can go on is its
    own affair, but after a failed automatic reset it refuses to step until it is reset. After a
    time-out the late answers are dropped, and after an `ActorLostError` only `close` works.

    One thread creates, uses and closes it.

    Args:
        env_fns: One per env: a factory (also a lambda, a closure, a class of `__main__`), a
            Gymnasium id, `"module:function"`, or a value of `envbus.actors.env_source`. A
            factory may return a `gymnasium.vector.VectorEnv`, which then fills as many envs
            as it has.
        shared_memory: Exchange observations, rewards, flags and actions through shared memory;
            spaces without a fixed size travel in messages either way.
        copy: Return arrays of the caller's own; else views, valid until the next step.
        context: None, "fork", "forkserver" or "spawn". All but "spawn" fork a clean server that
            has imported what actors need; this process itself is never forked.
        daemon: Accepted for compatibility; actors never outlive this process.
        worker: Not supported.
        observation_mode: As in Gymnasium: "same", "different", or a pair (batched space, single
            space).
        autoreset_mode: What happens at the end of an episode.
        max_concurrency: Most envs that step at one time; limits the number of actors, in each of
            which envs step one after another.
        num_actors: Processes; "auto": as many as there are usable CPU cores. Choose more for
            envs that wait rather than compute.
        restart_failed_sub_environments: Make envs anew that raised, and start actors again that
            died or passed a deadline. The episodes of their envs end as truncated, with
            `infos["fault"]`; the others go on. Off, errors are raised.
        restart_policy: How often and how soon, per env and per actor; None: the default policy.
        hooks: Functions that are told of faults and restarts.
        timeouts: Default deadline of each verb, in seconds.
        preload: Modules that are imported once, before actors are forked, e.g. a simulator.
        lanes: Carry the messages of local actors through a socketpair each, where the platform
            can; else, and with False, through ROUTER and DEALER sockets.
        remote_actors: How many of the actors join from other hosts (`envbus actor ENDPOINT`);
            they host the last envs, which must be given as ids or import paths.
        bind: Endpoints that they join at, e.g. `"tcp://127.0.0.1:5555"`.
        keys: File of this runner's secret key. Only actors with keys can join at `bind` then.
        allow: Which actors: a folder of their public keys, or one file, or a function of the
            public key that returns True or False. See docs/security.md.
        insecure: Allow binding to more than this host without keys, where anybody may join.

    Raises:
        ConfigError: A setting cannot be used.
        ValueError: `worker` was given; the context is unknown; a custom space with shared memory.
        RuntimeError: The envs' spaces differ; the message names which.
        StartError: An actor did not come up.
        Exception: What an env's constructor raised. No process is left.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]] | str | Any],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: str | tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_actors: int | Literal["auto"] = "auto",
        restart_failed_sub_environments: bool = False,
        restart_policy: RestartPolicy | None = None,
        hooks: Hooks | None = None,
        timeouts: Timeouts | None = None,
        preload: Sequence[str] = (),
        lanes: bool = True,
        remote_actors: int = 0,
        bind: str | Sequence[str] = (),
        keys: PathLike | None = None,
        allow: Allow | None = None,
        insecure: bool = False,
    ) -> None:
        if worker is not None:
            raise ValueError(
                "`worker` replaces the loop of AsyncVectorEnv's processes, which envbus does not "
                "have; wrap the env, or use `exec_func` to run code beside it"
            )
        self.env_fns = list(env_fns)
        if not self.env_fns:
            raise ValueError("`env_fns` is empty; pass one factory or id per env")
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.max_concurrency = check_max_concurrency(max_concurrency)
        self.timeouts = timeouts or Timeouts()
        restart = (restart_policy or RestartPolicy()) if restart_failed_sub_environments else None
        self._restart_policy = restart
        self._log = FaultLog(hooks)
        self._state = _State.DEFAULT
        self._fleet = Fleet(
            self.env_fns,
            self.autoreset_mode,
            FleetConfig(
                num_actors=num_actors,
                shared_memory=shared_memory,
                context=context,
                max_concurrency=self.max_concurrency,
                timeouts=self.timeouts,
                restart=restart,
                preload=tuple(preload),
                lanes=lanes,
                remote_actors=remote_actors,
                bind=(bind,) if isinstance(bind, str) else tuple(bind),
                keys=keys,
                allow=allow,
                insecure=insecure,
            ),
        )
        # Not `__del__`: that might find the fleet's sockets collected already, if both are part of
        # one cycle. The finalizer keeps the fleet alive until this object is gone.
        self._finalizer = weakref.finalize(self, self._fleet.abandon)
        try:
            self._fleet.start()
            self._set_up()
        except BaseException:
            self._finalizer()
            self.closed = True
            raise

    def _set_up(self) -> None:
        fleet = self._fleet
        self.num_envs = fleet.num_envs
        first = fleet.actors[0].built
        assert first is not None
        self.metadata = {**first.metadata.value, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        chosen = choose_spaces(
            fleet.env_spaces(), self.observation_mode, shared_memory=self.shared_memory
        )
        self.single_observation_space = chosen.single_observation_space
        self.observation_space = chosen.observation_space
        self.single_action_space = chosen.single_action_space
        self.action_space = chosen.action_space
        blocks = fleet.map_blocks(self.single_observation_space, self.single_action_space)
        self._blocks = blocks
        self._observations = ObservationStore(
            self.single_observation_space, self.num_envs, blocks.observations
        )
        self._actions = ActionStore(self.action_space, self.num_envs, blocks.actions)
        self._lockstep = Lockstep(fleet, self._after_fault)
        self._lives = Lives(self.num_envs)
        units = [unit for actor in fleet.actors for unit in actor.units()]
        #: None where errors are raised.
        self._recovery: Recovery | None = None
        if self._restart_policy is not None:
            self._recovery = Recovery(units, self._restart_policy, random.random)
        #: Actors whose envs must be reset before they can be stepped, after a fault.
        self._to_reset: set[int] = set()
        self._reset_requests: dict[int, Reset | Rebuild] = {}
        #: Whether an actor that dies while envs are made anew begins its episodes at once.
        self._resets_reborn = False
        self._call_indices: list[int] = []
        #: What was collected last; and the results beside an error, until the next call.
        self._collected = _State.DEFAULT
        self._kept: tuple[_State, Round] | None = None

    # --- reset -------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]`, and return the first observations.

        Args:
            seed: Env i gets `seed + i`; or one seed, or None, per env; None seeds none.
            options: Handed to each env, which gets its own copy. `"reset_mask"`, a bool array
                `(num_envs,)`, is not handed on; the dict is left as it is.

        Returns:
            Observations of all envs and the infos of those that were reset.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Ask the envs to reset; `reset_wait` returns the results.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending.
            ValueError, TypeError: Seeds or mask are unusable. Nothing was sent.
        """
        self._begin_reset("reset_async", seed, options)

    def _begin_reset(
        self, verb: str, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        self._assert_is_running()
        seeds = spread_seeds(seed, self.num_envs)
        self._assert_nothing_pending(verb, ending="")
        mask, rest = check_reset_mask(options, self.num_envs)
        requests: dict[int, Request[Any] | Encoded] = {}
        for actor in self._fleet.actors:
            slots = None if mask is None else np.flatnonzero(mask[actor.rows]).tolist()
            if slots == []:
                continue
            if actor.index in self._to_reset:
                slots = None  # a new life: none of its envs has an episode to keep
            addressed = range(len(actor.env_ids)) if slots is None else slots
            given = [seeds[actor.env_ids[slot]] for slot in addressed]
            requests[actor.index] = Reset(
                slots=slots,
                seeds=None if all(s is None for s in given) else Tree(given),
                options=None if rest is None else Tree(own(rest)),
            )
            for slot in addressed:
                self._lives.remember(actor.env_ids[slot], seeds[actor.env_ids[slot]])
        self._reset_requests = {i: r for i, r in requests.items() if isinstance(r, Reset)}
        self._kept = None
        self._lockstep.begin(requests, self.timeouts.reset, afresh=True, kill_late=True)
        self._to_reset.difference_update(requests)
        self._state = _State.WAITING_RESET

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the resets and return their results.

        Args:
            timeout: Seconds; None: `timeouts.reset`.

        Raises:
            ClosedEnvironmentError: After `close`.
            NoAsyncCallError: Nothing was asked.
            multiprocessing.TimeoutError: Not all answered; the message names who did not.
            ActorLostError, RestartLimitError: An actor ended and was not started again.
            Exception: What an env raised, as its own type where possible. Called again, this
                returns the others' results.
        """
        return self._end_reset("reset_wait", "reset_async", timeout)

    def _end_reset(
        self, verb: str, asked: str, timeout: float | None
    ) -> tuple[Any, dict[str, Any]]:
        done = self._collect(verb, asked, _State.WAITING_RESET, timeout)
        infos = self._take_results(done)
        self._settle_faults(done, infos, reset=True)
        return self._observations.batch(copy=self.copy), self._merge_infos(infos)

    # --- step --------------------------------------------------------------------------------

    def step(
        self, actions: Any
    ) -> tuple[
        Any,
        npt.NDArray[np.float64],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        dict[str, Any],
    ]:
        """Advance all envs by one step.

        Args:
            actions: A batch of `action_space`, or a sequence of single actions.

        Returns:
            Observations, rewards `(num_envs,)` float64, terminations and truncations
            `(num_envs,)` bool, and infos.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Ask all envs to advance by one step; `step_wait` returns the results.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending.
            ValueError, TypeError: Not one action per env. Nothing was sent.
        """
        self._begin_step("step_async", actions)

    def _begin_step(self, verb: str, actions: Any) -> None:
        if self.closed or self._state is not _State.DEFAULT:
            self._assert_is_running()
            self._assert_nothing_pending(verb)
        singles = self._actions.store(actions)
        requests: dict[int, Request[Any] | Encoded] = {}
        self._reset_requests = {}
        for actor in self._fleet.actors:
            index = actor.index
            if index in self._to_reset:
                requests[index] = self._reset_requests[index] = self._new_life(actor)
            elif singles is not None:
                requests[index] = Step(actions=Tree(singles[actor.rows]))
            elif actor.reads_blocks:
                requests[index] = _STEP_ALL
            else:
                assert self._blocks.actions is not None
                rows = [leaf[actor.rows].copy() for leaf in self._blocks.actions]
                requests[index] = Step(action_arrays=rows)
        self._kept = None
        self._lockstep.begin(requests, self.timeouts.step, kill_late=True)
        self._to_reset.clear()
        self._state = _State.WAITING_STEP

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[
        Any,
        npt.NDArray[np.float64],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        dict[str, Any],
    ]:
        """Wait for the steps and return their results; errors as in `reset_wait`.

        Args:
            timeout: Seconds; None: `timeouts.step`.
        """
        return self._end_step("step_wait", "step_async", timeout)

    def _end_step(self, verb: str, asked: str, timeout: float | None) -> tuple[Any, ...]:
        done = self._collect(verb, asked, _State.WAITING_STEP, timeout)
        infos = self._take_results(done)
        if done.faults or done.has_errors:
            self._settle_faults(done, infos, reset=self.autoreset_mode is AutoresetMode.SAME_STEP)
        blocks = self._blocks
        return (
            self._observations.batch(copy=self.copy),
            blocks.rewards.copy(),
            blocks.terminations.copy(),
            blocks.truncations.copy(),
            self._merge_infos(infos),
        )

    # --- call, attributes, functions ---------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute, and return the results in order.

        Looks through wrappers; a dotted name reaches into attributes.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Ask for `call`; `call_wait` returns the results.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending.
            EncodeError: An argument cannot be pickled. Nothing was sent.
        """
        self._ask_call("call_async", name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the calls and return their results; errors as in `reset_wait`."""
        return tuple(self._end_call("call_wait", "call_async", timeout))

    def get_attr(self, name: str, indices: int | Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return an attribute of each env, or of those at `indices`, in order."""
        if indices is None:
            return self.call(name)
        chosen = self._resolve(indices)
        self._ask_call("call_async", name, (), {}, chosen)
        values = self._end_call("call_wait", "call_async", None)
        return tuple(values[index] for index in chosen)

    def has_attr(self, name: str) -> bool:
        """Return whether every env has the attribute, looking through wrappers."""
        return all(self.exec_func(_has_attr, None, name))

    def set_attr(
        self,
        name: str,
        values: Any,
        *,
        indices: int | Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> None:
        """Set an attribute of the envs.

        Args:
            name: The attribute; created if it does not exist.
            values: A list or tuple with one value per addressed env, or one value for all.
            indices: Which envs; None: all.
            broadcast: Give `values` to each env whole, also if it is a list or tuple.

        Raises:
            ValueError: The number of values is not that of the envs. Nothing was sent.
        """
        self._assert_is_running()
        chosen = self._resolve(indices)
        if broadcast or not isinstance(values, list | tuple):
            values = [values] * len(chosen)
        if len(values) != len(chosen):
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {len(chosen)} environments."
            )
        by_env = dict(zip(chosen, values, strict=True))
        self._begin_call(
            "set_attr",
            chosen,
            lambda actor, slots: SetAttr(
                name=name,
                values=Tree([by_env[actor.env_ids[slot]] for slot in slots]),
                slots=slots,
            ),
        )
        self._end_call("set_attr", "set_attr", None)

    def render(self) -> tuple[Any, ...]:
        """Return each env's rendered frame, or None where it has none."""
        return self.call("render")

    def exec_func(
        self,
        func: Callable[..., Any] | Any,
        indices: int | Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `func(env, *args, **kwargs)` beside each env, in its process.

        Args:
            func: Any function, also a lambda or closure; what is not callable is returned.
            indices: Which envs; None: all; negative ones count from the end.
            *args: For `func`.
            **kwargs: For `func`.

        Returns:
            `num_envs` results, None for envs that were not addressed.
        """
        self.exec_func_send(func, indices, *args, **kwargs)
        return self.exec_func_fetch()

    def exec_func_send(
        self,
        func: Callable[..., Any] | Any,
        indices: int | Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Ask for `exec_func`; `exec_func_fetch` returns the results."""
        what, positional, named = Tree(func), Tree(own(args)), Tree(own(kwargs))
        self._begin_call(
            "exec_func_send",
            self._resolve(indices),
            lambda _, slots: Exec(function=what, args=positional, kwargs=named, slots=slots),
        )

    def exec_func_fetch(self, timeout: float | None = None) -> list[Any]:
        """Wait for `exec_func_send`'s results; errors as in `reset_wait`."""
        return self._end_call("exec_func_fetch", "exec_func_send", timeout)

    def env_is_wrapped(self, wrapper_class: type) -> list[bool]:
        """Return for each env whether one of its wrappers is a `wrapper_class`."""
        return self.exec_func(_is_wrapped, None, wrapper_class)

    @property
    def np_random_seed(self) -> Any:
        """Each env's `np_random_seed`, a tuple."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # without a setter, as in Gymnasium's AsyncVectorEnv
    def np_random(self) -> Any:
        """A copy of each env's `np_random`, a tuple."""
        return self.get_attr("np_random")

    def _ask_call(
        self,
        verb: str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        indices: Sequence[int] | None = None,
    ) -> None:
        # Copies: what is sent must not change under the sender's hands.
        positional, named = Tree(own(args)), Tree(own(kwargs))
        self._begin_call(
            verb,
            indices,
            lambda _, slots: Call(name=name, args=positional, kwargs=named, slots=slots),
        )

    def _begin_call(
        self,
        verb: str,
        indices: Sequence[int] | None,
        make_request: Callable[[Actor, list[int]], Request[Any]],
    ) -> None:
        self._assert_is_running()
        self._assert_nothing_pending(verb)
        chosen = set(range(self.num_envs) if indices is None else indices)
        requests: dict[int, Request[Any] | Encoded] = {}
        for actor in self._fleet.actors:
            slots = [slot for slot, env_id in enumerate(actor.env_ids) if env_id in chosen]
            if slots:
                requests[actor.index] = make_request(actor, slots)
        self._call_indices = sorted(chosen)
        self._kept = None
        self._lockstep.begin(requests, self.timeouts.call)
        self._state = _State.WAITING_CALL

    def _end_call(self, verb: str, asked: str, timeout: float | None) -> list[Any]:
        done = self._collect(verb, asked, _State.WAITING_CALL, timeout)
        self._raise_or_mark(done, {})
        values: list[Any] = [None] * self.num_envs
        results = iter(
            value
            for _, reply in sorted(done.replies.items())
            if isinstance(reply, CallResult)
            for value in reply.values.value
        )
        for index in self._call_indices:
            values[index] = next(results)
        return values

    # --- OpenRL's names ----------------------------------------------------------------------

    def reset_send(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """`reset_async` under OpenRL's name."""
        self._begin_reset("reset_send", seed, options)

    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """`reset_wait` under OpenRL's name."""
        return self._end_reset("reset_fetch", "reset_send", timeout)

    def step_send(self, actions: Any) -> None:
        """`step_async` under OpenRL's name."""
        self._begin_step("step_send", actions)

    def step_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """`step_wait` under OpenRL's name."""
        return self._end_step("step_fetch", "step_send", timeout)

    def call_send(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """`call_async` under OpenRL's name."""
        self._ask_call("call_send", name, args, kwargs)

    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """`call_wait` under OpenRL's name."""
        return tuple(self._end_call("call_fetch", "call_send", timeout))

    # --- end ---------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end their processes; called by `close`.

        Args:
            timeout: Seconds for a pending call and for the envs to close, before the processes
                are killed; None: `timeouts.close`.
            terminate: Kill the processes at once.
        """
        allowed = self.timeouts.close if timeout is None else timeout
        deadline = time.monotonic() + allowed
        if self._state is not _State.DEFAULT and not self._fleet.closed:
            gymnasium.logger.warn(
                "Calling `close` while waiting for a pending call to "
                f"`{self._state.value}` to complete."
            )
            self._state = _State.DEFAULT
            try:
                if terminate or self._lockstep.collect(allowed) is None:
                    terminate = True
            except EnvbusError as error:  # an actor that has ended needs no closing
                logger.info("closed while a call was pending: %s", error)
            self._lockstep.abandon()
        self._fleet.close(timeout=deadline - time.monotonic(), terminate=terminate)
        self._finalizer.detach()

    def actor_pids(self) -> list[int]:
        """Return the process id of each actor that runs."""
        return [actor.child.pid for actor in self._fleet.actors if actor.child is not None]

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        return gather(self._fleet, self._log, self._recovery, 0)

    # --- private -----------------------------------------------------------------------------

    def _collect(self, verb: str, asked: str, state: _State, timeout: float | None) -> Round:
        if self.closed or self._state is not state:
            self._assert_is_running()
            if self._state is _State.DEFAULT and self._kept is not None and self._kept[0] is state:
                kept, self._kept = self._kept[1], None
                return kept
            raise NoAsyncCallError(
                f"Calling `{verb}` without any prior call to `{asked}`.", state.value
            )
        try:
            done = self._lockstep.collect(timeout)
        except KeyboardInterrupt:
            raise  # the call stays pending: it can be fetched, or closed
        except EnvbusError as exc:
            self._state = _State.DEFAULT
            cause = self._cause_of(self._lockstep.round)
            if cause is None:
                raise
            raise exc from cause
        except BaseException:
            self._state = _State.DEFAULT
            raise
        if done is None:
            missing = self._lockstep.missing()
            self._lockstep.abandon()
            self._time_out(verb, timeout, missing)
        self._state, self._collected = _State.DEFAULT, state
        if done.late:
            self._time_out(verb, getattr(self.timeouts, state.value), done.late)
        return done

    def _time_out(self, verb: str, timeout: float | None, late: Sequence[Actor]) -> NoReturn:
        self._state = _State.DEFAULT
        raise multiprocessing.TimeoutError(
            f"The call to `{verb}` has timed out after {timeout} second(s). "
            f"Not answered: {', '.join(actor.describe() for actor in late)}.\n"
            + "\n".join(self._fleet.stacks(late))
        ) from self._cause_of(self._lockstep.round)

    def _take_results(self, done: Round) -> dict[int, dict[str, Any]]:
        """Put what the replies carry into the stores; return the infos that are not empty."""
        blocks = self._blocks
        infos: dict[int, dict[str, Any]] = {}
        for index, reply in done.replies.items():
            if type(reply) is not StepResult:
                continue
            actor = self._fleet.actors[index]
            request = self._reset_requests.get(index)
            slots = request.slots if request is not None else None
            rows: Any = actor.rows
            if slots is not None:
                rows = [actor.env_ids[slot] for slot in slots]
            if reply.observation_arrays is not None:
                self._observations.put_arrays(rows, reply.observation_arrays)
            if reply.observations is not None:
                env_ids = actor.env_ids if slots is None else rows
                self._observations.put_singles(env_ids, reply.observations.value)
            if request is not None:
                blocks.rewards[rows] = 0.0
                blocks.terminations[rows] = False
                blocks.truncations[rows] = False
            elif reply.rewards is not None:
                blocks.rewards[rows] = reply.rewards
                blocks.terminations[rows] = reply.terminations
                blocks.truncations[rows] = reply.truncations
            if reply.infos is not None:
                env_ids = actor.env_ids if slots is None else rows
                for env_id, info in zip(env_ids, reply.infos.value, strict=True):
                    if info:
                        infos[env_id] = info
        return infos

    def _settle_faults(self, done: Round, infos: dict[int, dict[str, Any]], *, reset: bool) -> None:
        """Raise what envs raised, or make them anew and say so: truncated, reward 0, named.

        Args:
            done: The round.
            infos: Of this round, by env; get `fault`.
            reset: Envs that are made anew begin their episode at once, not at the next step.
        """
        recovery = self._recovery
        if recovery is None:
            self._raise_or_mark(done, infos)
            return
        faults: dict[int, Fault] = {}
        self._note_faults(done, faults, reset=reset)
        while recovery:
            done = self._remake(recovery, reset=reset)
            if reset:
                infos.update(self._take_results(done))
            self._note_faults(done, faults, reset=reset)
        for env_id, fault in faults.items():
            self._blocks.rewards[env_id] = 0.0
            self._blocks.terminations[env_id] = False
            self._blocks.truncations[env_id] = True
            infos.setdefault(env_id, {})["fault"] = {
                "cause": fault.cause.value,
                "error": fault.message,
                "restarts": fault.restarts,
            }
        self._log.tell()

    def _note_faults(self, done: Round, faults: dict[int, Fault], *, reset: bool) -> None:
        """Take in what failed in a round.

        Raises:
            RestartLimitError: An env failed too often.
        """
        recovery = self._recovery
        assert recovery is not None
        for index, loss in done.faults.items():
            actor = self._fleet.actors[index]
            recovery.works(actor.env_ids)  # made anew with their actor
            if not reset:
                self._to_reset.add(index)
            for env_id in actor.env_ids:
                faults[env_id] = fault = Fault(
                    env_id=env_id,
                    cause=loss.cause,
                    message=loss.reason,
                    restarts=int(self._lives.numbers[env_id]) - 1,
                )
                self._log.fault(fault)
        failed: set[int] = set()
        for error, _ in self._errors_of(done):
            unit = recovery.unit_of(error.env_id)
            if unit.start in failed:
                continue
            failed.add(unit.start)
            restarts = recovery.failed(unit, error.summary, time.monotonic())
            for env_id in unit:
                faults[env_id] = fault = Fault(
                    env_id=env_id,
                    cause=error.cause,
                    message=error.summary,
                    restarts=int(self._lives.numbers[env_id]),
                    error=error,
                    given_up=restarts is not None,
                )
                self._log.fault(fault)
            self._lives.begin(unit)
            if restarts is not None:
                self._log.tell()
                raise RestartLimitError(
                    f"env {unit.start} failed again after {restarts} restarts: {error}"
                ) from error

    def _remake(self, recovery: Recovery, *, reset: bool) -> Round:
        """Make those failed envs anew that are due first."""
        while not (due := recovery.due(time.monotonic())):
            wake_at = recovery.wake_at()
            assert wake_at is not None, "an env failed and nobody makes it anew"
            self._lockstep.wait(wake_at - time.monotonic())
        requests: dict[int, Rebuild] = {}
        for actor in self._fleet.actors:
            env_ids = [i for unit in due if unit.start in actor.env_ids for i in unit]
            if env_ids:
                seeds = self._lives.seeds(env_ids)
                requests[actor.index] = Rebuild(
                    slots=[env_id - actor.env_ids.start for env_id in env_ids],
                    seeds=None if seeds is None else Tree(seeds),
                    reset=reset,
                    close_timeout=self.timeouts.close,
                )
        self._reset_requests = dict(requests)
        self._resets_reborn = reset
        try:
            self._lockstep.begin(requests, self.timeouts.start, kill_late=True)
            done = self._lockstep.collect(None)
        except BaseException:
            self._lockstep.abandon()
            raise
        finally:
            for unit in due:  # what failed again is told by its errors
                recovery.works(unit)
        assert done is not None
        failed = {error.env_id for error, _ in self._errors_of(done)}
        for env_id in (i for unit in due for i in unit if i not in failed):
            self._log.restarted(env_id, int(self._lives.numbers[env_id]))
        return done

    def _after_fault(self, actor: Actor) -> Request[Any] | None:
        """Return what begins an actor's new life within this very round."""
        self._lives.begin(actor.env_ids)
        index = actor.index
        if self._state is _State.WAITING_RESET:
            return self._reset_requests[index]
        if self._state is _State.WAITING_STEP:
            at_once = self.autoreset_mode is AutoresetMode.SAME_STEP
            at_once = at_once or index in self._reset_requests
        else:
            at_once = self._state is _State.DEFAULT and self._resets_reborn
        if not at_once:
            return None
        self._reset_requests[index] = request = self._new_life(actor)
        return request

    def _new_life(self, actor: Actor) -> Reset:
        """Return the reset of all envs of an actor that was started again, or is about to be."""
        seeds = self._lives.seeds(actor.env_ids)
        return Reset(seeds=None if seeds is None else Tree(seeds))

    def _merge_infos(self, infos: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for env_id in sorted(infos):
            try:
                merged = self._add_info(merged, infos[env_id], env_id)
            except Exception as exc:  # a different error for each kind of misfit
                raise ValueError(
                    f"the info of env {env_id} cannot be merged with those before it: {exc}"
                ) from exc
        return merged

    def _raise_or_mark(self, done: Round, infos: dict[int, dict[str, Any]]) -> None:
        """Raise what envs raised, once; when the results are fetched after that, mark theirs."""
        found = self._errors_of(done)
        if found and not done.told:
            done.told = True
            self._kept = (self._collected, done)
            raise_env_errors([error for error, _ in found], [original for _, original in found])
        for error, _ in found:
            infos.setdefault(error.env_id, {})["fault"] = {
                "cause": FaultCause.ERROR.value,
                "error": error.summary,
                "restarts": 0,
            }

    def _cause_of(self, done: Round) -> Exception | None:
        """Return what envs raised in a round that something else ended."""
        return as_cause([error for error, _ in self._errors_of(done)])

    def _errors_of(self, done: Round) -> list[tuple[EnvError, Exception | None]]:
        """Return what envs raised in a round, in their order."""
        return [
            to_exception(
                error,
                env_id=actor.env_ids[error.slot],
                actor=actor.name,
                incarnation=actor.incarnation,
            )
            for index, reply in sorted(done.replies.items())
            for actor in [self._fleet.actors[index]]
            for error in reply.errors
        ]

    def _resolve(self, indices: int | Sequence[int] | None) -> list[int]:
        if indices is None:
            return list(range(self.num_envs))
        asked = [indices] if isinstance(indices, int | np.integer) else list(indices)
        for index in asked:
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"env {index} does not exist; there are {self.num_envs}")
        return [int(index) % self.num_envs for index in asked]

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )

    def _assert_nothing_pending(self, verb: str, ending: str = ".") -> None:
        if self._state is not _State.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{verb}` while waiting for a pending call to "
                f"`{self._state.value}` to complete{ending}",
                self._state.value,
            )


def _has_attr(env: gymnasium.Env[Any, Any], name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


def _is_wrapped(env: gymnasium.Env[Any, Any], wrapper_class: type) -> bool:
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, wrapper_class):
            return True
        layer = layer.env
    return False
