"""CURVE keys: files of them, who holds which, and which clients a broker lets in.

Leaves out sockets: `zmq_sockets.py` uses the keys, `authentication.py` asks who may come in.
Secrets are read from files, or made for processes of one's own, so that they stand in no
argument, log line or repr.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import zmq.auth

from envbus.bus.errors import ConfigError
from envbus.bus.watched_files import stamp_of

__all__ = [
    "Allow",
    "AllowList",
    "BrokerKeys",
    "Entrance",
    "KeyPair",
    "PathLike",
    "PeerKeys",
    "check_private",
    "load_keys",
    "load_public_key",
    "new_keys",
]

logger = logging.getLogger("envbus.bus.transport.curve_keys")

PathLike: TypeAlias = str | os.PathLike[str]
#: Which clients are let in: a folder of public keys, one file of one, or a function that is called
#: with the public key and returns whether its holder may come in.
Allow: TypeAlias = PathLike | Callable[[str], bool]

#: How the files of a pair end.
_PUBLIC, _PRIVATE = ".key", ".key_secret"
#: A key in Z85: 32 bytes, five characters for every four.
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
#: Far more than a key and its comments need.
_MAX_FILE_BYTES = 1 << 16
_NAME = re.compile(r"[\w\-][\w.\-]*")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret, in Z85. The repr shows the public one only."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """What a broker needs to take encrypted connections."""

    own: KeyPair
    #: Called with a client's public key, after the client has proved that it holds the secret.
    allow: Callable[[str], bool]

    @classmethod
    def load(cls, keys: PathLike | None, allow: Allow | None) -> BrokerKeys | None:
        """Return what the files hold, or None if neither is given.

        Raises:
            ConfigError: One is given without the other, or a file cannot be used.
        """
        if keys is None and allow is None:
            return None
        if keys is None or allow is None:
            raise ConfigError(
                "a broker needs both its own keys (keys='server.key_secret') and the public keys "
                "of its clients (allow='clients/')"
            )
        return cls(load_keys(keys), allow if callable(allow) else AllowList(allow))


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """What a peer needs to connect to a broker that has keys."""

    own: KeyPair
    #: Public key of the broker, in Z85.
    server: bytes

    @classmethod
    def temporary(cls, server: bytes) -> PeerKeys:
        """Return new keys, which stand in no file, for the broker with this public one."""
        return cls(KeyPair(*zmq.curve_keypair()), server)

    @classmethod
    def load(cls, keys: PathLike | PeerKeys | None, server_key: PathLike | None) -> PeerKeys | None:
        """Return what the files hold, or None if neither is given; or what was loaded before.

        Raises:
            ConfigError: One is given without the other, or a file cannot be used.
        """
        if isinstance(keys, PeerKeys) or (keys is None and server_key is None):
            return keys
        if keys is None or server_key is None:
            raise ConfigError(
                "a peer needs both its own keys (keys='me.key_secret') and the broker's public "
                "key (server_key='server.key')"
            )
        return cls(load_keys(keys), load_public_key(server_key))


class Entrance(NamedTuple):
    """Where a process comes in at a broker, and what it shows there."""

    endpoint: str
    #: None: there are no keys.
    keys: PeerKeys | None = None


class AllowList:
    """The public keys in a folder (all `*.key` files), or in one file.

    Looked at anew whenever a client comes: a file that was added or removed counts from the next
    connection on, and one that became unreadable no longer. Connections that exist stay.

    Raises:
        ConfigError: There is no such file or folder, or a file in it holds no key.
    """

    def __init__(self, path: PathLike) -> None:
        self._path = Path(path)
        self._seen: object = None
        self._keys: set[bytes] = set()
        self._load(_load_listed_key)

    def __call__(self, key: str) -> bool:
        """Return whether the holder of this public key may come in."""
        self._load(_key_or_warning)
        return key.encode() in self._keys

    def _load(self, read: Callable[[Path], bytes | None]) -> None:
        seen: dict[Path, object] = {}
        try:
            folder = self._path.is_dir()
            for file in self._path.glob("*" + _PUBLIC) if folder else [self._path]:
                seen[file] = _age(file, may_be_missing=folder)
        except OSError as exc:
            raise ConfigError(f"the allowed keys in {self._path} cannot be read: {exc}") from exc
        if seen != self._seen:
            self._keys = {key for file in seen if (key := read(file)) is not None}
            self._seen = seen


def new_keys(folder: PathLike, name: str) -> tuple[Path, Path]:
    """Make a key pair and return its files: the public `NAME.key`, the secret `NAME.key_secret`.

    Only their owner may read the secret one. The folder is made if it is missing.

    Raises:
        ConfigError: A file of that name exists, the name is none for a file, or the folder
            cannot be written to.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: use letters, digits, '-', '_' and '.'")
    target = Path(folder)
    public, secret = target / (name + _PUBLIC), target / (name + _PRIVATE)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"no keys can be made in {target}: {exc}") from exc
    try:
        # Made where only this user can look, so that the secret is never readable by others.
        with tempfile.TemporaryDirectory(dir=target, prefix=".new-keys-") as private:
            made = zmq.auth.create_certificates(private, name)
            for made_file, mode in zip(made, (0o644, 0o600), strict=True):
                os.chmod(made_file, mode)
            os.link(made[1], secret)  # unlike a rename, refuses to replace a file
            try:
                os.link(made[0], public)
            except OSError:
                secret.unlink()
                raise
    except FileExistsError as exc:
        raise ConfigError(f"{secret} or {public} exists; choose another name") from exc
    except OSError as exc:
        raise ConfigError(f"no keys can be made in {target}: {exc}") from exc
    return public, secret


def load_keys(path: PathLike) -> KeyPair:
    """Return both keys of a secret file.

    Raises:
        ConfigError: It cannot be read, holds no secret key, or others may read it.
    """
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; give the file NAME{_PRIVATE}")
    check_private(path, "secret key")
    return KeyPair(public, secret)


def check_private(path: PathLike, what: str) -> None:
    """Refuse a file of a secret that others may read.

    Raises:
        ConfigError: They may.
        OSError: It cannot be looked at.
    """
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ConfigError(f"others may read the {what} {path} (mode {mode:04o}); chmod 600 it")


def load_public_key(path: PathLike) -> bytes:
    """Return the public key of a file, in Z85.

    Raises:
        ConfigError: The file cannot be read, or holds no key.
    """
    return _read(path)[0]


def _age(file: Path, *, may_be_missing: bool) -> object:
    """Return what differs once a file was changed; None if it cannot be looked at.

    In a folder that may be a link that leads nowhere. It has no key, and shuts out nobody else.
    """
    try:
        return stamp_of(file)
    except OSError:
        if not may_be_missing:
            raise
        return None


def _load_listed_key(path: Path) -> bytes:
    """Return the key of a file among others, which are not to wait for a pipe or a device."""
    try:
        status = path.stat()
    except OSError as exc:
        raise ConfigError(f"no key can be read from {path}: {exc}") from exc
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"no key can be read from {path}: it is no file of a key")
    return load_public_key(path)


def _key_or_warning(path: Path) -> bytes | None:
    """Return the key, or None: one bad file must not shut out the others."""
    try:
        return _load_listed_key(path)
    except ConfigError as exc:
        logger.warning("%s", exc)
        return None


def _read(path: PathLike) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"no key can be read from {path}: {exc}") from exc
    for key in (public, secret):
        if key is not None and not _KEY.fullmatch(key):  # never shown: it may be a secret
            raise ConfigError(f"{path} holds something that is no key; make it anew")
    return public, secret
