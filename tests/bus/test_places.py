from __future__ import annotations

from envbus.bus.messages import Tree
from envbus.bus.places import place_of, short_repr
from tests.bus.codec_samples import Sample


def test_a_place_reads_like_the_code_that_reaches_it() -> None:
    target = object()
    payload = Sample(trees=[Tree(0), Tree({"a": [0, {"env": (1, target)}]})])
    assert place_of(payload, target) == "trees[1]['a'][1]['env'][1]"


def test_a_key_is_named_as_one() -> None:
    target = (1, frozenset())
    assert place_of(Sample(tree=Tree({target: 0})), target) == "tree, in the key (1, frozenset())"


def test_what_contains_itself_is_searched_once() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    assert place_of(cycle, object()) is None


def test_the_root_itself_has_an_empty_place() -> None:
    payload = Sample()
    assert place_of(payload, payload) == ""


def test_a_repr_is_cut_and_never_fails() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Shy" in short_repr(Shy())
    assert short_repr(10**5000) == "<repr failed: ValueError>"
    assert short_repr("\ud800") == "'\\ud800'"
    assert len(short_repr(["x" * 1000] * 1000)) <= 200
