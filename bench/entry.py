"""Where the `envbus` command begins: it makes Ctrl-C quiet, then imports what the command needs.

It stands here because `import envbus.bench` takes no time. `import envbus.runner` takes up to a
second, and Ctrl-C in that second would print where in NumPy the program was.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]

#: What shells report of a program that ended by Ctrl-C.
_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command line of this process and return its exit code."""
    usual = signal.getsignal(signal.SIGINT)
    # Else Ctrl-C is ignored, as in what a shell script has put into the background.
    if usual is signal.default_int_handler:
        # At once, and not by an exception: modules may catch one that comes while they load.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    _open_missing_streams()
    from envbus.runner.cli.main import main as run

    signal.signal(signal.SIGINT, usual)
    return run()


def _open_missing_streams() -> None:
    """Where standard streams were closed (`envbus ... >&-`), open some that lead nowhere.

    Else `print` fails, and a socket gets the number that programs below write to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # in this order, so that each gets its own number
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 (sys keeps it)
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(main())
