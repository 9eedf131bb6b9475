"""Three ways to ask another process and get its answer: envbus, bare pyzmq, `multiprocessing`.

Each is a class for the asking side and a function for the answering one, which runs as
`python -m envbus.bench.bus_carriers CARRIER ADDRESS CASE`. All three carry the same content in
frames of the same sizes; bare pyzmq carries them as ready-made bytes and looks at nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq

from envbus.bus.broker import Broker
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import BrokerConfig, Complete, PeerReady
from envbus.bus.codec import decode, encode, encode_header
from envbus.bus.messages import PROTOCOL_VERSION, Header, Hello, Kind, Reply, Request
from envbus.bus.serve import Worker
from envbus.bus.zmq_sockets import ZmqPeer, ZmqRouter, router_socket

__all__ = ["BUS_CASES", "CARRIERS", "BenchAnswer", "BenchQuestion", "BusCase", "Carrier"]

#: Seconds for a worker to come up, and for one answer; far more than either ever takes.
TIMEOUT = 30.0
IDENTITY = b"worker"


@dataclass(frozen=True)
class BusCase:
    """What is answered: a small message, or one with an array."""

    name: str
    #: Bytes of the answer's array; 0: it has none.
    answer_bytes: int


BUS_CASES = {
    case.name: case
    for case in (
        BusCase("signal", 0),  # what a step is where arrays are in shared memory
        BusCase("one frame", 4 * 84 * 84),  # one pixel observation
        BusCase("64 frames", 64 * 4 * 84 * 84),  # a batch of them
    )
}


class BenchAnswer(Reply, frozen=True, kw_only=True):
    """Answers `BenchQuestion`."""

    number: int
    array: npt.NDArray[np.uint8] | None


class BenchQuestion(Request[BenchAnswer], frozen=True, kw_only=True):
    """A small request, about the size of a step's."""

    number: int
    flag: bool = True


class Carrier(ABC):
    """The asking side, with its worker running."""

    name: str

    def __init__(self, case: BusCase) -> None:
        self.case = case
        self._worker: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def ask(self) -> None:
        """Send one request."""

    @abstractmethod
    def wait(self) -> int:
        """Wait for answers; return how many came."""

    @abstractmethod
    def close(self) -> None:
        """End the worker."""

    def _start(self, address: str, pass_fds: tuple[int, ...] = ()) -> None:
        self._worker = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "envbus.bench.bus_carriers", self.name, address, self.case.name],
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
        )

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()


class EnvbusCarrier(Carrier):
    """Broker, codec and transport as the runner uses them; each message encoded and decoded."""

    name = "envbus"

    def __init__(self, case: BusCase) -> None:
        super().__init__(case)
        self._folder = tempfile.TemporaryDirectory(prefix="envbus-bench-")
        self._broker = Broker(
            ZmqRouter([f"ipc://{self._folder.name}/bus"]), BrokerCore(BrokerConfig())
        )
        self._broker.expect(IDENTITY, "worker", 0)
        self._number = 0
        self._start(self._broker.endpoints[0])
        for outcome in self._broker.poll(TIMEOUT):
            if isinstance(outcome, PeerReady):
                return
        raise TimeoutError("the envbus worker did not come up")

    def ask(self) -> None:
        """Send one request."""
        self._number += 1
        frames = encode(BenchQuestion(number=self._number))
        self._broker.ask(IDENTITY, "BenchQuestion", frames, timeout=TIMEOUT)

    def wait(self) -> int:
        """Wait for answers; return how many came."""
        answers = 0
        for outcome in self._broker.poll(TIMEOUT):
            if not isinstance(outcome, Complete):
                raise TimeoutError(f"no answer: {outcome}")
            decode(BenchAnswer, outcome.frames)
            answers += 1
        return answers

    def close(self) -> None:
        """End the worker."""
        self._end_worker()
        self._broker.close()
        self._folder.cleanup()


