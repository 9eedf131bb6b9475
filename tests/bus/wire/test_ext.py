from __future__ import annotations

import numpy as np
import pytest

from envbus.bus.errors import EncodeError
from envbus.bus.wire.codec import Ext, Placeholder, Placeholders, decode, encode
from envbus.bus.wire.messages import Tree
from tests.bus.codec_samples import Sample, round_trip


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Wordy:
    def __repr__(self) -> str:
        return "\ud800" + "x" * 10_000


def placeholder(value: object) -> Placeholder:
    tree = decode(Sample, encode(Sample(tree=Tree([value])), Placeholders())).tree
    assert tree is not None
    (item,) = tree.value
    assert type(item) is Placeholder
    return item


def test_ext_numbers_are_distinct_and_can_be_sent() -> None:
    numbers = [value for name, value in vars(Ext).items() if name.isupper()]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 128 for number in numbers)


def test_a_placeholder_tells_type_and_text() -> None:
    assert placeholder(bytearray(b"x")) == Placeholder("builtins.bytearray", "bytearray(b'x')")
    assert placeholder(np.array([None])).type_name == "numpy.ndarray"
    assert "Shy" in placeholder(Shy()).text
    assert placeholder(Wordy()).text.startswith("\\ud800")
    assert len(placeholder(Wordy()).text) <= 200


def test_a_placeholder_crosses_like_any_value() -> None:
    value = Placeholder("a.B", "<b>")
    assert round_trip([value, {value: 1}]) == [value, {value: 1}]


def test_placeholders_may_be_confined_to_some_fields() -> None:
    calls: list[tuple[str, str]] = []
    outbox = Placeholders(["tree"], on_replace=lambda place, name: calls.append((place, name)))
    encode(Sample(tree=Tree([{"env": object()}])), outbox)
    assert calls == [("tree[0]['env']", "builtins.object")]
    with pytest.raises(EncodeError, match=r"^trees\[0\]\[0\]: a builtins.object cannot cross"):
        encode(Sample(trees=[Tree([object()])]), outbox)


def test_placeholders_may_be_confined_to_a_place_in_a_field() -> None:
    outbox = Placeholders(["tree[*]['infos']"])
    encode(Sample(tree=Tree([0, {"infos": {"a": object()}}])), outbox)
    for place in ("infos2", "other"):
        with pytest.raises(EncodeError, match="cannot cross"):
            encode(Sample(tree=Tree([0, {place: {"infos": object()}}])), outbox)


def test_what_contains_itself_is_cut_by_a_placeholder() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    tree = decode(Sample, encode(Sample(tree=Tree([1, cycle])), Placeholders())).tree
    assert tree is not None
    value = tree.value[1]
    for _ in range(62):
        (value,) = value
    assert value == [Placeholder("builtins.list", "[[[[[[[...]]]]]]]")]
