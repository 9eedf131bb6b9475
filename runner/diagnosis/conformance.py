"""Runs all checks against a server, and tells what it does wrong."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import JoinBridge
from envbus.bus.errors import ConfigError
from envbus.bus.messages import Kind, Token
from envbus.runner.diagnosis.address import Address
from envbus.runner.diagnosis.checks import CHECKS
from envbus.runner.diagnosis.doctor import Means
from envbus.runner.diagnosis.links import LinkEndedError, open_link
from envbus.runner.diagnosis.scene import Check, FailedCheck, Scene, SkippedCheck
from envbus.runner.diagnosis.spaces import SpaceSampler
from envbus.runner.diagnosis.talk import BrokenRuleError, NoAnswerError, RefusedError, Talk

__all__ = ["Finding", "check_server"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check."""

    name: str
    #: Of docs/wire-protocol.md.
    section: str
    outcome: Literal["passed", "failed", "skipped"]
    #: Why it failed or was skipped.
    reason: str
    seconds: float


def check_server(
    address: Address, means: Means, timeout: float = 5.0, only: str = ""
) -> Iterator[Finding]:
    """Yield the outcome of each check, as soon as it is there.

    The server must answer requests for actions; what it is trained on meanwhile is nonsense.

    Args:
        address: With a carriage (`doctor.examine` finds it out).
        means: Token, keys, certificates.
        timeout: Seconds to wait for one answer.
        only: Run only the checks whose names hold this.

    Raises:
        ConfigError: No name holds `only`, or nobody could join: `envbus doctor` says why.
    """
    chosen = [check for check in CHECKS if only.lower() in check.name]
    if not chosen:
        raise ConfigError(
            f"no check is called {only!r}; there are {'; '.join(check.name for check in CHECKS)}"
        )

    def connect() -> Talk:
        link = open_link(
            address, timeout=timeout, token=means.token, tls=means.tls, keys=means.keys
        )
        talk = Talk(link, timeout)
        if means.token is not None and address.carriage == "stream":
            talk.send(Token(token=means.token), Kind.NOTICE)
        return talk

    for check in chosen:
        begin = time.monotonic()
        outcome, reason = _run(check, connect)
        yield Finding(check.name, check.section, outcome, reason, time.monotonic() - begin)


def _run(
    check: Check, connect: Callable[[], Talk]
) -> tuple[Literal["passed", "failed", "skipped"], str]:
    """Run a check on a connection of its own, so that none suffers from what another broke."""
    try:
        talk = connect()
    except Exception as exc:  # each library has its own
        raise ConfigError(f"there is no connection: {exc}; `envbus doctor` says more") from exc
    try:
        talk.say_hello(f"conformance-{secrets.token_hex(4)}")
        joined = talk.ask(JoinBridge(client="conformance"))
        agreement = Agreement.from_wire(joined.observation_space, joined.action_space)
        check.run(Scene(connect, talk, joined, SpaceSampler(agreement)))
    except FailedCheck as exc:
        return "failed", str(exc)
    except SkippedCheck as exc:
        return "skipped", str(exc)
    except SpaceMismatchError as exc:
        return "failed", f"BridgeJoined: {exc}"
    except RefusedError as exc:
        return "failed", f"a request that is right was refused: {exc}"
    except (BrokenRuleError, NoAnswerError) as exc:
        return "failed", str(exc)
    except LinkEndedError as exc:
        return "failed", f"the connection ended: {exc}"
    finally:
        talk.close()
    return "passed", ""
