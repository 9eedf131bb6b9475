"""Records of episodes as the six dicts of a poll."""

from __future__ import annotations

from envbus.runner.bridge.results import BridgeResult, ClientChoice, EpisodeFault, Record
from envbus.runner.errors import FaultCause


def content(observation: int) -> dict[str, dict[str, object]]:
    return {
        "observations": {"agent0": observation},
        "rewards": {"agent0": 0.5},
        "terminateds": {"agent0": False, "__all__": False},
        "truncateds": {"agent0": True, "__all__": True},
        "infos": {"agent0": {}},
    }


def test_records_are_sorted_by_episode_and_kind() -> None:
    choice = ClientChoice("p", 3, {})
    result = BridgeResult.of(
        [
            Record("e", content(1), True, first=True),
            Record("f", content(2), False, last=True, unacted=True),
            Record("g", content(3), True, off_policy={"agent0": 9}, choice=choice),
        ]
    )
    assert [*result] == [
        {name: one[kind] for name, one in zip("efg", map(content, (1, 2, 3)), strict=True)}
        for kind in content(0)
    ] + [{"g": {"agent0": 9}}]
    assert (result.started, result.ended, result.faults) == (["e"], ["f"], [])
    assert (result.untrained, result.unacted) == ({"f"}, {"f"})
    assert result.choices == {"g": choice}


def test_a_fault_has_no_observation_and_ends_its_episode() -> None:
    fault = EpisodeFault(episode_id="e", cause=FaultCause.LOST, message="gone")
    result = BridgeResult.of([Record("e", {}, True, last=True, fault=fault)])
    assert not any(result)
    assert (result.faults, result.ended, result.started) == ([fault], ["e"], [])
