"""Methods, attributes and functions of envs that are called beside their steps and resets.

For vector envs and pools alike: one request per actor, and what came of it by env; and, of a pool,
for one env by itself, while others may be stepping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from envbus.actors.arrays.copies import own
from envbus.actors.protocol import Call, CallResult, Exec, SetAttr
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.errors import NoPeerError
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.wire.messages import Failed, FailureCode, Request, Tree
from envbus.runner.engine.engine import CallTicket, Engine
from envbus.runner.engine.env_faults import ADVICE, errors_of
from envbus.runner.errors import ActorLostError, EnvError, advise, failure_of
from envbus.runner.workers.config import check_kind
from envbus.runner.workers.env_placement import as_ids
from envbus.runner.workers.worker import Actor, ActorState, Lost

__all__ = ["EnvCalls", "MakeOne", "PendingCalls", "SubEnvironment"]

#: Makes the request to an actor, from it and the slots that are meant.
Make: TypeAlias = Callable[[Actor, list[int]], Request[CallResult]]
#: Makes the request about one env, from the slots that are meant: its own.
MakeOne: TypeAlias = Callable[[list[int]], Request[CallResult]]
_LOST = (FailureCode.PEER_LOST, FailureCode.NO_PEER)


class PendingCalls(msgspec.Struct):
    """Requests under way, and what came of those that have ended."""

    #: By index of the actor: it, which of its envs, and the request.
    under_way: dict[int, tuple[Actor, list[int], CallTicket]] = msgspec.field(default_factory=dict)
    #: By env: what was returned; None where it raised.
    values: dict[int, Any] = msgspec.field(default_factory=dict)
    #: What envs raised, with the exception that it was, if that could be rebuilt.
    errors: list[tuple[EnvError, Exception | None]] = msgspec.field(default_factory=list)
    #: Actors that did not answer in time, and those whose requests failed of something else.
    late: list[Actor] = msgspec.field(default_factory=list)
    failed: list[tuple[Actor, Failed]] = msgspec.field(default_factory=list)


class EnvCalls:
    """Asks envs what is no step or reset, while others may be stepping.

    Args:
        engine: Takes what comes.
    """

    def __init__(self, engine: Engine) -> None:
        self._fleet = engine.fleet
        self._engine = engine
        self._placement = engine.placement
        self._faults = engine.faults
        self._timeouts = engine.fleet.config.timeouts

    def ask(self, env_ids: Sequence[int], make: Make, *, wait: bool) -> PendingCalls:
        """Ask some envs, by one request per actor.

        Args:
            env_ids: Which.
            make: Makes the requests.
            wait: Wait for an actor that is being started again; else it is lost.

        Raises:
            ActorLostError: An actor is not there. Nothing stays asked.
            RestartLimitError: Likewise, for good.
            EncodeError: A request cannot be sent. Nothing stays asked.
        """
        self._engine.finish_words()
        asked = PendingCalls()
        chosen = list(self._placement.by_actor(env_ids))
        began = time.monotonic()
        # Before any is asked: where Ctrl-C breaks this off, nothing was.
        while wait and any(actor.state is not ActorState.READY for actor, _ in chosen):
            for actor, _ in chosen:
                self._wait_for(actor, began)
        try:
            for actor, members in chosen:
                if actor.state is not ActorState.READY:
                    text = f"{actor.describe()} is being started again; ask later"
                    self._raise_lost(actor, text, advice=None)
                slots = [env_id - actor.env_ids.start for env_id in members]
                try:
                    ticket = self._engine.ask_beside(actor, make(actor, slots), self._timeouts.call)
                except NoPeerError:
                    reason = self._fleet.why_gone(actor)
                    # Its exit is told later.
                    self._faults.end_incarnations(actor.env_ids, reason, actor.cause)
                    self._raise_lost(actor, reason)
                asked.under_way[actor.index] = actor, members, ticket
        except BaseException:
            self.drop(asked)
            raise
        return asked

    @uninterrupted_call
    def ask_one(self, env_id: int, make: MakeOne) -> Any:
        """Ask an env's actor something about that env alone, and wait for the answer.

        Raises:
            ValueError: There is no such env.
            Exception: As from `ask` and `raise_loss`, or what the env raised.
        """
        (env_id,), num_envs = as_ids("env_id", [env_id]), self._fleet.num_envs
        if not 0 <= env_id < num_envs:
            raise ValueError(f"unknown env id {env_id}; there are envs 0 to {num_envs - 1}")
        if env_id in self._faults.lost:
            raise self._faults.loss(env_id)
        asked = self.ask([env_id], lambda _, slots: make(slots), wait=False)
        self.wait(asked)
        self.raise_loss(asked)
        for error, original in asked.errors:
            raise failure_of([error], [original])
        return asked.values[env_id]

    def wait(self, asked: PendingCalls, deadline: float = math.inf) -> list[Actor]:
        """Wait for the requests' ends; return who has not answered when `deadline` has passed.

        After an exception it can be called again.
        """
        while True:
            for index, (actor, members, ticket) in list(asked.under_way.items()):
                if ticket.event is not None:
                    del asked.under_way[index]
                    self._take(asked, actor, members, ticket)
            lost = any(failed.code in _LOST for _, failed in asked.failed)
            if not asked.under_way or lost:
                asked.errors.sort(key=lambda pair: pair[0].env_id)
                return []
            left = deadline - time.monotonic()
            if left <= 0:
                return [actor for actor, _, _ in asked.under_way.values()]
            self._engine.take_events(left)

    def drop(self, asked: PendingCalls) -> None:
        """Forget requests that are still under way."""
        for _, _, ticket in asked.under_way.values():
            self._engine.drop_beside(ticket)
        asked.under_way.clear()

    def raise_loss(self, asked: PendingCalls) -> None:
        """Raise what requests failed of, but for what envs raised.

        Raises:
            ActorLostError: An actor has ended.
            EnvbusError: Something else.
        """
        if asked.failed:
            self.drop(asked)
            actor, failed = asked.failed[0]
            if failed.code in _LOST:
                self._raise_lost(actor, failed.message)
            raise failure_to_error(failed, 0)

    def _take(
        self, asked: PendingCalls, actor: Actor, members: list[int], ticket: CallTicket
    ) -> None:
        """Take in how a request has ended."""
        event = ticket.event
        if isinstance(event, Lost):
            if event.failed.code is FailureCode.TIMEOUT:
                asked.late.append(actor)
            asked.failed.append((actor, event.failed))
            return
        assert event is not None
        result: CallResult = event.reply
        asked.values.update(zip(members, result.values.value, strict=True))
        asked.errors += errors_of(actor, result.errors)

    def _wait_for(self, actor: Actor, began: float) -> None:
        """Wait for an actor that is being started again; a remote one has to come by itself."""
        timeout = self._timeouts.call if actor.remote else self._timeouts.start
        deadline = math.inf if timeout is None else began + timeout
        while actor.state is not ActorState.READY:
            if actor.env_ids.start in self._faults.lost:
                raise self._faults.loss(actor.env_ids.start)
            left = deadline - time.monotonic()
            if left <= 0:
                missing = "no remote actor took its place" if actor.remote else "not started again"
                self._raise_lost(actor, f"{actor.describe()}: {missing} in {timeout} s")
            self._engine.take_events(left)

    def _raise_lost(self, actor: Actor, reason: str, advice: str | None = ADVICE) -> None:
        if self._faults.recovery is not None:
            advice = "its envs are started again: what comes next says so"
        if advice is not None:
            reason = advise(reason, advice)
        raise ActorLostError(reason, env_ids=actor.env_ids, actor=actor.name)


class SubEnvironment:
    """One env of a pool, in its actor.

    Its methods wait for the answer, and for the end of a step of the same actor that is under
    way. They raise what the env raises; `ActorLostError` if its actor is not there now;
    `RequestTimeoutError` after `timeouts.call`.

    Attributes:
        env_id: Its number in the pool.
    """

    def __init__(self, ask: Callable[[int, MakeOne], Any], env_id: int) -> None:
        self._ask = ask
        self.env_id = env_id

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, or read an attribute; looks through wrappers.

        After a fault the env may have been made anew and not been reset yet.
        """
        check_kind("name", name, str, example='"render"')
        positional, named = Tree(own(args)), Tree(own(kwargs))
        return self._ask(
            self.env_id,
            lambda slots: Call(name=name, args=positional, kwargs=named, slots=slots),
        )

    def get_attr(self, name: str) -> Any:
        """Return an attribute; one that is a method is called without arguments."""
        return self.call(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute."""
        check_kind("name", name, str, example='"gravity"')
        values = Tree([own(value)])
        self._ask(self.env_id, lambda slots: SetAttr(name=name, values=values, slots=slots))

    def exec_func(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `func(env, *args, **kwargs)`, run beside the env; local actors only."""
        what, positional, named = Tree(func), Tree(own(args)), Tree(own(kwargs))
        return self._ask(
            self.env_id,
            lambda slots: Exec(function=what, args=positional, kwargs=named, slots=slots),
        )

    def render(self) -> Any:
        """Return what the env draws."""
        return self.call("render")

    def __repr__(self) -> str:
        return f"SubEnvironment({self.env_id})"
