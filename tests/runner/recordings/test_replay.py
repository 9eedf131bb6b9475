from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pyarrow")


from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.nested import leaves_of
from envbus.runner.recordings import minari_episodes, replay, to_minari


class Log:
    """Notes what a client is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start_episode(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        self.calls.append(("start", training_enabled))
        return "e"

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        self.calls.append(("action", observation, action))

    def log_returns(self, episode_id: str, reward: Any, info: Any = None, **flags: Any) -> None:
        self.calls.append(("returns", reward, info, *([flags] if flags else [])))

    def end_episode(
        self, episode_id: str, observation: Any, *, truncated: bool = False, **flags: Any
    ) -> None:
        self.calls.append(("end", observation, truncated, *([flags] if flags else [])))


def rows(agent: str, length: int, times: list[int], *, terminated: bool) -> SampleBatch:
    steps = np.arange(length)
    return SampleBatch(
        {
            "obs": steps * 10,
            "next_obs": steps * 10 + 10,
            "actions": steps,
            "rewards": np.ones(length, np.float32),
            "terminateds": (steps == length - 1) & terminated,
            "truncateds": (steps == length - 1) & (not terminated),
            "eps_id": np.zeros(length, np.int64),
            "t": np.array(times, np.int64),
            "agent_id": np.full(length, agent),
        }
    )


def test_an_episode_of_one_agent_is_told_step_by_step() -> None:
    log = Log()
    assert replay([rows("agent0", 2, [0, 1], terminated=True)], log) == 1
    assert log.calls == [
        ("start", True),
        ("action", 0, 0),
        ("returns", 1.0, None),
        ("action", 10, 1),
        ("returns", 1.0, None),
        ("end", 20, False),
    ]


def test_a_truncated_episode_ends_truncated_and_may_be_kept_from_training() -> None:
    log = Log()
    replay([rows("agent0", 1, [0], terminated=False)], log, training_enabled=False)
    assert log.calls[0] == ("start", False)
    assert log.calls[-1] == ("end", 10, True)


def test_several_agents_are_told_as_dicts_at_the_steps_at_which_they_act() -> None:
    log = Log()
    episode = MultiAgentBatch(
        {
            "p": rows("a", 2, [0, 1], terminated=True),
            "q": rows("b", 1, [1], terminated=True),
        },
        2,
    )
    replay([episode], log)
    assert log.calls == [
        ("start", True),
        ("action", {"a": 0}, {"a": 0}),
        ("returns", {"a": 1.0}, None),
        ("action", {"a": 10, "b": 0}, {"a": 1, "b": 0}),
        ("returns", {"a": 1.0, "b": 1.0}, None),
        ("end", {"a": 20, "b": 10}, False, {"terminateds": {"a": True, "b": True}}),
    ]


def test_each_agent_ends_at_its_own_time_and_in_its_own_way() -> None:
    log = Log()
    parts = [
        rows("a", 1, [0], terminated=True),
        rows("b", 3, [0, 1, 2], terminated=True),
        rows("c", 2, [1, 2], terminated=False),
    ]
    replay([SampleBatch.concatenate(parts)], log)
    assert log.calls == [
        ("start", True),
        ("action", {"a": 0, "b": 0}, {"a": 0, "b": 0}),
        ("returns", {"a": 1.0, "b": 1.0}, None, {"terminateds": {"a": True}}),
        ("action", {"a": 10, "b": 10, "c": 0}, {"b": 1, "c": 0}),
        ("returns", {"b": 1.0, "c": 1.0}, None),
        ("action", {"b": 20, "c": 10}, {"b": 2, "c": 1}),
        ("returns", {"b": 1.0, "c": 1.0}, None),
        (
            "end",
            {"b": 30, "c": 20},
            True,
            {"terminateds": {"b": True}, "truncateds": {"c": True}},
        ),
    ]


def test_behind_an_action_that_was_not_taken_an_agent_begins_anew() -> None:
    log = Log()
    parts = [
        rows("agent0", 2, [0, 1], terminated=False),
        rows("agent0", 1, [3], terminated=True),
    ]
    assert replay([SampleBatch.concatenate(parts)], log) == 1
    assert log.calls == [
        ("start", True),
        ("action", 0, 0),
        ("returns", 1.0, None),
        ("action", 10, 1),
        ("returns", 1.0, None),
        ("end", 20, True),
        ("start", True),
        ("action", 0, 0),
        ("returns", 1.0, None),
        ("end", 10, False),
    ]


def test_of_several_agents_one_that_took_no_action_is_observed_all_the_same() -> None:
    log = Log()
    parts = [
        rows("a", 1, [0], terminated=False),
        rows("a", 1, [2], terminated=True),
        rows("b", 1, [0], terminated=False),
        rows("b", 1, [3], terminated=True),
    ]
    replay([SampleBatch.concatenate(parts)], log)
    assert log.calls == [
        ("start", True),
        ("action", {"a": 0, "b": 0}, {"a": 0, "b": 0}),
        ("returns", {"a": 1.0, "b": 1.0}, None),
        ("action", {"a": 10, "b": 10}, {}),
        ("action", {"a": 0}, {"a": 0}),
        ("returns", {"a": 1.0}, None, {"terminateds": {"a": True}}),
        ("action", {"a": 10, "b": 0}, {"b": 0}),
        ("returns", {"b": 1.0}, None),
        ("end", {"b": 10}, False, {"terminateds": {"b": True}}),
    ]


def test_what_cannot_be_replayed_is_named() -> None:
    with pytest.raises(ConfigError, match="without a column 'rewards'"):
        replay([SampleBatch({"obs": np.zeros(1), "actions": np.zeros(1)})], Log())
    twice = SampleBatch.concatenate([rows("a", 1, [0], terminated=True)] * 2)
    with pytest.raises(ConfigError, match=r"two trajectories.*split_by_episode"):
        replay([twice], Log())


# --- Minari ---

SEEN = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (9, 8, 3), np.uint8),
        "pose": spaces.Tuple([spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(9)]),
    }
)
DONE = spaces.Box(-1.0, 1.0, (2,), np.float32)


def lived(length: int, *, terminated: bool) -> SampleBatch:
    """An episode of which each row is another one."""
    rng = np.random.default_rng(length)

    def seen(first: int) -> Any:
        past = slice(first, first + length)
        return {"image": images[past], "pose": (places[past], np.arange(length + 1)[past])}

    images = rng.integers(256, size=(length + 1, 9, 8, 3), dtype=np.uint8)
    places = rng.random((length + 1, 2), np.float32)
    told = rows("agent0", length, [*range(length)], terminated=terminated)
    return told.with_columns(
        obs=seen(0),
        next_obs=seen(1),
        actions=places[1:] / 2,
        rewards=rng.random(length, np.float32),
    )


def through_minari(episodes: list[SampleBatch]) -> list[SampleBatch]:
    to_minari(iter(episodes), "count/test-v0", observation_space=SEEN, action_space=DONE)
    return list(minari_episodes("count/test-v0"))


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of datasets."""
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def keeps_images_whole() -> bool:
    """Minari before 0.5.4, which is what Python 3.10 has, makes JPEGs of all."""
    minari = pytest.importorskip("minari")
    return "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters


