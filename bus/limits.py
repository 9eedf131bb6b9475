"""How large a message may be, in either direction. Vocabulary only."""

from __future__ import annotations

from dataclasses import dataclass, fields

from envbus.bus.errors import ConfigError

__all__ = ["DEFAULT_LIMITS", "MAX_HEADER_BYTES", "CodecLimits"]

#: Bytes of an encoded header. Two names of 256 characters fit; a broker parses each one.
MAX_HEADER_BYTES = 4096
#: MessagePack's ext 32 and bin 32 cannot carry more in one value.
_MAX_MESSAGEPACK_BYTES = 2**32 - 1
#: Packer and unpacker of msgpack give up at 511 and 1024 levels; stay well below both.
_MAX_DEPTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecLimits:
    """Bounds that `encode` and `decode` both enforce; both sides of a bus should agree.

    Raises:
        ConfigError: A limit is not positive, or larger than the format can carry.
    """

    #: Frames of one message behind the header: the payload, then raw buffers. What has no
    #: frame left for it is put into the payload instead.
    max_frames: int = 1024
    #: Bytes of one frame. 1 GiB: 38,000 Atari observations of 4x84x84 bytes.
    max_frame_bytes: int = 2**30
    #: Bytes of all frames of one message together; as in `BrokerConfig`.
    max_message_bytes: int = 2**30
    #: Nested lists, tuples and dicts in one `Tree`, counted as in `[[]]`: 2.
    max_depth: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{field.name} must be a positive int, not {value!r}")
        if self.max_frame_bytes > _MAX_MESSAGEPACK_BYTES:
            raise ConfigError(f"max_frame_bytes must be at most {_MAX_MESSAGEPACK_BYTES}")
        if self.max_depth > _MAX_DEPTH:
            raise ConfigError(f"max_depth must be at most {_MAX_DEPTH}")


DEFAULT_LIMITS = CodecLimits()
