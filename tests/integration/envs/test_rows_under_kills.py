"""Every row of vector envs and pools whose actors are killed, against a model of what it may be."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import runpy
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics

from envbus.runner.errors import FaultCause
from envbus.runner.pool.pool import ActorPool
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Hooks
from tests.integration.faulty import RESTART
from tests.integration.group_children import is_alive, wait_until
from tests.integration.row_model import RAISE, EnvModel, LifeEnv, reward_of, rows_of
from tests.sources import ROOT

pytestmark = pytest.mark.timeout(180)

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
#: Steps before which an actor may be killed.
PLACES = 4
PATTERNS = [
    set(chosen)
    for size in range(1, PLACES + 1)
    for chosen in itertools.combinations(range(PLACES), size)
]


def kill(pid: int) -> None:
    if is_alive(pid):
        with contextlib.suppress(ProcessLookupError):  # it was dead, and is waited for just now
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "its end")


class Watched:
    """A vector env whose rows are checked as they come."""

    def __init__(self, mode: AutoresetMode, lengths: list[int], **settings: Any) -> None:
        factories = [partial(LifeEnv, length) for length in lengths]
        self.envs = BusVectorEnv(factories, autoreset_mode=mode, **settings, **RESTART)
        self.models = [EnvModel(mode, length) for length in lengths]

    def reset(self, mask: Any = None) -> None:
        options = None if mask is None else {"reset_mask": mask}
        observations, infos = self.envs.reset(options=options)
        for i, row in enumerate(rows_of(observations, infos)):
            self.models[i].on_reset(row, asked=mask is None or bool(mask[i]))

    def step(self, actions: Any) -> None:
        observations, *flags, infos = self.envs.step(actions)
        self.check(observations, infos, flags, actions)

    def check(self, observations: Any, infos: Any, flags: Any, actions: Any) -> None:
        rows = rows_of(observations, infos, *flags)
        for model, row, action in zip(self.models, rows, actions, strict=True):
            model.on_step(row, float(action))

    def kill(self, index: int = -1) -> None:
        kill(self.envs.actor_pids()[index])

    def reset_who_is_over(self) -> None:
        over = np.array([model.over for model in self.models])
        if self.envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
            self.reset(over)


@pytest.fixture
def watch() -> Iterator[Any]:
    made: list[Watched] = []

    def make(*args: Any, **kwargs: Any) -> Watched:
        made.append(Watched(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.envs.close(terminate=True)


@pytest.mark.slow
@MODES
@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ([100, 4], {"num_actors": 2}),
        ([100, 3, 4], {"num_actors": 2}),
        ([2, 100], {"num_actors": 1, "local_links": False, "shared_memory": False}),
    ],
    ids=["one env per actor", "two envs per actor", "no local links, no shared memory"],
)
def test_each_row_is_one_that_may_be_whenever_an_actor_is_killed(
    watch: Any, mode: AutoresetMode, lengths: list[int], settings: dict[str, Any]
) -> None:
    watched = watch(mode, lengths, **settings)
    for number, pattern in enumerate(PATTERNS):
        watched.reset()
        for place in range(PLACES + 2):
            if place in pattern and number % 2:  # before a reset of those that are over
                watched.kill()
            watched.reset_who_is_over()
            if place in pattern:
                watched.kill()
            watched.step(np.full(len(lengths), float(number)))
    assert sum(model.transitions for model in watched.models) >= len(PATTERNS)


@pytest.mark.slow
@MODES
def test_a_row_is_one_that_may_be_when_an_env_raises_and_its_actor_is_killed(
    watch: Any, mode: AutoresetMode
) -> None:
    watched = watch(mode, [3, 4, 5, 100], num_actors=2)
    for kills in PATTERNS:
        watched.reset()
        for place in range(PLACES + 2):
            watched.reset_who_is_over()
            actions = np.array([RAISE if place < PLACES else 1.0, 2.0, 3.0, 4.0])
            watched.envs.step_async(actions)
            if place in kills:
                watched.kill(0)
            observations, *flags, infos = watched.envs.step_wait()
            watched.check(observations, infos, flags, actions)


class FailsToBeginEnv(LifeEnv):
    """Its resets after the first one fail as often as there are files to take away."""

    def __init__(self, length: int, files: Path, how: str) -> None:
        super().__init__(length)
        self.files, self.how = files, how

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        for file in self.files.iterdir():
            file.unlink()
            if self.how == "dies":
                os._exit(3)
            raise ValueError("raised on purpose")
        return super().reset(seed=seed, options=options)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_next_step_each_fault_on_the_way_to_an_episode_has_a_truncated_row(
    tmp_path: Path, how: str
) -> None:
    factories = [partial(FailsToBeginEnv, 2, tmp_path, how), partial(LifeEnv, 100)]
    with closing(BusVectorEnv(factories, num_actors=2, **RESTART)) as envs:
        envs.reset()
        envs.step(np.ones(2))
        last, _, terminations, *_ = envs.step(np.ones(2))
        assert terminations.tolist() == [True, False]
        for name in "ab":
            (tmp_path / name).touch()
        for _ in range(2):
            observations, rewards, terminations, truncations, infos = envs.step(np.ones(2))
            assert observations[0].tolist() == last[0].tolist()
            assert (rewards[0], terminations[0], truncations[0]) == (0.0, False, True)
            assert infos["_fault"].tolist() == [True, False]
        observations, rewards, terminations, truncations, infos = envs.step(np.ones(2))
        assert observations[0, 1:].tolist() == [1, 0, 0]
        assert (rewards[0], terminations[0], truncations[0]) == (0.0, False, False)
        assert "fault" not in infos


class HookError(Exception):
    """What a hook raises."""


@MODES
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
@pytest.mark.parametrize("kills", [True, False], ids=["kill", "raise"])
def test_a_fault_that_an_exception_kept_back_is_told_by_the_next_step_as_any(
    mode: AutoresetMode, shared_memory: bool, kills: bool
) -> None:
    def raise_once(_fault: Any) -> None:
        if not told:
            told.append(True)
            raise HookError

    told: list[bool] = []
    envs = BusVectorEnv(
        [partial(LifeEnv, 100)] * 3,
        num_actors=2,
        autoreset_mode=mode,
        shared_memory=shared_memory,
        hooks=Hooks(on_fault=raise_once),
        **RESTART,
    )
    failed, well = ([1, 2], [0]) if kills else ([1], [0, 2])  # the last two share an actor
    try:
        first, _ = envs.reset()
        if kills:
            kill(envs.actor_pids()[1])
        with pytest.raises(HookError):
            envs.step(np.array([1.0, 1.0 if kills else RAISE, 1.0]))
        observations, rewards, _, truncations, infos = envs.step(np.ones(3))
        assert np.flatnonzero(truncations).tolist() == failed
        assert np.flatnonzero(infos["_fault"]).tolist() == failed
        assert observations[well, 2].tolist() == [2.0] * len(well)
        assert rewards[well].tolist() == [102.0] * len(well)
        if mode is AutoresetMode.SAME_STEP:
            assert (observations[failed, 0] != first[failed, 0]).all()
            assert infos["final_obs"][1].tolist() == first[1].tolist()
        else:
            assert (observations[failed, 0] == first[failed, 0]).all()
            observations, rewards, _, truncations, _ = envs.step(np.ones(3))
            assert not truncations.any()
            assert (observations[failed, 0] != first[failed, 0]).all()
        assert observations[failed, 2].tolist() == [0.0] * len(failed)
        observations, *_ = envs.step(np.ones(3))
        assert observations[failed, 2].tolist() == [1.0] * len(failed)
    finally:
        envs.close(terminate=True)


def test_an_off_policy_loop_for_same_step_learns_from_real_rows_only(watch: Any) -> None:
    """As CleanRL's: `real_next_obs[i] = infos["final_obs"][i]` wherever a row is truncated."""
    envs = watch(AutoresetMode.SAME_STEP, [2, 3, 100, 100], num_actors=2).envs
    replay: list[tuple[Any, float, Any, bool]] = []
    observations, _ = envs.reset(seed=0)
    for step in range(24):
        if step % 5 == 3:
            os.kill(envs.actor_pids()[step % 2], signal.SIGKILL)
        next_observations, rewards, terminations, truncations, infos = envs.step(np.ones(4))
        real_next_obs = next_observations.copy()
        for i in np.flatnonzero(terminations | truncations):
            real_next_obs[i] = infos["final_obs"][i]
        replay += zip(observations, rewards, real_next_obs, terminations, strict=True)
        observations = next_observations
    assert np.isfinite([next_observation for _, _, next_observation, _ in replay]).all()
    for observation, reward, next_observation, terminated in replay:
        assert observation[:2].tolist() == next_observation[:2].tolist(), "of two episodes"
        acted = next_observation[2] == observation[2] + 1
        assert reward == (reward_of(next_observation) if acted else 0.0)
        assert acted or not terminated


