"""`BusVectorEnv`: a drop-in for `gymnasium.vector.AsyncVectorEnv` over env actors.

Leaves out how a step is asked for and what comes of it (`lockstep.py`), failed envs
(`engine/engine.py`, `engine/env_faults.py`), processes (`workers/fleet.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, ClassVar, TypeAlias, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from typing_extensions import Unpack

from envbus.actors.arrays.copies import own
from envbus.actors.protocol import Call, Exec, SetAttr
from envbus.bus.errors import EnvbusError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.settings import check_number
from envbus.bus.wire.messages import Tree
from envbus.runner.engine.engine import Engine, Statistics
from envbus.runner.engine.env_results import Infos, merge_infos
from envbus.runner.vector.lockstep import Lockstep, PendingVerb
from envbus.runner.vector.lockstep_recycling import LockstepRecycling
from envbus.runner.vector.quick_steps import QuickSteps
from envbus.runner.vector.vector_spaces import choose_spaces
from envbus.runner.workers.actions import ActionStore
from envbus.runner.workers.config import (
    ActorSettings,
    FleetConfig,
    check_kind,
    choose_autoreset_mode,
    env_sources,
    with_settings,
)
from envbus.runner.workers.env_placement import as_ids
from envbus.runner.workers.local_fleet import make_fleet

__all__ = ["BusVectorEnv"]

R = TypeVar("R")

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
            Gymnasium id, `"module:function"`, or a value of `envbus.actors.env.source`. A
            factory may return a `gymnasium.vector.VectorEnv`, which then fills as many envs
            as it has. With `num_envs`: one function, or its import path, that is called with each
            env's index, from 0; an env that is made anew gets the same index.
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
        num_envs: How many envs the function `env_fns` makes; None: it is a sequence.
        **settings: About the actors: `num_actors`, `restart` and all else that `ActorSettings`
            explains.

    Raises:
        ConfigError: A setting cannot be used.
        ValueError: `worker` was given; the context is unknown; a custom space with shared memory.
        RuntimeError: The envs' spaces differ; the message names which.
        StartError: An actor did not come up.
        Exception: What an env's constructor raised. No process is left.
    """

    #: Whether infos are merged into one dict of arrays, as Gymnasium has it. If not, they are a
    #: dict by env of those that are not empty, as the envs returned them.
    _merges_infos: ClassVar[bool] = True

    @with_settings
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]] | str | Any]
        | Callable[[int], gymnasium.Env[Any, Any] | Any]
        | str,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: str | tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_envs: int | None = None,
        **settings: Unpack[ActorSettings],
    ) -> None:
        if worker is not None:
            raise ValueError(
                "`worker` replaces the loop of AsyncVectorEnv's processes, which envbus does not "
                "have; wrap the env, or use `exec_func` to run code beside it"
            )
        self.env_fns = env_sources("env_fns", env_fns, num_envs, '["CartPole-v1"] * 8')
        if not self.env_fns:
            raise ValueError("`env_fns` is empty; pass one factory or id per env")
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.observation_mode = observation_mode
        self.autoreset_mode = choose_autoreset_mode(autoreset_mode)
        self.max_concurrency = max_concurrency
        self._fleet = make_fleet(
            self.env_fns,
            self.autoreset_mode,
            FleetConfig.of(
                settings,
                shared_memory=shared_memory,
                context=context,
                max_concurrency=max_concurrency,
            ),
        )
        self.timeouts = self._fleet.config.timeouts
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
        self._engine = engine = Engine(
            name,
            fleet,
            self.single_observation_space,
            blocks,
            mode,
            all_or_nothing=True,
            as_they_come=False,
        )
        self._results = engine.results
        recycling = None
        if fleet.recycling is not None:
            recycling = LockstepRecycling(fleet.recycling, engine)
        self._lockstep = Lockstep(engine, actions, recycling)
        self._quick: QuickSteps | None = None
        #: The thread that is within `step`: two would wait for each other's.
        self._stepped_by: int | None = None
        if fleet.words is not None:
            infos = fleet.words.infos
            read = infos.merged if self._merges_infos else infos.infos
            self._quick = QuickSteps(fleet.words, engine, actions, self._lockstep, recycling, read)

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
        self._lockstep.begin_reset("reset_async", seed, options)

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

    def _end_reset(
        self, verb: str, asked: str, timeout: float | None
    ) -> tuple[Any, dict[str, Any]]:
        lockstep, pending = self._lockstep, PendingVerb.RESET
        return lockstep.hand_out(
            pending, lambda: lockstep.fetch(verb, asked, pending, timeout, self._take_reset)
        )

    def _take_reset(self, verb: str, timeout: float | None) -> tuple[Any, dict[str, Any]]:
        def first(infos: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return self._results.observations.batch(copy=self.copy), infos

        return self._take(PendingVerb.RESET, self._lockstep.end_reset(verb, timeout), first)

    # --- step --------------------------------------------------------------------------------

    def step(self, actions: Any) -> Stepped:
        """Advance all envs by one step.

        Args:
            actions: A batch of `action_space`, or a sequence of single actions where that is no
                Dict or Tuple: a list of tuples would be one part after the other, as in Gymnasium.

        Returns:
            Observations, rewards `(num_envs,)` float64, terminations and truncations
            `(num_envs,)` bool, and infos.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending, or another thread steps.
            ValueError, TypeError: Not one action per env. Nothing was sent.
            Exception: What an env raised, if it is not made anew.
        """
        thread = threading.get_ident()
        if self._stepped_by not in (None, thread):
            raise AlreadyPendingCallError(
                "Calling `step` while another thread does: one thread uses these envs, or a lock",
                "step",
            )
        self._stepped_by = thread
        quick, is_asked = self._quick, False
        if quick is not None and self._lockstep.is_quiet:
            before = quick.begun
            try:
                if quick.ask(actions) and quick.wait():
                    results, blocks = self._results, self._results.blocks
                    stepped: Stepped = (
                        results.observations.batch(copy=self.copy),
                        blocks.rewards.copy(),
                        blocks.terminations.copy(),
                        blocks.truncations.copy(),
                        quick.infos,
                    )
                    self._stepped_by = None  # not behind: Ctrl-C there would lose the step
                    quick.hand_out()
                    return stepped
            except BaseException as exc:  # also Ctrl-C: it can be fetched
                self._stepped_by = None
                quick.take_back(before)
                if isinstance(exc, EnvbusError):
                    self._lockstep.check_open()
                raise
            is_asked = quick.begun != before

        def step() -> Stepped:
            try:
                if not is_asked:  # also if a step is pending already: that is an error
                    self.step_async(actions)
                return self._fetch_step("step_wait", "step_async", None)
            finally:
                self._stepped_by = None

        # Handlers of signals are exchanged once for both, instead of twice.
        return self._lockstep.hand_out(PendingVerb.STEP, step)

    def step_async(self, actions: Any) -> None:
        """Ask all envs to advance by one step; `step_wait` returns the results.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending.
            ValueError, TypeError: Not one action per env. Nothing was sent.
        """
        quick = self._quick
        if quick is not None and self._lockstep.is_quiet:
            before = quick.begun
            try:
                if quick.ask(actions):
                    return
            except BaseException:  # also Ctrl-C: it can be fetched
                quick.take_back(before)
                raise
        self._lockstep.begin_step("step_async", actions)

    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Wait for the steps and return their results; errors as in `reset_wait`.

        Args:
            timeout: Seconds; None: `timeouts.step`.
        """
        quick = self._quick
        if (
            timeout is None
            and quick is not None
            and quick.asked
            and self._lockstep.is_quiet  # else it was begun to make it a round of messages
            and not self._fleet.closed
        ):
            try:
                if quick.wait():
                    stepped = self._stepped(quick.infos)
                    quick.hand_out()
                    return stepped
            except BaseException as exc:  # also Ctrl-C: it can be fetched
                quick.take_back()
                if isinstance(exc, EnvbusError):
                    self._lockstep.check_open()
                raise
        return self._end_step("step_wait", "step_async", timeout)

    def _end_step(self, verb: str, asked: str, timeout: float | None) -> Stepped:
        return self._lockstep.hand_out(
            PendingVerb.STEP, lambda: self._fetch_step(verb, asked, timeout)
        )

    def _fetch_step(self, verb: str, asked: str, timeout: float | None) -> Stepped:
        return self._lockstep.fetch(verb, asked, PendingVerb.STEP, timeout, self._take_step)

    def _take_step(self, verb: str, timeout: float | None) -> Stepped:
        return self._take(PendingVerb.STEP, self._lockstep.end_step(verb, timeout), self._stepped)

    def _stepped(self, infos: dict[Any, Any]) -> Stepped:
        results, blocks = self._results, self._results.blocks
        return (
            results.observations.batch(copy=self.copy),
            blocks.rewards.copy(),
            blocks.terminations.copy(),
            blocks.truncations.copy(),
            infos,
        )

    def _take(self, pending: PendingVerb, infos: Infos, make: Callable[[dict[Any, Any]], R]) -> R:
        """Return a round's results; if that fails, or an info does not fit, the next call does."""
        merged: dict[Any, Any] = infos
        misfit = None
        if self._merges_infos:
            engine = self._engine
            remote = engine.placement.remote_envs
            env_ids = range(self.num_envs)
            merged, misfit, strange = merge_infos(infos, self._add_info, env_ids, remote)
            if strange:
                engine.let_go(strange)
        try:
            if misfit is not None:
                raise misfit
            return make(merged)
        except Exception:
            self._lockstep.keep(pending, partial(make, merged))
            raise

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
        return self._end_call("call_wait", "call_async", timeout, tuple)

    def get_attr(self, name: str, indices: int | Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return an attribute of each env, or of those at `indices`, in order."""
        if indices is None:
            return self.call(name)
        chosen = self._resolve(indices)
        self._ask_call("call_async", name, (), {}, chosen)

        def form(values: list[Any]) -> tuple[Any, ...]:
            return tuple(values[index] for index in chosen)

        return self._end_call("call_wait", "call_async", None, form)

    def has_attr(self, name: str) -> bool:
        """Return whether every env has the attribute; a name is as in `get_attr`."""
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
        check_kind("name", name, str, example='"gravity"')
        chosen = self._resolve(indices)
        if broadcast or not isinstance(values, list | tuple):
            values = [values] * len(chosen)
        if len(values) != len(chosen):
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {len(chosen)} environments."
            )
        by_env = dict(zip(chosen, values, strict=True))
        self._lockstep.begin_call(
            "set_attr",
            chosen,
            lambda actor, slots: SetAttr(
                name=name,
                values=Tree([by_env[actor.env_ids[slot]] for slot in slots]),
                slots=slots,
            ),
        )
        self._end_call("set_attr", "set_attr", None, tuple)

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
        self._lockstep.begin_call(
            "exec_func_send",
            self._resolve(indices),
            lambda _, slots: Exec(function=what, args=positional, kwargs=named, slots=slots),
        )

    def exec_func_fetch(self, timeout: float | None = None) -> list[Any]:
        """Wait for `exec_func_send`'s results; errors as in `reset_wait`."""
        return self._end_call("exec_func_fetch", "exec_func_send", timeout, list)

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
        check_kind("name", name, str, example='"render"')
        # Copies: what is sent must not change under the sender's hands.
        positional, named = Tree(own(args)), Tree(own(kwargs))
        self._lockstep.begin_call(
            verb,
            indices,
            lambda _, slots: Call(name=name, args=positional, kwargs=named, slots=slots),
        )

    def _end_call(
        self,
        verb: str,
        asked: str,
        timeout: float | None,
        form: Callable[[list[Any]], R],
    ) -> R:
        lockstep, pending = self._lockstep, PendingVerb.CALL

        def end() -> R:  # in its form by now: Ctrl-C may come in whatever is done to it later
            return form(lockstep.fetch(verb, asked, pending, timeout, self._take_call))

        return lockstep.hand_out(pending, end)

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
        self._lockstep.begin_reset("reset_send", seed, options)

    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """`reset_wait` under OpenRL's name."""
        return self._end_reset("reset_fetch", "reset_send", timeout)

    def step_send(self, actions: Any) -> None:
        """`step_async` under OpenRL's name."""
        self._lockstep.begin_step("step_send", actions)

    def step_fetch(self, timeout: float | None = None) -> Stepped:
        """`step_wait` under OpenRL's name."""
        return self._end_step("step_fetch", "step_send", timeout)

    def call_send(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """`call_async` under OpenRL's name."""
        self._ask_call("call_send", name, args, kwargs)

    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """`call_wait` under OpenRL's name."""
        return self._end_call("call_fetch", "call_send", timeout, tuple)

    # --- end ---------------------------------------------------------------------------------

    @uninterrupted_call
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end their processes; called by `close`.

        Args:
            timeout: Seconds for a pending call and for the envs to close, before the processes
                are killed; None: `timeouts.close`.
            terminate: Kill the processes at once.
        """
        check_number("timeout", timeout, optional=True)
        self._lockstep.close(timeout, terminate=terminate)
        self._finalizer.detach()

    def __del__(self) -> None:
        """Leave the end to the finalizer: before Gymnasium 1.3 its own closed in any thread."""

    def __enter__(self) -> BusVectorEnv:
        """Return the env; the end of the block closes it, at once if it raised."""
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self.close(terminate=exc_type is not None)

    def actor_pids(self) -> list[int]:
        """Return the process id of each actor that runs."""
        return [actor.pid for actor in self._fleet.actors if actor.pid is not None]

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        return self._engine.statistics()


def _has_attr(env: gymnasium.Env[Any, Any], name: str) -> bool:
    first, *rest = name.split(".")
    try:
        reduce(getattr, rest, env.get_wrapper_attr(first))
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
