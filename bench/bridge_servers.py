"""Policy servers to compare: `python -m envbus.bench.bridge_servers WAY CASE`.

Prints a line of JSON with versions, and one with its addresses. Runs in an environment that has
envbus, and grpcio if that is the way. All answer with an action of CartPole;
where the case says so a network chooses it, elsewhere it is always the same. Bare pyzmq looks at
nothing, and answers with ready-made bytes.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from gymnasium import spaces

from envbus.actors.external.protocol import ActionChosen
from envbus.bench.networks import NumpyNet, num_inputs, view
from envbus.bus.codec import encode
from envbus.bus.zmq_sockets import router_socket

__all__ = ["CASES", "SERVERS", "BridgeCase", "case_named"]

#: Threads of servers that have them: the number of clients.
_THREADS = 50


@dataclass(frozen=True)
class BridgeCase:
    """What is asked."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    #: What is measured: "latency" of one client, "rate" of many.
    measured: tuple[str, ...]
    #: Whether a network chooses.
    network: bool = False

    @property
    def space(self) -> spaces.Box:
        """Of one observation."""
        high = 255 if self.dtype == "uint8" else 10
        return spaces.Box(0, high, self.shape, np.dtype(self.dtype).type)

    def observation(self, seed: int = 0) -> npt.NDArray[Any]:
        """Return one."""
        space = self.space
        space.seed(seed)
        return space.sample()


CASES = (
    BridgeCase("4 floats", (4,), "float32", ("latency",)),
    BridgeCase("84 x 84 x 4 bytes", (4, 84, 84), "uint8", ("latency", "rate")),
    BridgeCase("4 floats, MLP", (4,), "float32", ("rate",), network=True),
)
ACTIONS = spaces.Discrete(2)


def case_named(name: str) -> BridgeCase:
    """Return a case."""
    return next(case for case in CASES if case.name == name)


def _policy(case: BridgeCase) -> Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]:
    if not case.network:  # looks at nothing, as bare pyzmq does
        return lambda observations: np.zeros(len(observations), np.int64)
    net = NumpyNet(num_inputs(case.space), 2)
    return lambda observations: net.act(view(np.stack(observations)))[0]


def serve_pyzmq(case: BridgeCase) -> None:
    """A ROUTER that sends back the header it got, and ready-made bytes."""
    router = router_socket(zmq.Context())
    port = router.bind_to_random_port("tcp://127.0.0.1")
    _say(f"tcp://127.0.0.1:{port}")
    (answer,) = encode(ActionChosen(action=0))
    receive: Any = router.recv_multipart
    while True:
        peer, header, *_ = receive(copy=case.dtype != "uint8")  # large frames are not copied
        router.send_multipart([peer, header, answer])


def serve_envbus(case: BridgeCase) -> None:
    """A loop over a bridge and its gateway."""
    from envbus.bus.gateway import GatewayConfig
    from envbus.runner import ExternalEnvBridge

    policy = _policy(case)
    local = ("127.0.0.1:0",)
    gateway = GatewayConfig(tcp=local, websocket=local)
    with ExternalEnvBridge(case.space, ACTIONS, gateway=gateway) as bridge:
        _say(" ".join(bridge.addresses))
        while True:
            result = bridge.poll()
            episodes = [name for name in result.observations if name not in result.ended]
            if episodes:
                actions = policy([result.observations[name]["agent0"] for name in episodes])
                bridge.send_actions(
                    {
                        name: {"agent0": action}
                        for name, action in zip(episodes, actions, strict=True)
                    }
                )


def serve_http(case: BridgeCase) -> None:
    """HTTP and pickle, as RLlib's PolicyServerInput had it: a thread per connection."""
    policy = _policy(case)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = pickle.loads(body)  # noqa: S301 - the stand-in does as the original did
            action = policy([request["observation"]])[0]
            answer = pickle.dumps({"action": action})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket.listen(128)
    _say(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()


def serve_grpc(case: BridgeCase) -> None:
    """A unary call with raw bytes: what protobuf would do besides is left out."""
    import grpc

    policy = _policy(case)

    def answer(request: bytes, context: Any) -> bytes:
        del context
        observation = np.frombuffer(request, case.dtype).reshape(case.shape)
        return bytes(policy([observation])[0].tobytes())

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(futures.ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("policy", {"Act": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _say(f"127.0.0.1:{port}")
    threading.Event().wait()


SERVERS: dict[str, Callable[[BridgeCase], None]] = {
    "pyzmq": serve_pyzmq,
    "envbus": serve_envbus,
    "http": serve_http,
    "grpc": serve_grpc,
}


def _versions() -> dict[str, str]:
    found = {}
    for name in ("pyzmq", "msgspec", "numpy", "websockets", "requests", "grpcio"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _say(json.dumps(_versions()))
    SERVERS[sys.argv[1]](case_named(sys.argv[2]))
