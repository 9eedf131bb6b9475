"""Where a broker of this host can be reached without ZeroMQ. Pure.

A lane's address follows from that of the broker. It is an abstract one: no file, and none is left
behind; it belongs to the network namespace, as a loopback port does.
"""

from __future__ import annotations

import ipaddress
import sys
from typing import Final

__all__ = ["ADDRESSES_EXIST", "INTRODUCTION", "introduced", "lane_address", "path_of"]

#: Whether this platform has sockets without a file.
ADDRESSES_EXIST: Final = sys.platform == "linux"
#: First frame of the first packet; the second is the identity.
INTRODUCTION: Final = b"envbus lane 1"
#: Longest identity, as ZeroMQ has it.
_MAX_IDENTITY_BYTES: Final = 255


def path_of(endpoint: str) -> str | None:
    """Return the file of an `ipc://` endpoint, which `lane_address` asks about; else None."""
    scheme, _, path = endpoint.partition("://")
    return path if scheme == "ipc" and path and not path.startswith("@") else None


def lane_address(endpoint: str, file: tuple[int, int] | None = None) -> bytes | None:
    """Return the address of the lane beside `endpoint`, or None if there can be none.

    Args:
        endpoint: What the broker is bound to.
        file: Device and inode of an `ipc://` endpoint's file, which tell it from one of that
            path in another container; None: there is none.
    """
    scheme, _, address = endpoint.partition("://")
    if path_of(endpoint) is not None:
        return None if file is None else b"\0envbus.lane.ipc.%x.%x" % file
    if scheme != "tcp":
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        number = int(port)
    except ValueError:
        return None  # a name, or a wildcard
    if not ip.is_loopback or not 0 < number < 1 << 16:
        return None
    return f"\0envbus.lane.tcp.{ip}.{number}".encode()


def introduced(frames: list[bytes]) -> bytes | None:
    """Return the identity of who begins with these frames; None: that is nobody."""
    if len(frames) != 2 or frames[0] != INTRODUCTION:
        return None
    identity = frames[1]
    if not 0 < len(identity) <= _MAX_IDENTITY_BYTES or identity[0] == 0:
        return None
    return identity
