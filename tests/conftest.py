"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C, which
# tests send to programs that they start, would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