@pytest.mark.slow_but_first
@MODES
def test_statistics_from_within_the_actors_are_of_episodes_that_were_finished(
    mode: AutoresetMode,
) -> None:
    """As docs/reliability.md says it; those of the vector wrapper count the others, too."""
    lengths = [2, 3, 5, 100]
    factories = [partial(_counted, length) for length in lengths]
    finished = np.zeros(4, np.int64)
    cut = 0
    with closing(BusVectorEnv(factories, num_actors=2, autoreset_mode=mode, **RESTART)) as envs:
        envs.reset(seed=0)
        for step in range(60):
            actions = np.ones(4)
            if step % 11 == 4:
                kill(envs.actor_pids()[step % 2])
            elif step % 13 == 6:
                actions[1] = RAISE
            *_, terminations, truncations, infos = envs.step(actions)
            told = infos.get("final_info", {}) if mode is AutoresetMode.SAME_STEP else infos
            if "episode" in told:
                whole = told["_episode"]
                assert whole.tolist() == terminations.tolist()
                assert (told["episode"]["l"][whole] == np.array(lengths)[whole]).all()
                assert (told["episode"]["r"][whole] > 100 * np.array(lengths)[whole]).all()
                finished += whole
            else:
                assert not terminations.any()
            cut += np.count_nonzero(truncations)
            over = terminations | truncations
            if mode is AutoresetMode.DISABLED and over.any():
                envs.reset(options={"reset_mask": over})
    assert cut > 10
    assert (finished[:3] > 3).all()
    assert finished[3] == 0


