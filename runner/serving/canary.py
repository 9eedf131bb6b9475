"""Which of several models an episode gets: a share of the episodes gets another one. Pure.

By a seeded hash of the episode's id: an episode stays with its model, also after a restart of the
server, and nothing is kept for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from envbus.bus.errors import ConfigError

__all__ = ["Split", "parse_canaries"]

_RANGE: Final = 2**64


class Split:
    """Shares out episodes.

    Args:
        main: Name of the model that gets the rest.
        shares: Part of the episodes by name of another model, over 0; below 1 together.
        seed: Another one has other episodes among a share.

    Raises:
        ConfigError: A share is none, a name is there twice, or the seed is too large.

    Attributes:
        names: The main one first.
    """

    def __init__(
        self, main: str, shares: Mapping[str, float] | None = None, *, seed: int = 0
    ) -> None:
        shares = shares or {}
        for name, share in shares.items():
            if not 0.0 < share < 1.0:
                raise ConfigError(
                    f"the share of {name} is over 0 and below 1, 0.1 for example, not {share:g}"
                )
        if (total := sum(shares.values())) >= 1.0:
            raise ConfigError(
                f"all canaries together have less than 1 of the episodes, not {total:g}"
            )
        if main in shares:
            raise ConfigError(f"{main} is served anyway: name another model as a canary of it")
        self.names: Sequence[str] = (main, *shares)
        try:
            self._key = seed.to_bytes(16, "big", signed=True)
        except OverflowError as exc:
            raise ConfigError(f"the seed has 128 bits at most, which {seed} has not") from exc
        #: Upper end of the hashes of each, but for the main one.
        self._ends: list[tuple[float, str]] = []
        end = 0.0
        for name, share in shares.items():
            end += share
            self._ends.append((end, name))

    def choose(self, episode_id: str) -> str:
        """Return the name of an episode's model."""
        if not self._ends:
            return self.names[0]
        data = episode_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(data, digest_size=8, key=self._key).digest()
        place = int.from_bytes(digest, "big") / _RANGE
        for end, name in self._ends:
            if place < end:
                return name
        return self.names[0]


def parse_canaries(texts: Sequence[str]) -> dict[str, float]:
    """Return shares by name of what a command names: `model2.onnx=0.1`.

    Raises:
        ConfigError: It names none, or one twice.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            share = float(number)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"a canary is a policy and its share, model2.onnx=0.1, not {text!r}")
        if name in shares:
            raise ConfigError(f"{name} is named as a canary twice")
        shares[name] = share
    return shares
