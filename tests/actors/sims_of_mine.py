"""What somebody allows a remote actor to make, and what stands beside it."""

from __future__ import annotations

import functools
import subprocess
from subprocess import Popen
from typing import Any

from envbus.actors.testing import CountingEnv

__all__ = ["Maker", "Popen", "Walker", "make_walker", "partial_popen", "subprocess"]

partial_popen = functools.partial(Popen)


class Walker(CountingEnv):
    """An env."""


def make_walker(**kwargs: Any) -> Walker:
    return Walker(**kwargs)


class Maker:
    """Ways to make one."""

    popen = Popen
    prepared = make_walker

    @classmethod
    def by_class(cls) -> Walker:
        return Walker()

    @staticmethod
    def statically() -> Walker:
        return Walker()


ready = Maker()