def _counted(length: int) -> gymnasium.Env[Any, Any]:
    return RecordEpisodeStatistics(LifeEnv(length))


def test_same_step_statistics_tell_a_finished_episode_whose_reset_raises() -> None:
    factories = [partial(_counted_last, 2), partial(_counted, 9)]
    mode = AutoresetMode.SAME_STEP
    with closing(BusVectorEnv(factories, autoreset_mode=mode, **RESTART)) as envs:
        envs.reset()
        envs.step(np.ones(2))
        _, _, terminations, _, infos = envs.step(np.ones(2))
        assert terminations.tolist() == infos["_fault"].tolist() == [True, False]
        assert infos["final_info"]["_episode"].tolist() == [True, False]
        assert infos["final_info"]["episode"]["l"][0] == 2


def _counted_last(length: int) -> gymnasium.Env[Any, Any]:
    return RecordEpisodeStatistics(LastEnv(length))


@pytest.mark.slow
def test_a_pool_for_same_step_tells_of_a_cut_episode_as_of_any_that_ends() -> None:
    lengths = [2, 3, 100, 100]
    factories = [partial(LifeEnv, length) for length in lengths]
    with ActorPool(factories, autoreset_mode="SameStep", num_actors=2, **RESTART) as pool:
        models = [EnvModel(AutoresetMode.SAME_STEP, length) for length in lengths]
        for number, pattern in enumerate(PATTERNS):
            pool.reset()
            batch = pool.recv(min_envs=4)
            for row, env_id in zip(
                rows_of(batch.observations, batch.infos), batch.env_ids, strict=True
            ):
                models[env_id].on_reset(row)
            for place in range(PLACES + 2):
                if place in pattern and number % 2 == 0:
                    kill(pool.actor_pids()[0])
                pool.send(np.full(4, float(number)))
                if place in pattern and number % 2 == 1:
                    kill(pool.actor_pids()[0])
                seen: set[int] = set()
                while len(seen) < 4:
                    batch = pool.recv()
                    for fault in batch.faults:
                        models[fault.env_id].faults += 1
                    flags = batch.rewards, batch.terminations, batch.truncations
                    rows = rows_of(batch.observations, batch.infos, *flags)
                    for row, env_id in zip(rows, batch.env_ids.tolist(), strict=True):
                        row.fault = None
                        models[env_id].on_step(row, float(number))
                        seen.add(env_id)
    assert models[-1].transitions >= len(PATTERNS)


