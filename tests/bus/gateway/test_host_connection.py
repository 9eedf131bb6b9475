from __future__ import annotations

import asyncio
import itertools
import socket
import weakref
from collections.abc import Callable
from typing import Any, cast

from websockets.frames import Frame, Opcode

from envbus.bus.broker.control import NOBODY
from envbus.bus.gateway.client_framing import StreamFraming, WebSocketFraming
from envbus.bus.gateway.client_identity import GatewayClient
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.gateway.host import Connection, Crowd, Dealer
from envbus.bus.gateway.session import GatewaySession
from envbus.bus.wire.codec import decode_header, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import pack, pack_for_stream
from envbus.bus.wire.messages import Goodbye, Header, Kind
from tests.bus.gateway.bus import hello


class FakeTransport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.reading = True
        self.closed = False
        self.written = b""

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closed
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def abort(self) -> None:
        self.closed = True


class FakeDealer:
    """Takes so many messages until it is told that there is room for more."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[bytes] = []
        self.closed = False

    def send(self, frames: Frames) -> bool:
        assert not self.closed
        if len(self.taken) >= self.room:
            return False
        self.taken.append(bytes(frames[0]))
        return True

    def close(self) -> None:
        self.closed = True


class Scene:
    """A connection between fakes."""

    def __init__(
        self,
        sock: socket.socket,
        room: int = 2**31,
        crowd: Crowd | None = None,
        make_framing: type[StreamFraming] | type[WebSocketFraming] = StreamFraming,
    ) -> None:
        config = GatewayConfig(tcp=("127.0.0.1:0",))
        self.dealer = FakeDealer(room)
        self.on_writable: Callable[[], object] = lambda: None
        self.on_message: Callable[[list[bytes]], object] = lambda _: None
        session = GatewaySession(make_framing(config), config)
        self.session = weakref.ref(session)
        self.connection = Connection(session, config, self._make_dealer, crowd or Crowd())
        self.transport = FakeTransport(sock)
        self.connection.connection_made(self.transport)

    def _make_dealer(
        self,
        client: GatewayClient,
        on_message: Callable[[list[bytes]], object],
        on_writable: Callable[[], object],
    ) -> Dealer:
        assert client.address
        self.on_message, self.on_writable = on_message, on_writable
        return cast(Any, self.dealer)

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1_000_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("nothing more happens")


#: Small messages: far more than a few milliseconds take.
_COUNT = 40_000
_FLOOD = b"".join(pack_for_stream([b"%d" % number]) for number in range(_COUNT))


def test_who_sends_a_flood_of_small_messages_leaves_others_their_turn() -> None:
    async def play(sock: socket.socket) -> None:
        scene = Scene(sock)
        scene.connection.data_received(pack_for_stream(hello("sim")) + _FLOOD)
        dealer, transport = scene.dealer, scene.transport
        assert 0 < len(dealer.taken) < _COUNT // 2
        assert not transport.reading
        await scene.until(lambda: len(dealer.taken) == 1 + _COUNT)
        assert dealer.taken[1:] == [b"%d" % number for number in range(_COUNT)]
        assert transport.reading

    with socket.socket() as sock:
        asyncio.run(play(sock))


def test_of_many_that_flood_few_are_read_until_the_loop_looks_for_others() -> None:
    async def play(sock: socket.socket) -> None:
        crowd = Crowd()
        floods = [Scene(sock, crowd=crowd) for _ in range(20)]
        for scene in floods:
            scene.connection.data_received(pack_for_stream(hello("flood")) + _FLOOD)
        await floods[-1].until(lambda: floods[-1].dealer.taken)
        before = [len(scene.dealer.taken) for scene in floods]
        last = Scene(sock, crowd=crowd)
        last.connection.data_received(pack_for_stream(hello("sim")))
        await asyncio.sleep(0)
        assert last.dealer.taken, "who begins comes before those who have had their turns"
        after = [len(scene.dealer.taken) for scene in floods]
        assert all(0 < count < _COUNT for count in after), "a flood was over, or never began"
        went_on = sum(one != other for one, other in zip(before, after, strict=True))
        assert went_on <= len(floods) // 2

    with socket.socket() as sock:
        asyncio.run(play(sock))


def test_a_clients_end_is_not_seen_before_its_turn_to_be_read() -> None:
    async def play(sock: socket.socket) -> None:
        crowd = Crowd()
        flood, last = (Scene(sock, crowd=crowd) for _ in range(2))
        flood.connection.data_received(pack_for_stream(hello("flood")) + _FLOOD)
        last.connection.data_received(pack_for_stream(hello("sim")))
        assert (last.dealer.taken, last.transport.reading) == ([], False)
        await last.until(lambda: last.dealer.taken)
        assert last.transport.reading

    with socket.socket() as sock:
        asyncio.run(play(sock))


def test_what_cannot_be_read_ends_its_own_connection_only() -> None:
    class BrokenDealer(FakeDealer):
        def send(self, frames: Frames) -> bool:
            raise RuntimeError("a defect")

    async def play(sock: socket.socket) -> None:
        crowd = Crowd()
        flood, broken, last = (Scene(sock, crowd=crowd) for _ in range(3))
        broken.dealer = BrokenDealer(1)
        flood.connection.data_received(pack_for_stream(hello("flood")) + _FLOOD)
        for scene in (broken, last):
            scene.connection.data_received(pack_for_stream(hello("sim")))
        await last.until(lambda: last.dealer.taken)
        assert (broken.transport.closed, last.transport.closed) == (True, False)
        await flood.until(lambda: len(flood.dealer.taken) == 1 + _COUNT)

    with socket.socket() as sock:
        asyncio.run(play(sock))


def test_a_client_cannot_know_the_ids_of_marks_and_answer_them_itself() -> None:
    async def play(sock: socket.socket) -> list[int]:
        found = []
        for _ in range(3):
            scene = Scene(sock)
            large = pack_for_stream([b"large", bytes(3 << 20)])
            scene.connection.data_received(pack_for_stream(hello("sim")) + 2 * large)
            taken = scene.dealer.taken
            await scene.until(lambda taken=taken: len(taken) == 4)
            found.append(decode_header(taken[-1]).request_id)
        return found

    with socket.socket() as sock:
        ids = asyncio.run(play(sock))
    assert all(2**62 <= number < 2**63 for number in ids)
    assert min(abs(one - other) for one, other in itertools.combinations(ids, 2)) > 2**20


def test_what_is_not_read_yet_waits_for_the_broker_and_ends_with_its_connection() -> None:
    async def play(sock: socket.socket) -> None:
        scene = Scene(sock, room=100)
        scene.connection.data_received(pack_for_stream(hello("sim")) + _FLOOD)
        dealer, transport = scene.dealer, scene.transport
        await scene.until(lambda: len(dealer.taken) == 100)  # by one turn or several
        assert not transport.reading
        dealer.room = 500
        scene.on_writable()
        await scene.until(lambda: len(dealer.taken) == 500)
        assert not transport.reading
        dealer.room = 2**31
        transport.closed = True
        scene.connection.connection_lost(None)
        scene.on_writable()  # was about to be called
        await asyncio.sleep(0)
        *_, mark, goodbye = (decode_header(frame) for frame in dealer.taken[500:])
        assert (mark.to, goodbye.payload_type) == (NOBODY, Goodbye.__name__)
        assert (len(dealer.taken), dealer.closed) == (502, False)
        assert scene.session() is None, "half a message would wait for as long"
        scene.on_message([encode_header(Header(1, Kind.FAILURE, mark.request_id, "Failed")), b""])
        await asyncio.sleep(0)
        assert (len(dealer.taken), dealer.closed) == (502, True)

    with socket.socket() as sock:
        asyncio.run(play(sock))


def test_a_websocket_that_answers_pings_stays_and_one_that_does_not_is_told_why() -> None:
    def framed(opcode: Opcode, data: bytes) -> bytes:
        return bytes(Frame(opcode, data).serialize(mask=True))

    async def play(sock: socket.socket) -> None:
        clock = asyncio.get_running_loop().time
        living, dead = (Scene(sock, make_framing=WebSocketFraming) for _ in range(2))
        for scene in (living, dead):
            scene.connection.data_received(_UPGRADE + framed(Opcode.BINARY, pack(hello("sim"))))
            assert scene.dealer.taken
            scene.connection.look_after(clock() + 21.0)  # of silence; 20 are allowed
            assert scene.transport.written.endswith(b"\x89\0"), "no ping"
        living.connection.data_received(framed(Opcode.PONG, b""))
        for scene in (living, dead):
            scene.connection.look_after(clock() + 41.0)
        assert b"no sign of life for 40 s" in dead.transport.written
        assert b"no sign of life" not in living.transport.written
        assert living.transport.written.count(b"\x89\0") == 2, "another ping"

    with socket.socket() as sock:
        asyncio.run(play(sock))


_UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class LostTls(FakeTransport):
    """What Python 3.10 leaves of one with TLS: it says that it is open, and can do nothing."""

    def pause_reading(self) -> None:
        raise AttributeError("'NoneType' object has no attribute 'pause_reading'")

    def resume_reading(self) -> None:
        raise AttributeError("'NoneType' object has no attribute 'resume_reading'")

    def get_write_buffer_size(self) -> int:
        raise AttributeError("'NoneType' object has no attribute 'get_write_buffer_size'")

    def abort(self) -> None:
        raise AssertionError("it was tried to read on")


def test_nothing_is_asked_of_a_transport_that_is_lost() -> None:
    async def play(sock: socket.socket) -> None:
        scene = Scene(sock)
        scene.connection.data_received(pack_for_stream(hello("sim")))
        scene.transport.__class__ = LostTls
        scene.connection.connection_lost(None)
        mark = decode_header(scene.dealer.taken[1])
        welcome = Header(1, Kind.REPLY, decode_header(scene.dealer.taken[0]).request_id, "Welcome")
        scene.on_message([encode_header(welcome), b""])
        scene.on_message([encode_header(Header(1, Kind.FAILURE, mark.request_id, "Failed")), b""])
        await asyncio.sleep(0)
        assert scene.dealer.closed
        scene.on_writable()  # was about to be called

    with socket.socket() as sock:
        asyncio.run(play(sock))
