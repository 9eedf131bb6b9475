"""Policy servers to compare: `python -m envbus.bench.requests.bridge_servers WAY CASE`.

Prints a line with its addresses. Runs in an environment that has envbus, and grpcio if that is the
way. All answer with an action of CartPole; where the case says so a network chooses it, for all
that wait at a time, elsewhere it is always the same. Bare pyzmq looks at nothing, and answers with
ready-made bytes.
"""

from __future__ import annotations

import os
import pickle
import socketserver
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from gymnasium import spaces

from envbus.actors.external.protocol import ActionChosen
from envbus.bench.adapters.networks import NumpyNet, num_inputs, view
from envbus.bench.requests.cases import RequestCase
from envbus.bus.transport.zmq_sockets import router_socket
from envbus.bus.wire.codec import encode

__all__ = ["observation_of"]

#: Threads of servers that have them: the number of clients.
_THREADS = 50


ACTIONS = spaces.Discrete(2)


def space_of(case: RequestCase) -> spaces.Box:
    """Return the space of one observation."""
    high = 255 if case.dtype == "uint8" else 10
    return spaces.Box(0, high, case.shape, np.dtype(case.dtype).type)


def observation_of(case: RequestCase) -> npt.NDArray[Any]:
    """Return the observation that is sent."""
    space = space_of(case)
    space.seed(0)
    return space.sample()


def _policy(case: RequestCase) -> Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]:
    if not case.network:  # looks at nothing, as bare pyzmq does
        return lambda observations: np.zeros(len(observations), np.int64)
    net = NumpyNet(num_inputs(space_of(case)), 2)
    return lambda observations: net.act(view(np.stack(observations)))[0]


class _OneByOne:
    """The policy for a server with a thread per request, with a batch of all that wait meanwhile.

    Whoever comes first computes for all who came until then, as the bridge's loop does.
    """

    def __init__(self, case: RequestCase) -> None:
        self._policy = _policy(case)
        self._batches = case.network
        self._waiting: deque[tuple[npt.NDArray[Any], futures.Future[Any]]] = deque()
        self._turn = threading.Lock()

    def action(self, observation: npt.NDArray[Any]) -> Any:
        if not self._batches:
            return self._policy([observation])[0]
        future: futures.Future[Any] = futures.Future()
        self._waiting.append((observation, future))
        with self._turn:
            if not future.done():
                batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
                actions = self._policy([waiting for waiting, _ in batch])
                for (_, answer), action in zip(batch, actions, strict=True):
                    answer.set_result(action)
        return future.result()


def serve_pyzmq(case: RequestCase) -> None:
    """A ROUTER that sends back the header it got, and ready-made bytes."""
    router = router_socket(zmq.Context())
    port = router.bind_to_random_port("tcp://127.0.0.1")
    local = f"ipc://{_socket_file()}"
    router.bind(local)
    _say(f"tcp://127.0.0.1:{port} {local}")
    (answer,) = encode(ActionChosen(action=0))
    receive: Any = router.recv_multipart
    while True:
        peer, header, *_ = receive(copy=case.dtype != "uint8")  # large frames are not copied
        router.send_multipart([peer, header, answer])


def serve_envbus(case: RequestCase) -> None:
    """A loop over a bridge and its gateway."""
    from envbus.bus.gateway import GatewayConfig
    from envbus.runner import ExternalEnvBridge

    policy = _policy(case)
    local = ("127.0.0.1:0",)
    gateway = GatewayConfig(tcp=local, websocket=local)
    with ExternalEnvBridge(space_of(case), ACTIONS, gateway=gateway) as bridge:
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


def serve_http(case: RequestCase) -> None:
    """HTTP and pickle, as RLlib's PolicyServerInput had it; connections are kept, a thread each."""
    policy = _OneByOne(case)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer is one write

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = pickle.loads(body)  # noqa: S301 - the stand-in does as the original did
            answer = pickle.dumps({"action": policy.action(request["observation"])})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        request_queue_size = 128

    path = _socket_file()
    with Server(path, Handler) as server:
        _say(path)
        server.serve_forever()


def serve_grpc(case: RequestCase) -> None:
    """A unary call with raw bytes: what protobuf would do besides is left out."""
    import grpc

    policy = _OneByOne(case)

    def answer(request: bytes, context: Any) -> bytes:
        del context
        observation = np.frombuffer(request, case.dtype).reshape(case.shape)
        action: npt.NDArray[Any] = policy.action(observation)
        return action.tobytes()

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(futures.ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("policy", {"Act": handler}),)
    )
    path = _socket_file()
    server.add_insecure_port(f"unix:{path}")
    server.start()
    _say(path)
    threading.Event().wait()


SERVERS: dict[str, Callable[[RequestCase], None]] = {
    "pyzmq": serve_pyzmq,
    "envbus": serve_envbus,
    "http": serve_http,
    "grpc": serve_grpc,
}


def _socket_file() -> str:
    """Return where a server listens: in the folder of this process."""
    return os.path.join(os.getcwd(), "server")


def _say(line: str) -> None:
    print(line, flush=True)


def _end_with_input() -> None:
    """End with whoever started this process."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    SERVERS[sys.argv[1]](RequestCase.of(sys.argv[2]))
