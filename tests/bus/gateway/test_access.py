from __future__ import annotations

import pytest

from envbus.bus.gateway.access import (
    TurnedAwayError,
    check_token,
    is_welcome_origin,
    shown_token,
)


def test_only_a_right_token_passes_and_says_whose_it_is() -> None:
    assert check_token("correct", {"": "correct"}) == ""
    assert check_token("correct", {"a": "other", "b": "correct"}) == "b"
    for wrong in ("", "correc", "correctt", "Correct", "kørrect", "\ud800"):
        with pytest.raises(TurnedAwayError, match="token is wrong"):
            check_token(wrong, {"a": "other", "b": "correct"})


@pytest.mark.parametrize(
    ("authorization", "path", "token"),
    [
        ("Bearer abc", "/", "abc"),
        ("bearer  abc ", "/?token=other", "abc"),
        (None, "/?token=abc", "abc"),
        (None, "/game?level=2&token=a%2Bb", "a+b"),
        (None, "/?token=a+b==", "a+b=="),
        ("Basic abc", "/", None),
        (None, "/", None),
        (None, "/?" + "&".join(["token=x"] * 17), None),
        (None, "//[", None),
    ],
)
def test_a_token_is_taken_from_the_header_or_the_query(
    authorization: str | None, path: str, token: str | None
) -> None:
    assert shown_token(authorization, path) == token


@pytest.mark.parametrize(
    ("origin", "welcome"),
    [
        (None, True),  # no browser
        ("http://localhost:8000", True),
        ("http://127.0.0.1", True),
        ("http://[::1]:3000", True),
        ("https://game.example", True),  # listed
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("https://game.example.evil.example", False),
        ("null", False),  # a file, or a frame of any site
        ("http://[", False),
        ("", False),
    ],
)
def test_pages_from_this_host_and_listed_ones_are_welcome(
    origin: str | None, welcome: bool
) -> None:
    assert is_welcome_origin(origin, ["https://game.example"]) is welcome


def test_a_star_lets_all_pages_connect() -> None:
    assert is_welcome_origin("https://evil.example", ["*"])