def same(got: SampleBatch, told: SampleBatch) -> None:
    for name in ("obs", "actions", "next_obs", "rewards", "terminateds", "truncateds", "t"):
        for one, other in zip(leaves_of(got[name], name), leaves_of(told[name], name), strict=True):
            assert one[0] == other[0]
            if "image" in one[0] and not keeps_images_whole():
                continue
            np.testing.assert_array_equal(one[1], other[1], err_msg=one[0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of an author that is not told
@pytest.mark.usefixtures("minari")
def test_episodes_come_back_from_minari_as_they_were() -> None:
    told = [lived(3, terminated=True), lived(1, terminated=False), lived(4, terminated=True)]
    for one, other in zip(through_minari(told), told, strict=True):
        same(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("minari")
def test_minari_is_told_no_row_behind_which_an_observation_is_missing() -> None:
    whole, gone = lived(3, terminated=False), lived(1, terminated=False)
    valid = np.array([True, True, False])
    told = [whole.with_columns(next_obs_valid=valid), gone.with_columns(next_obs_valid=valid[2:])]
    (got,) = through_minari(told)
    same(got, whole[:2].with_columns(truncateds=np.array([False, True])))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("minari")
def test_what_minari_cannot_have_is_refused() -> None:
    both = SampleBatch.concatenate([rows(name, 2, [0, 1], terminated=True) for name in "ab"])
    spaces_of = {"observation_space": SEEN, "action_space": DONE}
    with pytest.raises(ConfigError, match=r"one agent, and one here has \['a', 'b'\]"):
        to_minari([both], "count/test-v0", **spaces_of)
    with pytest.raises(ConfigError, match="no episodes"):
        to_minari([], "count/test-v0", **spaces_of)
    with pytest.raises(ConfigError, match="Minari wants env="):
        to_minari([lived(2, terminated=True)], "count/test-v0", action_space=DONE)
    with pytest.raises(ConfigError, match=r"does not make the dataset 'count/test-v0'.*color"):
        to_minari([lived(2, terminated=True)], "count/test-v0", **spaces_of, color="red")
    to_minari([lived(2, terminated=True)], "count/test-v0", **spaces_of)
    with pytest.raises(ConfigError, match="already exists"):
        to_minari([lived(2, terminated=True)], "count/test-v0", **spaces_of)
