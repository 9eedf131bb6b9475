"""Serves a client and gives it what goes wrong in real life, and tells how it bears that.

The client under test just runs: episodes in a loop, as its simulator does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gymnasium import Space

from envbus.bus.errors import EnvbusError
from envbus.bus.gateway import GatewayConfig
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.conformance import FailedCheck, Finding, SkippedCheck, finding_of

__all__ = ["Server", "check_client"]

#: Seconds of one look; Ctrl-C is heard in between.
_LOOK = 0.2
#: Steps that are looked at while nothing is wrong.
_CALM_STEPS = 50


class Server:
    """A bridge, with a gateway where the address needs one.

    Args:
        address: Where to listen; its transport: ZeroMQ if it names none.
        spaces: Observation and action space; None: the client's.
        token: Of the gateway.

    Raises:
        ConfigError, TransportError: The address cannot be used.
    """

    def __init__(
        self,
        address: Address,
        spaces: tuple[Space[Any], Space[Any]] | None = None,
        token: str | None = None,
    ) -> None:
        config = None
        if address.transport in ("stream", "websocket"):
            place = (address.url().rpartition("//")[2].rstrip("/"),)
            if address.transport == "stream":
                config = GatewayConfig(token=token, tcp=place)
            else:
                config = GatewayConfig(token=token, websocket=place)
        bind = address.url() if config is None else "tcp://127.0.0.1:*"
        self.bridge = ExternalEnvBridge(*(spaces or ()), bind=bind, gateway=config)

    @property
    def address(self) -> str:
        """Where clients connect to; port 0 is replaced by the real one."""
        return self.bridge.addresses[-1]

    def close(self) -> None:
        """Close the ports."""
        self.bridge.stop()


class _Session:
    """One bridge after the other at the same ports, answered by samples of the action space."""

    def __init__(self, open_server: Callable[[], Server], patience: float) -> None:
        self._open = open_server
        self.patience = patience
        self.server = open_server()
        #: Over all bridges: records that came, episodes that began and that ended.
        self.records = 0
        self.started = 0
        self.ended = 0
        self.rewarded = False
        self.off_policy = 0

    @property
    def bridge(self) -> ExternalEnvBridge:
        return self.server.bridge

    def until(
        self, there: Callable[[], bool], act: Callable[[BridgeResult], None] | None = None
    ) -> bool:
        """Serve until something is there; return whether it came in time."""
        deadline = time.monotonic() + self.patience
        while not there():
            if time.monotonic() > deadline:
                return False
            result = self.bridge.poll(_LOOK)
            self.records += len(result.observations)
            self.started += len(result.started)
            self.ended += len(result.ended)
            self.off_policy += len(result.off_policy_actions)
            self.rewarded |= any(any(by.values()) for by in result.rewards.values())
            (act or self.answer)(result)
        return True

    def answer(self, result: BridgeResult) -> None:
        """Act for all who wait."""
        self.bridge.send_actions(
            {
                episode_id: {agent: self._sample(agent) for agent in agents}
                for episode_id, agents in result.observations.items()
                if episode_id not in result.ended
            }
        )

    def reopen(self) -> None:
        """End all connections and forget all sessions, as a server does that was restarted."""
        self.server.close()
        self.server = self._open()

    def _sample(self, agent: Any) -> Any:
        space = self.bridge.action_space
        assert space is not None  # the client has joined
        spaces = getattr(space, "spaces", None)
        if self.bridge.is_multi_agent:
            assert isinstance(spaces, dict)
            space = spaces[agent]
        return space.sample()


def check_client(open_server: Callable[[], Server], patience: float = 60.0) -> Iterator[Finding]:
    """Yield what came of each check; the client is to be started after this has begun.

    Args:
        open_server: Opens the ports; called again after they were closed.
        patience: Seconds to wait for the client to do what is looked for.
    """
    session = _Session(open_server, patience)
    try:
        for name, section, check in _CHECKS:
            finding = finding_of(name, section, partial(_run, check, session))
            yield finding
            if finding.outcome == "failed" and check in (_joins, _steps):
                return  # nothing can be seen of one that is not there
    finally:
        session.server.close()


def _run(check: Callable[[_Session], None], session: _Session) -> None:
    try:
        check(session)
    except EnvbusError as exc:
        raise FailedCheck(f"{type(exc).__name__}: {exc}") from exc


def _joins(session: _Session) -> None:
    if not session.until(lambda: session.bridge.statistics().clients_now > 0):
        raise FailedCheck(
            f"nobody has joined in {session.patience:.3g} s: neither Hello nor JoinBridge came"
        )


def _steps(session: _Session) -> None:
    def there() -> bool:
        done = session.bridge.statistics()
        return done.actions + done.logged_actions >= _CALM_STEPS

    if not session.until(there):
        done = session.bridge.statistics()
        raise FailedCheck(
            f"{session.started} episodes were started and {done.actions + done.logged_actions} "
            f"actions taken in {session.patience:.3g} s; {_CALM_STEPS} were awaited"
        )


def _tells_rewards(session: _Session) -> None:
    if not session.until(lambda: session.rewarded):
        raise SkippedCheck("no reward but 0 was told: is that what the env gives?")


def _ends_episodes(session: _Session) -> None:
    if not session.until(lambda: session.bridge.statistics().ended > 0):
        raise FailedCheck(
            f"no EndEpisode came in {session.patience:.3g} s; are its episodes that long?"
        )


def _says_hello_first(session: _Session) -> None:
    strange = session.bridge.broker_statistics().stranger_frames
    if strange:
        raise FailedCheck(f"{strange} messages came before a Hello was answered")


def _says_nothing_malformed(session: _Session) -> None:
    malformed = session.bridge.broker_statistics().malformed
    if malformed:
        raise FailedCheck(f"{malformed} messages could not be read; the log says which")


def _makes_no_mistakes(session: _Session) -> None:
    refused = session.bridge.statistics().refused
    if refused:
        raise FailedCheck(
            f"{refused} requests were refused: values outside the spaces, or calls that do "
            "not fit their episodes"
        )


def _bears_a_late_action(session: _Session) -> None:
    if not session.bridge.statistics().actions:
        raise SkippedCheck("it chooses all actions itself")
    before = session.bridge.statistics().timeouts

    held: list[BridgeResult] = []  # all wait
    if not session.until(lambda: session.bridge.statistics().timeouts > before, held.append):
        for result in held:  # for the checks to come
            session.answer(result)
        raise SkippedCheck(
            f"its get_action waits for longer than {session.patience:.3g} s; give it a shorter "
            "time-out for this check"
        )
    _goes_on(session, "an action that came too late")


def _bears_a_failing_policy(session: _Session) -> None:
    if not session.bridge.statistics().actions:
        raise SkippedCheck("it chooses all actions itself")
    failed: list[str] = []

    def fail(result: BridgeResult) -> None:
        waiting = [episode for episode in result.observations if episode not in result.ended]
        failed.extend(waiting)
        session.bridge.fail(waiting, RuntimeError("the policy failed, for a test"))

    if not session.until(lambda: session.bridge.statistics().policy_errors > 0, fail):
        raise FailedCheck(f"no action was asked for in {session.patience:.3g} s")
    _goes_on(session, "a FAILURE in the place of an action")


def _resumes_when_its_lease_is_over(session: _Session) -> None:
    """As one that was stopped for long: its next message is answered with `not_joined`."""
    bridge = session.bridge

    def forget() -> None:
        for peer in list(bridge._dispatcher._names):
            bridge._broker.peer_gone(peer, "its lease is over, for a test")

    _resumes(
        session, forget, "it was told not_joined, as after a sleep that is longer than its lease"
    )


def _resumes_when_its_connection_was_cut(session: _Session) -> None:
    gateway = session.bridge.gateway
    if gateway is None:
        raise SkippedCheck("ZeroMQ connects again by itself")
    _resumes(session, lambda: os.kill(gateway.pid, signal.SIGKILL), "its connection was cut")


def _resumes(session: _Session, trouble: Callable[[], None], what: str) -> None:
    """Fail unless the client says hello again and goes on with its session."""
    if not session.until(lambda: session.bridge.statistics().episodes_now > 0):
        raise SkippedCheck("it has no open episode")
    before = session.bridge.statistics().resumed
    trouble()
    if not session.until(lambda: session.bridge.statistics().resumed > before):
        raise FailedCheck(
            f"after {what} it did not resume its session in {session.patience:.3g} s: say Hello "
            "again, and JoinBridge with resume"
        )
    _goes_on(session, what)


def _comes_back_to_a_server_that_was_restarted(session: _Session) -> None:
    session.reopen()
    _goes_on(session, "a lost connection, and a server that knows neither session nor episodes")


def _goes_on(session: _Session, what: str) -> None:
    """Fail unless the client takes more actions."""
    done = session.bridge.statistics()
    before = done.actions + done.logged_actions

    def there() -> bool:
        done = session.bridge.statistics()
        return done.actions + done.logged_actions >= before + 3

    if not session.until(there):
        raise FailedCheck(f"after {what} it took no more actions in {session.patience:.3g} s")


_CHECKS: list[tuple[str, str, Callable[[_Session], None]]] = [
    ("joins", "5", _joins),
    ("says hello first", "5", _says_hello_first),
    ("starts episodes and steps them", "10", _steps),
    ("tells rewards", "10", _tells_rewards),
    ("ends episodes", "10", _ends_episodes),
    ("makes no mistakes", "10", _makes_no_mistakes),
    ("resumes when its lease is over", "5", _resumes_when_its_lease_is_over),
    ("resumes when its connection was cut", "10", _resumes_when_its_connection_was_cut),
    ("bears a late action", "3", _bears_a_late_action),
    ("bears a failing policy", "5", _bears_a_failing_policy),
    (
        "comes back to a server that was restarted",
        "10",
        _comes_back_to_a_server_that_was_restarted,
    ),
    ("says nothing malformed", "8", _says_nothing_malformed),
]
