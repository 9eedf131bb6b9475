"""Three ways to ask another process and get its answer: envbus, bare pyzmq, `multiprocessing`.

Each is a class for the asking side and a function for the answering one, which runs as `python -m
envbus.bench.requests.bus WAY ADDRESS CASE`. All three carry the same content in frames of the same
sizes; bare pyzmq carries them as ready-made bytes and looks at nothing.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import zmq

from envbus.bench.requests.cases import RequestCase
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig, Complete, PeerReady
from envbus.bus.broker.loop import Broker
from envbus.bus.peer.worker import Worker
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter, router_socket
from envbus.bus.wire.codec import decode, encode, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Hello, Kind, Reply, Request

__all__ = ["ASKS", "TURNS", "BenchAnswer", "BenchQuestion"]

#: Seconds for a worker to come up, and for one answer; far more than either ever takes.
TIMEOUT = 60.0
IDENTITY = b"worker"
#: Requests in flight while the rate is measured: enough that neither side waits for the other.
WINDOW = 16


class BenchAnswer(Reply, frozen=True, kw_only=True):
    """Answers `BenchQuestion`."""

    number: int
    array: npt.NDArray[np.uint8] | None


class BenchQuestion(Request[BenchAnswer], frozen=True, kw_only=True):
    """A small request, about the size of a step's."""

    number: int
    flag: bool = True


class Carrier(ABC):
    """The asking side, with its worker running. Both end with the session that they are in."""

    name: str

    @abstractmethod
    def __init__(self, case: RequestCase) -> None:
        """Start the worker."""

    @abstractmethod
    def send(self) -> None:
        """Send one request."""

    @abstractmethod
    def receive(self) -> int:
        """Wait for answers; return how many came."""

    def ask(self) -> None:
        """Send one request, and wait for its answer."""
        self.send()
        while not self.receive():
            pass

    def turn(self) -> int:
        """Take what has been answered, and send as many again; return how many."""
        answered = self.receive()
        for _ in range(answered):
            self.send()
        return answered

    def _start(self, address: str, case: RequestCase, pass_fds: tuple[int, ...] = ()) -> None:
        subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "envbus.bench.requests.bus", self.name, address, case.to_json()],
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
        )


class EnvbusCarrier(Carrier):
    """Broker, codec and transport as the runner uses them; each message encoded and decoded."""

    name = "envbus"

    def __init__(self, case: RequestCase) -> None:
        self._broker = Broker(ZmqRouter([_address()]), BrokerCore(BrokerConfig()))
        self._broker.expect(IDENTITY, "worker", 0)
        self._number = 0
        self._start(self._broker.endpoints[0], case)
        if not any(isinstance(outcome, PeerReady) for outcome in self._broker.poll(TIMEOUT)):
            raise TimeoutError("the envbus worker did not come up")

    def send(self) -> None:
        self._number += 1
        frames = encode(BenchQuestion(number=self._number))
        self._broker.ask(IDENTITY, "BenchQuestion", frames, timeout=TIMEOUT)

    def receive(self) -> int:
        answers = 0
        for outcome in self._broker.poll(TIMEOUT):
            if not isinstance(outcome, Complete):
                raise TimeoutError(f"no answer: {outcome}")
            decode(BenchAnswer, outcome.frames)
            answers += 1
        return answers


class PyzmqCarrier(Carrier):
    """ROUTER and DEALER, ready-made frames of the same sizes as envbus's."""

    name = "pyzmq"

    def __init__(self, case: RequestCase) -> None:
        self._copies = not case.shape
        address = _address()
        self._socket = router_socket(zmq.Context.instance())
        self._socket.bind(address)
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "BenchQuestion", TIMEOUT)
        question = encode(BenchQuestion(number=1))
        self._frames = [IDENTITY, encode_header(header), *map(bytes, question)]
        self._start(address, case)
        if not self._socket.poll(int(TIMEOUT * 1000)):
            raise TimeoutError("the pyzmq worker did not come up")
        self._socket.recv_multipart()

    def send(self) -> None:
        self._socket.send_multipart(self._frames)

    def receive(self) -> int:
        if self._copies:
            self._socket.recv_multipart()
        else:
            self._socket.recv_multipart(copy=False)
        return 1


class PipeCarrier(Carrier):
    """`multiprocessing`'s Pipe: pickles over a socketpair, what the peers step envs with."""

    name = "pipe"

    def __init__(self, case: RequestCase) -> None:
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        self._number = 0
        with theirs:
            self._start(str(theirs.fileno()), case, (theirs.fileno(),))
        if not self._pipe.poll(TIMEOUT):
            raise TimeoutError("the worker behind the pipe did not come up")
        self._pipe.recv()

    def send(self) -> None:
        self._number += 1
        self._pipe.send(("question", self._number, True))

    def receive(self) -> int:
        self._pipe.recv()
        return 1


def _address() -> str:
    """Return where a worker finds its broker: a socket in the folder of this process."""
    return f"ipc://{tempfile.mkdtemp(dir=os.getcwd())}/bus"


def _ask(carrier: type[Carrier], case: RequestCase, address: str) -> Callable[[], object]:
    del address
    return carrier(case).ask


def _turn(carrier: type[Carrier], case: RequestCase, address: str) -> Callable[[], int]:
    del address
    asking = carrier(case)
    for _ in range(WINDOW):
        asking.send()
    return asking.turn


_CARRIERS: tuple[type[Carrier], ...] = (EnvbusCarrier, PyzmqCarrier, PipeCarrier)
ASKS = {carrier.name: partial(_ask, carrier) for carrier in _CARRIERS}
TURNS = {carrier.name: partial(_turn, carrier) for carrier in _CARRIERS}


def _array(case: RequestCase) -> npt.NDArray[np.uint8] | None:
    return np.zeros(math.prod(case.shape), np.uint8) if case.shape else None


def _answer_envbus(address: str, case: RequestCase) -> None:
    array = _array(case)
    worker = Worker(
        ZmqPeer(address, IDENTITY),
        Hello(name="worker", services=["bench"], capacity=1000, pid=os.getpid()),
        {BenchQuestion: lambda question: BenchAnswer(number=question.number, array=array)},
        patience=TIMEOUT,
    )
    worker.join(TIMEOUT)
    worker.run()


def _answer_pyzmq(address: str, case: RequestCase) -> None:
    header = Header(PROTOCOL_VERSION, Kind.REPLY, 1, "BenchAnswer")
    answer = BenchAnswer(number=1, array=_array(case))
    frames = [encode_header(header), *map(bytes, encode(answer))]
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, IDENTITY)
    dealer.setsockopt(zmq.RCVTIMEO, int(TIMEOUT * 1000))  # it outlives no client that was killed
    dealer.connect(address)
    dealer.send(b"hello")
    while True:  # until killed, or nobody asks any more
        dealer.recv_multipart()
        dealer.send_multipart(frames, copy=not case.shape)


def _answer_pipe(address: str, case: RequestCase) -> None:
    pipe = Connection(int(address))
    array = _array(case)
    pipe.send("hello")
    while True:  # until killed, or nobody is there to ask
        _, number, _ = pipe.recv()
        pipe.send(("answer", number, array))


_ANSWERS = {"envbus": _answer_envbus, "pyzmq": _answer_pyzmq, "pipe": _answer_pipe}

if __name__ == "__main__":
    _ANSWERS[sys.argv[1]](sys.argv[2], RequestCase.of(sys.argv[3]))
