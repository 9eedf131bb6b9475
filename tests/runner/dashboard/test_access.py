"""Who may see the page."""

from __future__ import annotations

import pytest

from envbus.runner.dashboard.access import HEADERS, Access

ACCESS = Access("token", "ticket", {"localhost", "Box-1"}, 8765)


@pytest.mark.parametrize(
    ("host", "meant"),
    [
        ("127.0.0.1:8765", True),
        ("127.0.0.1", True),
        ("[::1]:8765", True),
        ("[::1]", True),
        ("10.0.0.5:80", True),
        ("localhost:9000", True),  # by way of `ssh -L`
        ("LOCALHOST", True),
        ("box-1:8765", True),
        ("evil.example:8765", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[::1", False),
        ("[::1]evil.example", False),
        ("[evil.example]", False),
        ("a@127.0.0.1", False),
        ("", False),
        (":8765", False),
    ],
)
def test_only_ip_addresses_and_own_names_mean_this_host(host: str, meant: bool) -> None:
    assert ACCESS.is_meant(host) == meant


def test_the_token_and_the_ticket_are_two_things() -> None:
    assert ACCESS.has_token("token")
    assert not any(map(ACCESS.has_token, ("", "toke", "tokens", "ticket", "tök\udcffen")))
    assert ACCESS.has_ticket("envbus-8765=ticket")
    assert ACCESS.has_ticket("other=1;envbus-8765=ticket ; envbus-8766=token; alone")
    assert not ACCESS.has_ticket("envbus-8765=token")
    assert not ACCESS.has_ticket("envbus-8766=ticket")
    assert not ACCESS.has_ticket("envbus-8765")
    assert not ACCESS.has_ticket("")


def test_other_pages_of_this_host_do_not_ask_for_this_one() -> None:
    assert [ACCESS.is_asked_here(site) for site in ("", "none", "same-origin")] == [True] * 3
    assert not ACCESS.is_asked_here("same-site")
    assert not ACCESS.is_asked_here("cross-site")


def test_scripts_cannot_read_the_cookie_and_the_page_takes_none_from_elsewhere() -> None:
    assert ACCESS.set_cookie(tls=False) == ("envbus-8765=ticket; Path=/; HttpOnly; SameSite=Strict")
    assert ACCESS.set_cookie(tls=True).endswith("; Secure")
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
