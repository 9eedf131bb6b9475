from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from envbus.actors.env.agents import AgentsEnv, TurnEnv, in_agents_env

tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
rps = pytest.importorskip("pettingzoo.classic.rps_v2")


def moves(env: Any, *cells: int) -> list[dict[str, Any]]:
    """Play the cells in turn; return the records."""
    records = [env.reset(seed=1)[0]]
    for cell in cells:
        (agent,) = records[-1]["observations"]
        records.append(env.step({agent: cell})[0])
    return records


def test_only_who_is_to_move_has_an_observation() -> None:
    records = moves(in_agents_env(tictactoe.env()), 0, 3, 1)
    assert [list(record["observations"]) for record in records] == [
        ["player_1"],
        ["player_2"],
        ["player_1"],
        ["player_2"],
    ]
    assert records[1]["observations"]["player_2"]["action_mask"].tolist() == [0] + [1] * 8
    assert all(record["agents"] == ["player_1", "player_2"] for record in records)


def test_at_the_end_each_agent_has_a_last_observation_and_its_reward() -> None:
    *_, last = moves(in_agents_env(tictactoe.env()), 0, 3, 1, 4, 2)
    assert last["rewards"] == {"player_1": 1, "player_2": -1}
    assert last["terminateds"] == {"player_1": True, "player_2": True, "__all__": True}
    assert last["truncateds"]["__all__"] is False
    assert set(last["observations"]) == {"player_1", "player_2"}
    assert last["agents"] == []


class SharingGame:
    """Two agents that leave after the first move; both see the same array, with their numbers."""

    seen = np.zeros(1)
    info: ClassVar[dict[str, int]] = {}

    def reset(self) -> None:
        self.agents, self.is_over = ["a", "b"], False

    def step(self, action: int | None) -> None:
        if self.is_over:
            del self.agents[0]
        self.is_over = True

    @property
    def agent_selection(self) -> str:
        return self.agents[0]

    def last(self) -> Any:
        self.seen[:] = self.info["agent"] = ord(self.agents[0])
        return self.seen, 0.0, self.is_over, False, self.info


def test_agents_that_leave_together_are_told_apart() -> None:
    game = TurnEnv(SharingGame())
    game.reset()
    observations, _, _, _, infos = game.step({"a": 0})
    assert observations == {"a": ord("a"), "b": ord("b")}
    assert infos == {"a": {"agent": ord("a")}, "b": {"agent": ord("b")}}


def test_a_move_out_of_turn_is_refused() -> None:
    env = in_agents_env(tictactoe.env())
    assert isinstance(env, AgentsEnv)
    env.reset()
    with pytest.raises(ValueError, match=r"it is the turn of 'player_1', but .*'player_2'"):
        env.step({"player_2": 0})


def test_a_game_without_turns_goes_through_pettingzoo_s_conversion() -> None:
    env = in_agents_env(rps.env(max_cycles=2))
    assert isinstance(env, AgentsEnv)
    record, _ = env.reset()
    assert set(record["observations"]) == {"player_0", "player_1"}
    record, *_ = env.step({"player_0": 0, "player_1": 1})
    assert record["rewards"] == {"player_0": -1, "player_1": 1}
    assert type(record["rewards"]) is dict
    *_, truncated, _ = env.step({"player_0": 0, "player_1": 1})
    assert truncated
