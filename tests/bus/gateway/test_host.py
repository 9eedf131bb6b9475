from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from envbus.bus.gateway import GatewayConfig
from envbus.bus.gateway.host import PIECE, InPieces
from tests.bus.gateway.certificate import CERTIFICATE, PRIVATE_KEY

pytestmark = pytest.mark.timeout(60)


class Pieces(asyncio.Protocol):
    """Notes how much came at one go."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def data_received(self, data: bytes) -> None:
        self.sizes.append(len(data))


def test_tls_takes_a_piece_at_one_go_so_that_others_have_their_turn(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("certificate", "key")]
    for name, text in zip(names, (CERTIFICATE, PRIVATE_KEY), strict=True):
        Path(name).write_text(text)
    config = GatewayConfig(tcp=("127.0.0.1:0",), certificate=names[0], private_key=names[1])
    tls = config.read_tls()
    assert tls is not None
    assert PRIVATE_KEY.splitlines()[1] not in repr(tls)
    records, record = 16, b"x" * 1000

    async def sizes() -> list[int]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        server = Pieces()
        opening = asyncio.ensure_future(
            loop.connect_accepted_socket(
                lambda: server, InPieces(fileno=ours.detach()), ssl=tls.context()
            )
        )
        theirs.settimeout(30.0)
        context = ssl.create_default_context(cadata=CERTIFICATE)
        client = await asyncio.to_thread(context.wrap_socket, theirs, server_hostname="localhost")
        transport, _ = await opening
        for _ in range(records):  # all are there when the loop goes on
            client.sendall(record)
        while sum(server.sizes) < records * len(record):
            await asyncio.sleep(0)
        transport.abort()
        client.close()
        return server.sizes

    assert max(asyncio.run(sizes())) <= PIECE
