from __future__ import annotations

import os

import pytest

from tests.descriptors import no_more_files


def test_no_more_files_holds_also_where_another_is_closed_meanwhile() -> None:
    """As a test before may have left it to ZeroMQ's threads."""
    left = os.dup(0)
    with no_more_files():
        os.close(left)
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
