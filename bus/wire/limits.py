"""How large a message may be, in either direction: `encode` and `decode` both enforce it.

Vocabulary only.
"""

from __future__ import annotations

__all__ = ["MAX_DEPTH", "MAX_FRAMES", "MAX_FRAME_BYTES", "MAX_HEADER_BYTES", "MAX_MESSAGE_BYTES"]

#: Bytes of an encoded header. Two names of 256 characters fit; a broker parses each one.
MAX_HEADER_BYTES = 4096
#: Frames of one message behind the header: the payload, then raw buffers. What has no frame left
#: for it is put into the payload instead.
MAX_FRAMES = 1024
#: Bytes of one frame. 1 GiB: 38,000 Atari observations of 4x84x84 bytes. MessagePack's ext 32 and
#: bin 32 cannot carry 4 GiB in one value.
MAX_FRAME_BYTES = 2**30
#: Bytes of all frames of one message together; as in `BrokerConfig`.
MAX_MESSAGE_BYTES = 2**30
#: Nested lists, tuples and dicts in one `Tree`, counted as in `[[]]`: 2. Packer and unpacker of
#: msgpack give up at 511 and 1024 levels.
MAX_DEPTH = 64
