"""`BusVectorEnv`: a drop-in for `gymnasium.vector.AsyncVectorEnv` over env actors.

Leaves out how a step is asked for and what comes of it (`lockstep.py`), failed envs (`engine.py`,
`env_faults.py`), processes (`fleet.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from envbus.actors.copies import own
from envbus.actors.finite import CheckFinite
from envbus.actors.protocol import Call, Exec, SetAttr
from envbus.bus.errors import EnvbusError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.keys import Allow, PathLike
from envbus.bus.messages import Request, Tree
from envbus.bus.restart import RestartPolicy
from envbus.bus.threads import ThreadsPerProcess
from envbus.runner.actions import ActionStore
from envbus.runner.actor import Actor
from envbus.runner.config import (
    ENDPOINTS,
    FleetConfig,
    Timeouts,
    Wait,
    choose_autoreset_mode,
    list_of,
)
from envbus.runner.engine import Engine
from envbus.runner.env_calls import EnvCalls
from envbus.runner.env_results import Infos, merge_infos
from envbus.runner.env_roster import as_ids
from envbus.runner.fault_log import FaultLog, Hooks
from envbus.runner.local_fleet import make_fleet
from envbus.runner.lockstep import Lockstep, Pending
from envbus.runner.lockstep_recycling import LockstepRecycling
from envbus.runner.quick_steps import QuickSteps
from envbus.runner.recycling import RecycleAfter
from envbus.runner.statistics import Statistics, gather
from envbus.runner.vector_spaces import check_max_concurrency, choose_spaces

__all__ = ["BusVectorEnv"]

#: Observations, rewards `(num_envs,)`, terminations and truncations `(num_envs,)`, infos.
Stepped: TypeAlias = tuple[
    Any,
    npt.NDArray[np.float64],
    npt.NDArray[np.bool_],
    npt.NDArray[np.bool_],
    dict[str, Any],
]


class BusVectorEnv(VectorEnv[Any, Any, npt.NDArray[Any]], StaysHere):
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
            envs that wait rather than compute. 0: none; the envs are stepped in this process,
            which what ends one ends too, and no deadline ends one that hangs.
        restart_failed_sub_environments: Make envs anew that raised, and start actors again that
            died or passed a deadline. The episodes of their envs end as truncated, with
            `infos["fault"]`; the others go on. What was set in an env (`set_attr`) is lost with
            it. False: errors are raised. None: True if there is a `restart_policy`. See
            docs/reliability.md.
        restart_policy: How often and how soon, per env and per actor; None: the default policy.
        hooks: Functions that are told of faults and restarts.
        memory_limit_mb: Resident memory in MiB that an actor may use, with all that it started;
            one that uses more is killed, with or without restart. Looked at about once per
            second, for actors on this host, while a call waits.
        recycle_after: When actors on this host that work are exchanged for fresh ones; None:
            never. See docs/recovery.md.
        check_finite: What follows where a reward is NaN or infinite, or an observation NaN.
            "warn": a warning, once per env and field. True: the env has failed, as if it had
            raised. False: nobody looks. See docs/reliability.md.
        timeouts: Default deadline of each verb, in seconds.
        preload: Modules that are imported once, before actors are forked, e.g. a simulator.
        threads_per_process: Threads that NumPy, PyTorch and their like start in each actor on this
            host; "auto": usable cores over actors, at least one; None: as they choose. Where
            OMP_NUM_THREADS or another such variable is set, that holds.
        lanes: Carry the messages of local actors through a socketpair each, where the platform
            can; else, and with False, through ROUTER and DEALER sockets.
        wait: What this process and the actors do in waits that are short as a rule. "auto": look
            again and again where that has paid, with as many of them as there are cores at most;
            "spin": all of them; "block": sleep, which leaves the cores to others, a learner for
            example, and makes a step longer by some wake-ups.
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
        restart_failed_sub_environments: bool | None = None,
        restart_policy: RestartPolicy | None = None,
        hooks: Hooks | None = None,
        memory_limit_mb: float | None = None,
        recycle_after: RecycleAfter | None = None,
        check_finite: CheckFinite = "warn",
        timeouts: Timeouts | None = None,
        preload: Sequence[str] = (),
        threads_per_process: ThreadsPerProcess = "auto",
        lanes: bool = True,
        wait: Wait = "auto",
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
        self.env_fns = list_of("env_fns", env_fns, '["CartPole-v1"] * 8')
        if not self.env_fns:
            raise ValueError("`env_fns` is empty; pass one factory or id per env")
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.observation_mode = observation_mode
        self.autoreset_mode = choose_autoreset_mode(autoreset_mode)
        self.max_concurrency = check_max_concurrency(max_concurrency)
        self.timeouts = timeouts or Timeouts()
        restart = RestartPolicy.chosen(restart_failed_sub_environments, restart_policy)
        self._log = FaultLog(hooks)
        self._fleet = make_fleet(
            self.env_fns,
            self.autoreset_mode,
            FleetConfig(
                num_actors=num_actors,
                shared_memory=shared_memory,
                context=context,
                max_concurrency=self.max_concurrency,
                timeouts=self.timeouts,
                restart=restart,
                memory_limit_mb=memory_limit_mb,
                recycle=recycle_after,
                check_finite=check_finite,
                preload=tuple(list_of("preload", preload, '["numpy"]')),
                threads_per_process=threads_per_process,
                lanes=lanes,
                wait=wait,
                remote_actors=remote_actors,
                bind=(bind,) if isinstance(bind, str) else tuple(list_of("bind", bind, ENDPOINTS)),
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
        actions = ActionStore(self.action_space, self.num_envs, blocks.actions)
        name, mode = type(self).__name__, self.autoreset_mode
        engine = Engine(
            name,
            fleet,
            self.single_observation_space,
            blocks,
            self._log,
            mode,
            all_or_nothing=True,
            as_they_come=False,
        )
        self._results, self._faults = engine.results, engine.faults
        recycling = None
        if fleet.recycling is not None:
            recycling = LockstepRecycling(fleet.recycling, fleet.actors, engine, mode)
        calls = EnvCalls(fleet, engine)
        self._lockstep = Lockstep(name, fleet, engine, calls, actions, recycling, mode)
        self._quick: QuickSteps | None = None
        if fleet.words is not None:
            self._quick = QuickSteps(fleet.words, fleet, engine, actions, self._lockstep, recycling)

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

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the resets and return their results.

        Args:
            timeout: Seconds; None: `timeouts.reset`.

        Raises:
            ClosedEnvironmentError: After `close`, also by a signal's handler meanwhile.
            NoAsyncCallError: Nothing was asked.
            multiprocessing.TimeoutError: Not all answered; the message names who did not.
            ActorLostError, RestartLimitError: An actor ended and was not started again.
            Exception: What an env raised, as its own type where possible. Called again, this
                returns the others' results.
        """
        return self._end_reset("reset_wait", "reset_async", timeout)

    @uninterrupted_call
    def _begin_reset(
        self, verb: str, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        self._lockstep.begin_reset(verb, seed, options)

    def _end_reset(
        self, verb: str, asked: str, timeout: float | None
    ) -> tuple[Any, dict[str, Any]]:
        lockstep, pending = self._lockstep, Pending.RESET
        return lockstep.hand_out(
            pending, lambda: lockstep.fetch(verb, asked, pending, timeout, self._take_reset)
        )

    def _take_reset(self, verb: str, timeout: float | None) -> tuple[Any, dict[str, Any]]:
        infos, misfit = self._merge(self._lockstep.end_reset(verb, timeout))
        first = self._results.observations.batch(copy=self.copy), infos
        if misfit is not None:
            self._lockstep.keep(Pending.RESET, first)
            raise misfit
        return first

    # --- step --------------------------------------------------------------------------------

    def step(self, actions: Any) -> Stepped:
        """Advance all envs by one step.

        Args:
            actions: A batch of `action_space`, or a sequence of single actions.

        Returns:
            Observations, rewards `(num_envs,)` float64, terminations and truncations
            `(num_envs,)` bool, and infos.
        """
        quick, is_asked = self._quick, False
        if quick is not None and self._lockstep.is_quiet:
            before = quick.begun
            try:
                if quick.step(actions):
                    results, blocks = self._results, self._results.blocks
                    stepped: Stepped = (
                        results.observations.batch(copy=self.copy),
                        blocks.rewards.copy(),
                        blocks.terminations.copy(),
                        blocks.truncations.copy(),
                        quick.infos,
                    )
                    quick.hand_out()
                    return stepped
            except BaseException as exc:  # also Ctrl-C: it can be fetched
                quick.take_back(before)
                if isinstance(exc, EnvbusError):
                    self._lockstep.check_open()
                raise
            is_asked = quick.begun != before

        def step() -> Stepped:
            if not is_asked:  # also if a step is pending already: that is an error
                self.step_async(actions)
            return self._fetch_step("step_wait", "step_async", None)

        # Handlers of signals are exchanged once for both, instead of twice.
        return self._lockstep.hand_out(Pending.STEP, step)

    def step_async(self, actions: Any) -> None:
        """Ask all envs to advance by one step; `step_wait` returns the results.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending.
            ValueError, TypeError: Not one action per env. Nothing was sent.
        """
        self._begin_step("step_async", actions)

    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Wait for the steps and return their results; errors as in `reset_wait`.

        Args:
            timeout: Seconds; None: `timeouts.step`.
        """
        return self._end_step("step_wait", "step_async", timeout)

    @uninterrupted_call
    def _begin_step(self, verb: str, actions: Any) -> None:
        self._lockstep.begin_step(verb, actions)

    def _end_step(self, verb: str, asked: str, timeout: float | None) -> Stepped:
        return self._lockstep.hand_out(Pending.STEP, lambda: self._fetch_step(verb, asked, timeout))

    def _fetch_step(self, verb: str, asked: str, timeout: float | None) -> Stepped:
        return self._lockstep.fetch(verb, asked, Pending.STEP, timeout, self._take_step)

    def _take_step(self, verb: str, timeout: float | None) -> Stepped:
        infos, misfit = self._merge(self._lockstep.end_step(verb, timeout))
        results = self._results
        stepped = (
            results.observations.batch(copy=self.copy),
            results.blocks.rewards.copy(),
            results.blocks.terminations.copy(),
            results.blocks.truncations.copy(),
            infos,
        )
        if misfit is not None:
            self._lockstep.keep(Pending.STEP, stepped)
            raise misfit
        return stepped

    def _merge(self, infos: Infos) -> tuple[dict[str, Any], ValueError | None]:
        return merge_infos(infos, self._add_info, range(self.num_envs))

    # --- methods and attributes of the envs ----------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute, and return the results in order.

        Looks through wrappers; a dotted name reaches into attributes. After a fault an env may have
        been made anew and not been reset yet.
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
        self._lockstep.check_open()
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

    @uninterrupted_call
    def _begin_call(
        self,
        verb: str,
        indices: Sequence[int] | None,
        make_request: Callable[[Actor, list[int]], Request[Any]],
    ) -> None:
        chosen = range(self.num_envs) if indices is None else sorted(set(indices))
        self._lockstep.begin_call(verb, chosen, make_request)

    def _end_call(self, verb: str, asked: str, timeout: float | None) -> list[Any]:
        lockstep, pending = self._lockstep, Pending.CALL
        return lockstep.hand_out(
            pending, lambda: lockstep.fetch(verb, asked, pending, timeout, self._take_call)
        )

    def _take_call(self, verb: str, timeout: float | None) -> list[Any]:
        values = self._lockstep.end_call(verb, timeout)
        return [values.get(env_id) for env_id in range(self.num_envs)]

    def _resolve(self, indices: int | Sequence[int] | None) -> list[int]:
        if indices is None:
            return list(range(self.num_envs))
        asked = as_ids("indices", [indices] if isinstance(indices, int | np.integer) else indices)
        for index in asked:
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"env {index} does not exist; there are {self.num_envs}")
        return [index % self.num_envs for index in asked]

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

    def step_fetch(self, timeout: float | None = None) -> Stepped:
        """`step_wait` under OpenRL's name."""
        return self._end_step("step_fetch", "step_send", timeout)

    def call_send(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """`call_async` under OpenRL's name."""
        self._ask_call("call_send", name, args, kwargs)

    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """`call_wait` under OpenRL's name."""
        return tuple(self._end_call("call_fetch", "call_send", timeout))

    # --- end ---------------------------------------------------------------------------------

    @uninterrupted_call
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end their processes; called by `close`.

        Args:
            timeout: Seconds for a pending call and for the envs to close, before the processes
                are killed; None: `timeouts.close`.
            terminate: Kill the processes at once.
        """
        self._lockstep.close(timeout, terminate=terminate)
        self._finalizer.detach()

    def actor_pids(self) -> list[int]:
        """Return the process id of each actor that runs."""
        return [actor.child.pid for actor in self._fleet.actors if actor.child is not None]

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        faults = self._faults
        given_up = 0 if faults.recovery is None else len(faults.lost)
        return gather(self._fleet, self._log, faults.recovery, given_up)


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