class PyzmqCarrier(Carrier):
    """ROUTER and DEALER, ready-made frames of the same sizes as envbus's."""

    name = "pyzmq"

    def __init__(self, case: BusCase) -> None:
        super().__init__(case)
        self._folder = tempfile.TemporaryDirectory(prefix="envbus-bench-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = router_socket(self._context)
        self._socket.bind(f"ipc://{self._folder.name}/bus")
        self._frames = [IDENTITY, *_question_frames()]
        self._start(f"ipc://{self._folder.name}/bus")
        if not self._socket.poll(int(TIMEOUT * 1000)):
            raise TimeoutError("the pyzmq worker did not come up")
        self._socket.recv_multipart()

    def ask(self) -> None:
        """Send one request."""
        self._socket.send_multipart(self._frames)

    def wait(self) -> int:
        """Wait for an answer."""
        if self.case.answer_bytes:
            self._socket.recv_multipart(copy=False)
        else:
            self._socket.recv_multipart()
        return 1

    def close(self) -> None:
        """End the worker."""
        self._end_worker()
        self._socket.close(0)
        self._context.term()
        self._folder.cleanup()


class PipeCarrier(Carrier):
    """`multiprocessing`'s Pipe: pickles over a socketpair, what the peers step envs with."""

    name = "pipe"

    def __init__(self, case: BusCase) -> None:
        super().__init__(case)
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        self._number = 0
        with theirs:
            self._start(str(theirs.fileno()), (theirs.fileno(),))
        if not self._pipe.poll(TIMEOUT):
            raise TimeoutError("the worker behind the pipe did not come up")
        self._pipe.recv()

    def ask(self) -> None:
        """Send one request."""
        self._number += 1
        self._pipe.send(("question", self._number, True))

    def wait(self) -> int:
        """Wait for an answer."""
        self._pipe.recv()
        return 1

    def close(self) -> None:
        """End the worker."""
        self._end_worker()
        self._pipe.close()


CARRIERS: dict[str, type[Carrier]] = {
    carrier.name: carrier for carrier in (EnvbusCarrier, PyzmqCarrier, PipeCarrier)
}


def _array(case: BusCase) -> npt.NDArray[np.uint8] | None:
    return np.zeros(case.answer_bytes, np.uint8) if case.answer_bytes else None


def _question_frames() -> list[bytes]:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "BenchQuestion", TIMEOUT)
    return [encode_header(header), *map(bytes, encode(BenchQuestion(number=1)))]


def _answer_frames(case: BusCase) -> list[bytes]:
    header = Header(PROTOCOL_VERSION, Kind.REPLY, 1, "BenchAnswer")
    answer = BenchAnswer(number=1, array=_array(case))
    return [encode_header(header), *map(bytes, encode(answer))]


def _answer_envbus(address: str, case: BusCase) -> None:
    array = _array(case)
    worker = Worker(
        ZmqPeer(address, IDENTITY),
        Hello(name="worker", services=["bench"], capacity=1000, pid=os.getpid()),
        {BenchQuestion: lambda question: BenchAnswer(number=question.number, array=array)},
        patience=TIMEOUT,
    )
    worker.join(TIMEOUT)
    worker.run()


def _answer_pyzmq(address: str, case: BusCase) -> None:
    frames = _answer_frames(case)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, IDENTITY)
    dealer.setsockopt(zmq.RCVTIMEO, int(TIMEOUT * 1000))  # outlives no driver that was killed
    dealer.connect(address)
    dealer.send(b"hello")
    while True:  # until killed, or nobody asks any more
        dealer.recv_multipart()
        dealer.send_multipart(frames, copy=case.answer_bytes == 0)


def _answer_pipe(address: str, case: BusCase) -> None:
    pipe = Connection(int(address))
    array = _array(case)
    pipe.send("hello")
    while True:  # until killed, or nobody asks any more
        _, number, _ = pipe.recv()
        pipe.send(("answer", number, array))


def main() -> None:
    carrier, address, case = sys.argv[1:]
    answer = {"envbus": _answer_envbus, "pyzmq": _answer_pyzmq, "pipe": _answer_pipe}[carrier]
    os.chdir(Path(tempfile.gettempdir()))
    answer(address, BUS_CASES[case])


if __name__ == "__main__":
    main()
