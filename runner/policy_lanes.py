"""The asking side of policy workers: a lane to each, requests, and what became of them.

Leaves out what is asked (`remote_policy.py`), and who is there to be asked (`policy_roster.py`).
Each asker has a broker of its own, so that a message goes to the worker and back without passing
anybody: no process has to poll for another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from envbus.actors.protocol import MapBlocks
from envbus.bus.broker import Broker, failure_to_error
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import BrokerConfig, Complete, FailLocal, PeerReady
from envbus.bus.codec import decode, encode
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    DecodeError,
    NoPeerError,
    OverloadedError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.lane import LANES_EXIST
from envbus.bus.lane_router import LaneRouter
from envbus.bus.messages import Failed, FailureCode, Payload, Reply, Request
from envbus.bus.spinning import CHILD_SPIN_SECONDS
from envbus.bus.transport import Frames
from envbus.runner.links import usable_cores
from envbus.runner.policy_roster import LOOK_INTERVAL, PolicyRoster

__all__ = ["Asking", "PolicyLanes"]

#: Seconds that a first request waits for any worker's hello, so that it is under way when `ask`
#: returns, and for those of all. A worker that computes says it later.
_HELLO_TIMEOUT: Final = 1.0
_ALL_HELLOS_TIMEOUT: Final = 0.05
#: How often a request is asked whose worker was lost. The broker may send it to a second worker
#: each time, so that one that kills whoever computes it ends five lives at most. Not fewer, as
#: workers that died together are noticed one by one.
_MAX_ASKS: Final = 3


class Asking(msgspec.Struct, eq=False):
    """A request, from `ask` until its end was taken."""

    to: str
    type_name: str
    frames: Frames
    timeout: float
    deadline: float
    asks: int = 0
    wire_id: int = 0
    #: None until it ends: its reply, or what is to be raised.
    end: Complete | Exception | None = None


class PolicyLanes:
    """One asker. Used by one thread, in the process that made it.

    Args:
        directory: The workers'.
        max_in_flight: Most requests that may be unsettled at one time.

    Raises:
        ConfigError: This platform has no lanes.
    """

    def __init__(self, directory: Path, max_in_flight: int) -> None:
        if not LANES_EXIST:
            raise ConfigError("policy workers need Unix sockets that keep messages apart: Linux")
        self._max_in_flight = max_in_flight
        identity = f"asker.{os.getpid()}.{secrets.token_hex(6)}"
        # It waits for one worker, not for many who need the cores: as long as a child may.
        router = LaneRouter(spin=usable_cores() > 1, spin_seconds=CHILD_SPIN_SECONDS)
        limits = BrokerConfig(max_in_flight_per_peer=max_in_flight + 16)
        self._broker = Broker(router, BrokerCore(limits))
        self._roster = PolicyRoster(directory, identity, max_in_flight, router, self._broker)
        self._asked: dict[int, Asking] = {}
        #: Those that wait for a worker.
        self._held: list[Asking] = []
        #: Whether the first hellos have been waited for.
        self._greeted = False
        self._closed = False
        disown_in_forks(self)

    @property
    def names(self) -> list[str]:
        """The workers that are ready."""
        return self._roster.names

    def ask(self, to: str, request: Request[Any], timeout: float) -> Asking:
        """Send a request to a worker or service; `wait_for` returns its reply.

        While nobody is there to take it, it waits until somebody is.

        Raises:
            OverloadedError: Too many are unsettled. Nothing was sent.
            EncodeError: It cannot be sent.
            ClosedError: This was closed.
        """
        return hand_out(lambda: self._ask(to, request, timeout), self.forget)

    def change_favourite(self) -> None:
        """The worker that is asked first is crowded: maybe ask another one."""
        self._roster.change_favourite()

    def wait_for(self, asking: Asking) -> Reply:
        """Return the reply to a request.

        Raises:
            RequestError: There is none: time-out, lost worker, error in the policy, ...
            RestartLimitError: No worker is left, nor will be.
            ClosedError: This, or the workers, were closed.
        """
        while (end := asking.end) is None:
            self._check_usable()
            self._poll(asking.timeout)
        if isinstance(end, Exception):
            raise end
        reply_type = Payload.registry.get(end.header.payload_type)
        if reply_type is None or not issubclass(reply_type, Reply):
            raise DecodeError(f"{asking.to} answered with {end.header.payload_type}")
        return decode(reply_type, end.frames, writable=True)

    @uninterrupted_call
    def ask_again(self, asking: Asking, to: str) -> None:
        """Ask somebody else what was answered, for what it is worth, within the same time."""
        asking.end = None
        asking.to = to
        self._send(asking)

    def pause(self, asking: Asking, seconds: float) -> None:
        """Let some time pass, within that of a request."""
        until = min(time.monotonic() + seconds, asking.deadline)
        while (left := until - time.monotonic()) > 0:
            self._poll(left)

    @uninterrupted_call
    def forget(self, asking: Asking) -> None:
        """Give a request up. Idempotent."""
        if asking.wire_id and self._asked.pop(asking.wire_id, None) is not None:
            self._broker.cancel(asking.wire_id)
        with contextlib.suppress(ValueError):
            self._held.remove(asking)
        asking.end = asking.end or ClosedError("this request was given up")

    @uninterrupted_call
    def share(self, arena_fd: int, size: int, layout: MapBlocks) -> str:
        """Let workers read an arena: see `PolicyRoster.share`."""
        self._check_usable()
        return self._roster.share(arena_fd, size, layout)

    @uninterrupted_call
    def close(self) -> None:
        """Let go of all lanes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._broker.close()
        self._roster.unshare()

    def disown(self) -> None:
        """In a forked copy: be closed."""
        self._closed = True

    # --- requests ----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this was closed, or belongs to the process this was forked from")

    def _unsettled(self) -> int:
        return len(self._asked) + len(self._held)

    def _ask(self, to: str, request: Request[Any], timeout: float) -> Asking:
        self._check_usable()
        if self._unsettled() >= self._max_in_flight:
            self._poll(0.0)  # some may have ended that nobody waits for
        if (unsettled := self._unsettled()) >= self._max_in_flight:
            raise OverloadedError(
                f"{unsettled} requests are in flight, which is the limit; collect some, or raise "
                "max_in_flight",
                request_id=0,
                peer=to,
            )
        deadline = time.monotonic() + timeout
        asking = Asking(to, type(request).__name__, encode(request), timeout, deadline)
        if self._roster.somebody_is_missing:
            self._look_for_workers()
        if self._roster.silent:
            self._hear_hellos(asking)
        self._send(asking)
        return asking

    def _send(self, asking: Asking) -> None:
        left = asking.deadline - time.monotonic()
        if left <= 0:
            asking.end = self._too_late(asking)
            return
        to: bytes | str = asking.to
        if not self._asked and not asking.asks:
            # Brokers do not know of each other's requests: by load alone, all askers would begin
            # with the same worker. And who was busy just now is awake.
            to = self._roster.favourite_for(asking.to) or to
        try:
            asking.wire_id = self._broker.ask(
                to, asking.type_name, asking.frames, timeout=left, idempotent=True
            )
        except NoPeerError:
            self._held.append(asking)
        else:
            asking.asks += 1
            self._asked[asking.wire_id] = asking

    def _hear_hellos(self, asking: Asking) -> None:
        """Wait a little for those whose lanes were opened, so that a request is under way."""
        begun = time.monotonic()
        while not self.names or not self._greeted:
            waited = time.monotonic() - begun
            if waited >= (_ALL_HELLOS_TIMEOUT if self.names else _HELLO_TIMEOUT):
                break
            self._poll(min(LOOK_INTERVAL, asking.timeout))
            if not self._roster.silent:
                break
        self._greeted = bool(self.names)
        self._poll(0.0)

    @uninterrupted_call
    def _poll(self, timeout: float) -> None:
        """Take in what comes within `timeout` seconds; returns earlier if something does."""
        if self._held or self._roster.somebody_is_missing:
            self._look_for_workers()
            timeout = min(timeout, LOOK_INTERVAL)
        somebody_is_ready = False
        for outcome in self._broker.poll(timeout):
            if type(outcome) is Complete:
                asking = self._asked.pop(outcome.wire_id, None)
                if asking is not None:
                    asking.end = outcome
            elif type(outcome) is FailLocal:
                self._on_failure(outcome)
            elif type(outcome) is PeerReady:
                self._roster.on_hello(outcome)
                somebody_is_ready = True
        self._roster.drop_hung_up()
        if self._held and (somebody_is_ready or self._held[0].deadline <= time.monotonic()):
            held, self._held = self._held, []
            for asking in held:
                self._send(asking)

    def _on_failure(self, outcome: FailLocal) -> None:
        asking = self._asked.pop(outcome.wire_id, None)
        if asking is None:
            return
        failed = outcome.failed
        if failed.code is FailureCode.PEER_LOST and asking.asks < _MAX_ASKS:
            self._send(asking)
            return
        if failed.code is FailureCode.TIMEOUT:
            self._roster.avoid(failed.peer)
        if failed.code is FailureCode.PEER_LOST and (why := self._roster.why_it_ended(failed.peer)):
            text = f"{asking.type_name} failed {asking.asks} times; at last, {why}"
            failed = msgspec.structs.replace(failed, message=text)
        asking.end = failure_to_error(failed, outcome.wire_id)

    def _too_late(self, asking: Asking) -> Exception:
        why = self._roster.describe_board()
        text = f"no worker was ready within {asking.timeout:g} s{'; ' if why else ''}{why}"
        return failure_to_error(
            Failed(code=FailureCode.TIMEOUT, message=text, peer=asking.to), asking.wire_id
        )

    def _look_for_workers(self) -> None:
        """Find workers that are up; end what waits for some that never come."""
        error = self._roster.look()
        if error is not None:
            for asking in self._held:
                asking.end = error
            self._held.clear()
