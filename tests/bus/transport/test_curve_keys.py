from __future__ import annotations

import dataclasses
import logging
import os
import stat
from pathlib import Path

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.transport.curve_keys import (
    AllowList,
    BrokerKeys,
    KeyPair,
    PeerKeys,
    load_keys,
    load_public_key,
    new_keys,
)


def test_only_their_owner_may_read_secret_keys(tmp_path: Path) -> None:
    public, secret = new_keys(tmp_path / "deep" / "keys", "server")
    assert (public.name, secret.name) == ("server.key", "server.key_secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert sorted(path.name for path in public.parent.iterdir()) == [public.name, secret.name]
    keys = load_keys(secret)
    assert load_public_key(public) == load_public_key(secret) == keys.public
    assert keys.secret.decode() not in public.read_text()
    assert load_keys(new_keys(tmp_path, "other")[1]) != keys


@pytest.mark.parametrize("existing", ["a.key", "a.key_secret"])
def test_keys_are_never_overwritten(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(ConfigError, match="exists; choose another name"):
        new_keys(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a\n"])
def test_a_name_is_that_of_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a key"):
        new_keys(tmp_path, name)


def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no keys can be made in .*file"):
        new_keys(tmp_path / "file", "a")


def test_no_repr_shows_a_secret(tmp_path: Path) -> None:
    public, secret = new_keys(tmp_path, "a")
    keys = load_keys(secret)
    for thing in (keys, BrokerKeys.load(secret, tmp_path), PeerKeys.load(secret, public)):
        assert keys.secret.decode() not in repr(thing)
        assert repr(keys.secret) not in repr(thing)
        assert repr(keys.public) in repr(thing)
    assert dataclasses.replace(keys) == keys


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    _, secret = new_keys(tmp_path, "a")
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640\\); chmod 600"):
        load_keys(secret)


def test_files_that_hold_no_key_are_named_and_not_shown(tmp_path: Path) -> None:
    public, secret = new_keys(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"a\.key holds no secret key; give the file NAME\.key_s"):
        load_keys(public)
    with pytest.raises(ConfigError, match="nowhere"):
        load_public_key(tmp_path / "nowhere")
    empty = tmp_path / "empty.key"
    empty.touch()
    with pytest.raises(ConfigError, match=r"empty\.key"):
        load_public_key(empty)
    text = secret.read_text().replace("secret-key = ", "secret-key = x")
    secret.write_text(text)
    with pytest.raises(ConfigError, match="holds something that is no key") as caught:
        load_keys(secret)
    assert text[-20:-2] not in str(caught.value)


def test_both_sides_need_both_keys(tmp_path: Path) -> None:
    public, secret = new_keys(tmp_path, "a")
    assert BrokerKeys.load(None, None) is None
    assert PeerKeys.load(None, None) is None
    with pytest.raises(ConfigError, match="allow="):
        BrokerKeys.load(secret, None)
    with pytest.raises(ConfigError, match="keys="):
        BrokerKeys.load(None, tmp_path)
    with pytest.raises(ConfigError, match="server_key="):
        PeerKeys.load(secret, None)
    with pytest.raises(ConfigError, match="keys="):
        PeerKeys.load(None, public)
    broker = BrokerKeys.load(secret, lambda key: key == "x")
    assert broker is not None
    assert (broker.allow("x"), broker.allow("y")) == (True, False)


def public_text(pair: tuple[Path, Path]) -> str:
    return load_public_key(pair[0]).decode()


def test_an_allow_list_is_a_folder_or_a_file(tmp_path: Path) -> None:
    one, two = (new_keys(tmp_path / "clients", name) for name in ("one", "two"))
    stranger = new_keys(tmp_path, "stranger")
    folder, file = AllowList(tmp_path / "clients"), AllowList(one[0])
    assert [folder(public_text(pair)) for pair in (one, two, stranger)] == [True, True, False]
    assert [file(public_text(pair)) for pair in (one, two, stranger)] == [True, False, False]
    assert not folder("")
    with pytest.raises(ConfigError, match="nowhere"):
        AllowList(tmp_path / "nowhere")


def test_an_allow_list_follows_its_folder(tmp_path: Path) -> None:
    allowed = AllowList(tmp_path)
    pair = new_keys(tmp_path, "late")
    key = public_text(pair)
    assert allowed(key)
    pair[0].unlink()
    assert not allowed(key)


def test_a_link_that_leads_nowhere_shuts_nobody_else_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = new_keys(tmp_path / "clients", "good")
    allowed = AllowList(tmp_path / "clients")
    link = tmp_path / "clients" / "link.key"
    link.symlink_to(tmp_path / "gone.key")
    for _ in range(2):
        assert allowed(public_text(pair))
    assert caplog.text.count("no key can be read from") == 1
    gone = new_keys(tmp_path, "gone")
    assert allowed(public_text(gone))


def test_a_pipe_or_a_device_among_the_keys_keeps_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = new_keys(tmp_path, "good")
    allowed = AllowList(tmp_path)
    os.mkfifo(tmp_path / "pipe.key")
    (tmp_path / "device.key").symlink_to("/dev/zero")
    (tmp_path / "large.key").write_text("x" * 100_000)
    assert allowed(public_text(pair))
    assert caplog.text.count("it is no file of a key") == 3
    with pytest.raises(ConfigError, match="it is no file of a key"):
        AllowList(tmp_path)


def test_a_bad_file_is_told_at_the_start_and_shuts_nobody_else_out_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = new_keys(tmp_path, "good")
    allowed = AllowList(tmp_path)
    (tmp_path / "bad.key").write_text("nonsense")
    with caplog.at_level(logging.WARNING):
        assert allowed(public_text(pair))
        assert not allowed("")
        assert allowed(public_text(pair))
    assert len(caplog.messages) == 1
    assert "bad.key" in caplog.messages[0]
    with pytest.raises(ConfigError, match=r"bad\.key"):
        AllowList(tmp_path)


def test_a_file_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    first, second = new_keys(tmp_path, "a"), new_keys(tmp_path, "b")
    allowed = AllowList(first[0])
    os.replace(second[0], first[0])
    assert allowed(load_keys(second[1]).public.decode())
    assert not allowed(load_keys(first[1]).public.decode())


def test_a_file_whose_content_was_copied_over_with_its_time_kept_counts_at_once(
    tmp_path: Path,
) -> None:
    first, second = new_keys(tmp_path, "a"), new_keys(tmp_path, "b")
    allowed = AllowList(first[0])
    before = first[0].stat()
    first[0].write_bytes(second[0].read_bytes())
    os.utime(first[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    after = first[0].stat()
    assert (after.st_size, after.st_ino) == (before.st_size, before.st_ino)
    assert allowed(load_keys(second[1]).public.decode())
    assert not allowed(load_keys(first[1]).public.decode())


def test_key_pairs_are_compared_by_value() -> None:
    assert KeyPair(b"a", b"b") == KeyPair(b"a", b"b") != KeyPair(b"a", b"c")
