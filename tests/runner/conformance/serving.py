"""Servers to look at: a real bridge, and ones that do something wrong."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import zmq
from gymnasium import spaces

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig
from envbus.bus.broker.loop import Broker
from envbus.bus.errors import ProtocolError
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.transport.zmq_sockets import ZmqRouter
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Kind, Payload
from envbus.runner.bridge.bridge import ExternalEnvBridge

#: What a server answers to a message; None: nothing.
Answer: TypeAlias = Callable[[Header, "Payload | None"], "Payload | None"]
OBSERVATIONS = spaces.Dict(
    {"image": spaces.Box(0, 255, (4, 4), "uint8"), "speed": spaces.Box(-1.0, 1.0, (2,))}
)
ACTIONS = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))])


@contextmanager
def bridge(
    observation_space: Any = OBSERVATIONS, action_space: Any = ACTIONS, **settings: Any
) -> Iterator[ExternalEnvBridge]:
    """A bridge that answers with samples, in a thread of its own."""
    ready: queue.Queue[Any] = queue.Queue()
    stop = threading.Event()

    def sample(agent: Any) -> Any:
        return (action_space[agent] if isinstance(action_space, dict) else action_space).sample()

    def serve() -> None:
        try:
            with ExternalEnvBridge(observation_space, action_space, **settings) as server:
                assert server.private_endpoint  # made by this thread, for `gateway`
                ready.put(server)
                while not stop.is_set():
                    result = server.poll(0.05)
                    server.send_actions(
                        {
                            episode: {agent: sample(agent) for agent in agents}
                            for episode, agents in result.observations.items()
                            if episode not in result.ended
                        }
                    )
        except BaseException as exc:
            ready.put(exc)
            raise

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        server = ready.get(timeout=20)
        if isinstance(server, BaseException):
            raise server
        yield server
    finally:
        stop.set()
        thread.join(20)


@contextmanager
def gateway(server: ExternalEnvBridge, **settings: Any) -> Iterator[Gateway]:
    """A gateway to a bridge."""
    door = Gateway(server.private_endpoint, GatewayConfig(**settings))
    try:
        yield door
    finally:
        door.close()


@contextmanager
def broker() -> Iterator[str]:
    """A broker at which nobody offers anything."""
    server = Broker(ZmqRouter(["tcp://127.0.0.1:*"]), BrokerCore(BrokerConfig()))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.poll(0.05)
        server.close()

    thread = threading.Thread(target=serve)
    endpoint = server.endpoints[0]
    thread.start()
    try:
        yield endpoint
    finally:
        stop.set()
        thread.join(20)


@contextmanager
def mute() -> Iterator[str]:
    """A TCP server that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "{}:{}".format(*server.getsockname())


@contextmanager
def liar(answer: Answer) -> Iterator[str]:
    """A ROUTER that answers each request with whatever `answer` returns."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not router.poll(50):
                continue
            peer, head, *frames = router.recv_multipart()
            try:
                header = decode_header(head)
            except ProtocolError:
                continue
            if header.kind is not Kind.REQUEST:
                continue
            try:
                payload = decode(Payload.registry[header.payload_type], frames)
            except (KeyError, ProtocolError):
                payload = None
            reply = answer(header, payload)
            if reply is not None:
                told = Header(PROTOCOL_VERSION, Kind.REPLY, header.request_id, type(reply).__name__)
                router.send_multipart([peer, encode_header(told), *encode(reply)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(20)
        context.destroy(linger=0)