class LastEnv(LifeEnv):
    """Plays one episode, after which its reset raises. Action 7 gives a reward of NaN."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.episode:
            raise RuntimeError("one episode only")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward * (np.nan if action == 7.0 else 1.0), *rest


@pytest.mark.parametrize("shared_memory", [True, False])
def test_same_step_a_last_step_counts_where_the_reset_within_it_raises(
    shared_memory: bool,
) -> None:
    factories = [partial(LastEnv, 2), partial(LifeEnv, 9)]
    mode, options = AutoresetMode.SAME_STEP, {"shared_memory": shared_memory, "num_actors": 1}
    with closing(
        BusVectorEnv(factories, autoreset_mode=mode, check_finite=True, **options, **RESTART)
    ) as envs:
        envs.reset()
        for action in (1.0, 7.0, 1.0):
            before = envs.step(np.array([0.0, 1.0]))[0]
            now, rewards, terminations, truncations, infos = envs.step(np.array([action, 1.0]))
            assert infos["fault"]["cause"][0] == "error"
            assert now[0, 1:3].tolist() == [1, 0]
            if action == 7.0:  # what is not finite is no last step that anybody could use
                assert (rewards[0], truncations[0]) == (0.0, True)
                assert infos["final_obs"][0].tolist() == before[0].tolist()
                continue
            assert (rewards[0], terminations[0], truncations[0]) == (102.0, True, False)
            assert infos["final_obs"][0][1:].tolist() == [1, 2, 1]
            assert infos["final_info"] == {}


def test_same_step_a_last_step_that_was_given_up_is_none_of_the_next_step() -> None:
    def raise_once(_fault: Any) -> None:
        if not told:
            told.append(True)
            raise HookError

    told: list[bool] = []
    factories = [partial(LastEnv, 2), partial(LifeEnv, 9)]
    hooks, mode = Hooks(on_fault=raise_once), AutoresetMode.SAME_STEP
    with closing(BusVectorEnv(factories, autoreset_mode=mode, hooks=hooks, **RESTART)) as envs:
        envs.reset()
        before = envs.step(np.array([1.0, 1.0]))[0]
        with pytest.raises(HookError):
            envs.step(np.array([2.0, 2.0]))
        now, rewards, terminations, truncations, infos = envs.step(np.array([3.0, 3.0]))
        assert now[:, 1:].tolist() == [[1, 0, 0], [1, 3, 3]]
        assert rewards.tolist() == [0.0, 103.0]
        assert (terminations[0], truncations[0]) == (False, True)
        assert infos["final_obs"][0].tolist() == before[0].tolist()
        assert infos["final_info"]["fault"]["cause"][0] == "error"


@pytest.mark.parametrize("num_actors", [0, 1])
def test_same_step_a_pool_tells_a_last_step_whose_reset_raised(num_actors: int) -> None:
    with ActorPool(
        [partial(LastEnv, 2)],
        autoreset_mode=AutoresetMode.SAME_STEP,
        num_actors=num_actors,
        **RESTART,
    ) as pool:
        pool.reset()
        first = pool.recv()
        for _ in range(2):
            for action in (1.0, 3.0):
                pool.send(np.array([action]), first.env_ids)
                batch = pool.recv()
            assert [fault.cause for fault in batch.faults] == [FaultCause.ERROR]
            batch = batch if len(batch.env_ids) else pool.recv()
            row = batch.rewards[0], batch.terminations[0], batch.truncations[0]
            assert row == (102.0, True, False)
            assert batch.infos["final_obs"][0][1:].tolist() == [1, 2, 3]
            assert batch.observations[0, 1:3].tolist() == [1, 0]


class NanEnv(LifeEnv):
    """Action 7 gives it an observation of NaN."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return observation * (np.nan if action == 7.0 else 1.0), *rest


@pytest.mark.slow_but_first
@MODES
def test_with_check_finite_an_observation_of_nan_is_a_fault_of_its_env(mode: AutoresetMode) -> None:
    factories = [partial(NanEnv, 100)] * 2
    envs = BusVectorEnv(factories, autoreset_mode=mode, check_finite=True, num_actors=1, **RESTART)
    try:
        first, _ = envs.reset()
        observations, rewards, _, truncations, infos = envs.step(np.array([1.0, 7.0]))
        assert truncations.tolist() == [False, True]
        assert rewards.tolist() == [101.0, 0.0]
        assert "env 1: observation is nan" in infos["fault"]["error"][1]
        assert np.isfinite(observations).all()
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_obs"][1].tolist() == first[1].tolist()
    finally:
        envs.close(terminate=True)


def test_the_example_of_episodes_that_count_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, "utf-8")
    assert len(runpy.run_path(str(script))["returns"]) > 0
