"""Under which name a gateway's clients join the broker: it says whose token was shown, and whence.

The owner of the broker reads it. Nobody else can have made it: it is signed with a secret of the
gateway. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NamedTuple

__all__ = ["GatewayClient", "client_of", "identity_of"]

_PREFIX: Final = b"gateway."
#: Characters of the signature; those of an identity are 255 at most.
_SIGNATURE: Final = 32


class GatewayClient(NamedTuple):
    """Who has come in at a gateway."""

    #: Of the token that was shown; "": it has no name, or none is wanted.
    name: str
    #: Host and port.
    address: str


def identity_of(client: GatewayClient, secret: bytes, nonce: str) -> bytes:
    """Return the routing id of a client's connection to the broker.

    Args:
        client: Its name and address have no blanks, and 180 characters together at most.
        secret: Of this gateway.
        nonce: Letters and digits; another one each time.
    """
    told = f"{nonce} {client.address} {client.name}".encode()
    return _PREFIX + _sign(told, secret) + b"." + told


def client_of(identity: bytes, secret: bytes) -> GatewayClient | None:
    """Return whose identity this is; None: it is not of this gateway."""
    end = len(_PREFIX) + _SIGNATURE
    signature, told = identity[len(_PREFIX) : end], identity[end + 1 :]
    if not identity.startswith(_PREFIX) or identity[end : end + 1] != b".":
        return None
    if not hmac.compare_digest(signature, _sign(told, secret)):
        return None
    _, address, name = told.decode().split(" ")
    return GatewayClient(name, address)


def _sign(told: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, told, hashlib.sha256).hexdigest()[:_SIGNATURE].encode()
