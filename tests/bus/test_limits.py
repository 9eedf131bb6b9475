from __future__ import annotations

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.limits import CodecLimits


@pytest.mark.parametrize(
    "settings",
    [
        {"max_frames": 0},
        {"max_frame_bytes": -1},
        {"max_message_bytes": 1.5},
        {"max_depth": True},
        {"max_depth": 257},
        {"max_frame_bytes": 2**32},
    ],
)
def test_an_unusable_limit_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        CodecLimits(**settings)
