from __future__ import annotations

import os.path

import pytest

from envbus.bus.process.child import load_entry


def test_an_entry_may_be_nested_in_a_class() -> None:
    assert load_entry("os.path:join") is os.path.join
    assert load_entry("envbus.bus.process.pipe:Pipe.close").__name__ == "close"


@pytest.mark.parametrize("entry", ["no_such_module_at_all:f", "os:no_such_function"])
def test_an_entry_that_is_not_there_is_an_error(entry: str) -> None:
    with pytest.raises((ImportError, AttributeError), match="no_such"):
        load_entry(entry)
