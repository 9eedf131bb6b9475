"""Who is let in by a gateway: tokens, and the pages that browsers may connect from. Pure."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs, urlsplit

from envbus.bus.errors import EnvbusError
from envbus.bus.wire.messages import FailureCode

__all__ = ["TurnedAwayError", "check_token", "is_welcome_origin", "shown_token"]

_BEARER: Final = "bearer "


class TurnedAwayError(EnvbusError):
    """A connection ends for what came over it; the client is told `code` and text.

    Args:
        message: For people.
        code: For programs.
        request_id: The request that it answers; 0: none in particular.
    """

    def __init__(
        self, message: str, code: FailureCode = FailureCode.PROTOCOL, request_id: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


def check_token(shown: str, tokens: Mapping[str, str]) -> str:
    """Return whose token this is, in a time that does not depend on how much of it is right.

    Raises:
        TurnedAwayError: It is nobody's.
    """
    given, found = shown.encode("utf-8", "surrogatepass"), None
    for name, token in tokens.items():
        if hmac.compare_digest(given, token.encode()):
            found = name
    if found is None:
        raise TurnedAwayError("the token is wrong")
    return found


def shown_token(authorization: str | None, path: str) -> str | None:
    """Return the token of a WebSocket's HTTP request: in its header, or in its path's query."""
    if authorization is not None and authorization.lower().startswith(_BEARER):
        return authorization[len(_BEARER) :].strip()
    try:
        query = urlsplit(path).query
        # As `max_num_fields`: whoever sends many parameters keeps nobody else waiting.
        found = parse_qs(query.replace("+", "%2B"), max_num_fields=16).get("token", [])
    except ValueError:
        return None
    return found[0] if found else None


def is_welcome_origin(origin: str | None, listed: Sequence[str]) -> bool:
    """Whether a page from `origin` may connect; None: it is no browser that asks.

    Any page that the user's browser shows can reach this host. Welcome are those from this host
    and those listed. What the request names as its own host says nothing: a page can give its own
    name any address.
    """
    if origin is None or "*" in listed or origin in listed:
        return True
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
