from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.spaces.agent_spaces import AgentSpaces, RecordSpace
from envbus.actors.spaces.spaces import from_plain, is_fixed_size, to_plain
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Payload, Tree


class Carrier(Payload, frozen=True, kw_only=True):
    space: Tree


def over_the_wire(space: Any) -> Any:
    """Return the space as it comes out of a socket."""
    return from_plain(decode(Carrier, encode(Carrier(space=Tree(to_plain(space))))).space.value)


@pytest.mark.parametrize("kind", [AgentSpaces, RecordSpace])
def test_spaces_of_agents_cross_a_socket(kind: type[AgentSpaces]) -> None:
    space = kind(
        {
            "walker": spaces.Box(-1, 1, (2, 3), np.float32),
            ("type", 3): spaces.Discrete(4),
            7: spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8)}),
        }
    )
    space.seed(5)
    arrived = over_the_wire(space)
    assert type(arrived) is kind
    assert arrived == space
    assert list(arrived.spaces) == ["walker", ("type", 3), 7]
    assert arrived.sample().keys() == space.sample().keys()
    assert arrived[("type", 3)].sample() == space[("type", 3)].sample()


def test_agents_that_share_a_space_share_it_at_the_other_end() -> None:
    shared = spaces.Discrete(9)
    arrived = over_the_wire(AgentSpaces({"a": shared, "b": shared, "c": spaces.Discrete(9)}))
    assert arrived["a"] is arrived["b"]
    assert arrived["a"] is not arrived["c"]


def test_a_space_of_agents_has_no_fixed_size() -> None:
    assert not is_fixed_size(AgentSpaces({"a": spaces.Discrete(2)}))


@pytest.mark.parametrize("plain", [{"agents": [["a", 1]], "distinct": []}, {"agents": [["a"]]}])
def test_a_malformed_description_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="space"):
        from_plain({"space": "AgentSpaces", **plain})
