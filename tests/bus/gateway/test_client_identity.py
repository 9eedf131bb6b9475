from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.gateway.client_identity import GatewayClient, client_of, identity_of

SECRET, NONCE = b"secret", "0123456789abcdef"
WORDS = st.text(st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), max_size=64)


@given(name=WORDS, address=WORDS)
def test_the_owner_reads_who_has_come_in(name: str, address: str) -> None:
    client = GatewayClient(name, address)
    identity = identity_of(client, SECRET, NONCE)
    assert len(identity) <= 255
    assert client_of(identity, SECRET) == client
    assert client_of(identity, b"another") is None


def test_one_who_calls_itself_so_is_nobody() -> None:
    identity = identity_of(GatewayClient("alice", "10.0.0.1:5"), SECRET, NONCE)
    assert client_of(identity.replace(b"alice", b"clara"), SECRET) is None


@given(st.binary(max_size=255))
def test_other_identities_are_no_clients(identity: bytes) -> None:
    assert client_of(identity, SECRET) is None
    assert client_of(b"gateway." + identity, SECRET) is None
