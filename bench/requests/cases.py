"""What is asked, and by which ways, by kind of comparison: the bus, policy workers, the bridge."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["CASES", "WAYS", "RequestCase", "Way"]


@dataclass(frozen=True)
class RequestCase:
    """What is asked, and what is measured of it."""

    name: str
    #: Of one observation, or of the array in an answer of the bus; empty: it has none.
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"
    rows: int = 1
    #: "latency" of one request at a time, "rate" of many.
    measured: tuple[str, ...] = ("latency",)
    #: Whether the bridge's servers have a network that chooses, or do not look.
    network: bool = False
    #: Of the bridge's rates.
    num_episodes: int = 1000
    num_clients: int = 50

    def to_json(self) -> str:
        """Return it as an argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> RequestCase:
        """Return what `to_json` was called on."""
        fields = json.loads(text)
        shape, measured = tuple(fields.pop("shape")), tuple(fields.pop("measured"))
        return cls(**fields, shape=shape, measured=measured)


@dataclass(frozen=True)
class Way:
    """One way to ask, which has a client of that name in the module of its kind."""

    name: str
    #: In whose environment its client and its server run; empty: this interpreter.
    library: str = ""
    #: Of the bridge's servers; empty: the client starts whom it asks.
    server: str = ""
    #: Which of the server's addresses it uses.
    address: int = 0
    #: Whether the rate of many requests is measured, too.
    rated: bool = True


_BOTH = ("latency", "rate")
CASES = {
    "bus": (
        RequestCase("signal", measured=_BOTH),  # a step where arrays are in shared memory
        RequestCase("one frame", (4 * 84 * 84,), measured=_BOTH),  # one pixel observation
        RequestCase("64 frames", (64 * 4 * 84 * 84,), measured=_BOTH),  # a batch of them
    ),
    "policy": (
        RequestCase("1 x 4 floats", (4,), "float32"),
        RequestCase("64 x 4 floats", (4,), "float32", rows=64),
        RequestCase("32 x 4 x 84 x 84 bytes", (4, 84, 84), rows=32),
    ),
    "bridge": (
        RequestCase("4 floats", (4,), "float32"),
        RequestCase("84 x 84 x 4 bytes", (4, 84, 84), measured=_BOTH),
        RequestCase("4 floats, MLP", (4,), "float32", measured=("rate",), network=True),
    ),
}
WAYS = {
    "bus": (Way("envbus"), Way("pyzmq"), Way("pipe")),
    "policy": (
        Way("policy alone"),
        Way("bus alone"),
        Way("policy worker"),
        Way("policy worker, shared rows"),
    ),
    "bridge": (
        Way("pyzmq", "serving", "pyzmq"),
        Way("pyzmq, Unix socket", "serving", "pyzmq", 1),
        Way("envbus", "serving", "envbus"),
        Way("envbus, ZeroMQ", "serving", "envbus"),
        Way("envbus, TCP", "serving", "envbus", 1, rated=False),
        Way("envbus, WebSocket", "serving", "envbus", 2, rated=False),
        Way("http, Unix socket", "serving", "http"),
        Way("grpc, Unix socket", "grpc", "grpc"),
    ),
}
