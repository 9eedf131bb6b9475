"""Who may see the page: whoever shows its token once, in a browser that means this host. Pure.

A browser sends a page's cookies to all ports of a host, and other pages may have it ask for what
they cannot read. So the cookie is of this run of the dashboard only, and what the browser says
about the page that asks (`Host`, `Sec-Fetch-Site`) counts, too.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from typing import Final

__all__ = ["HEADERS", "Access"]

#: Of each answer. Scripts, styles and pictures from here only, and no script in the page itself.
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
#: What a browser says of who asks: the page itself, or its user (who types an address).
_OWN_SITES: Final = ("", "none", "same-origin")


class Access:
    """Decides about requests.

    Args:
        token: What the page's first load has to show.
        ticket: What its cookie is, once it has; nobody else knows it.
        names: Host names by which this dashboard is reached, besides all IP addresses: those that
            resolve to it by the wish of another page's owner are none of them.
        port: At which it serves; it names the cookie, as one host may have several dashboards.
    """

    def __init__(self, token: str, ticket: str, names: Collection[str], port: int) -> None:
        self._token = token
        self._ticket = ticket
        self._names = {name.lower() for name in names}
        self.cookie = f"envbus-{port}"

    def is_meant(self, host: str) -> bool:
        """Whether a `Host` header means this host, and not a name that somebody has led to it."""
        name = host.rpartition(":")[0] if _has_port(host) else host
        if name.lower() in self._names:
            return True
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def is_asked_here(self, site: str) -> bool:
        """Whether it is this page that asks, or its user, by the header `Sec-Fetch-Site`."""
        return site in _OWN_SITES

    def has_token(self, shown: str) -> bool:
        """Whether this is the token. Takes as long for one that is nearly right."""
        return _equal(shown, self._token)

    def has_ticket(self, cookies: str) -> bool:
        """Whether a `Cookie` header is of a browser that has shown the token.

        What stands in quotes is not undone, as Python's own reader does: that takes it many
        seconds for a long one of anybody's.
        """
        pairs = (one.strip().partition("=") for one in cookies.split(";"))
        shown = [value for name, _, value in pairs if name == self.cookie]
        return _equal(shown[-1] if shown else "", self._ticket)

    def set_cookie(self, *, tls: bool) -> str:
        """Return the header `Set-Cookie` for a browser that has shown the token."""
        secure = "; Secure" if tls else ""
        return f"{self.cookie}={self._ticket}; Path=/; HttpOnly; SameSite=Strict{secure}"


def _equal(shown: str, wanted: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "replace"), wanted.encode())


def _has_port(host: str) -> bool:
    """Whether a port follows; colons in brackets are of an IPv6 address."""
    return host.rpartition("]")[2].count(":") == 1
