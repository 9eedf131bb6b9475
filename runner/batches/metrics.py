"""What sampling was like: returns and lengths of episodes, counts, and time per part. Pure.

Leaves out the clock (durations are handed in) and the vectorised job's own statistics
(`cli/stepping.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from envbus.bus.settings import check_number
from envbus.runner.batches.trajectory import AgentID

__all__ = [
    "MOST_MEDIA",
    "MOST_RESULTS",
    "PERF_TIMERS",
    "EpisodeResult",
    "MetricsDelta",
    "PerfTimers",
    "RecentResults",
    "SampleMetrics",
    "summarize",
]

#: Parts of an iteration: observations through their connectors, the policy, actions through
#: theirs, waiting for the envs, drawing them.
PERF_TIMERS = (
    "raw_obs_processing",
    "inference",
    "action_processing",
    "env_wait",
    "env_render",
)
_COUNTS = (
    "num_env_steps_sampled",
    "num_agent_steps_sampled",
    "num_episodes",
    "num_faulty_episodes",
    "num_episodes_without_actions",
    "num_env_restarts",
    "num_dropped_rows",
    "num_untrained_episodes",
    "num_untrained_env_steps",
)
#: Episodes that are remembered until they are read, the latest: some 90 MB of those with one agent.
MOST_RESULTS: Final = 100_000
#: Of how many of them media are: a frame is some 100 kB, a film of frames a hundred times that.
MOST_MEDIA: Final = 100
#: Counted per policy, under its name and the policy's id behind a slash.
_MODULE_STEPS = "num_module_steps_sampled"
_SPREAD = ("mean", "min", "max")


class EpisodeResult(msgspec.Struct, frozen=True):
    """What is known about an episode when it is over, all its fragments together."""

    eps_id: int
    env_id: int
    incarnation: int
    #: Undiscounted sum of all agents' rewards, float64.
    episode_return: float
    #: In env steps.
    length: int
    #: Undiscounted, also of agents that never acted.
    agent_returns: dict[AgentID, float]
    #: Transitions.
    agent_steps: dict[AgentID, int]
    #: Of the agents that observed.
    agent_policies: dict[AgentID, str]
    terminated: bool
    truncated: bool
    #: A failure cut it off: return and length say nothing.
    faulty: bool
    #: Fragments that were handed out so far. Of a faulty episode these are the ones to look for,
    #: by `eps_id`, in data that left earlier.
    fragments: int
    #: Sum of rewards that are in no row: they came after the agent's last row was handed out, or
    #: the agent never acted. With the rows' rewards, before a connector, it makes up
    #: `episode_return`.
    unrecorded_reward: float
    #: What callbacks measured.
    custom_metrics: dict[str, float]
    #: What an external simulator calls it; "": it is an episode of a pool.
    episode_id: str = ""
    #: Whether its rows were meant to be trained on, and left.
    training_enabled: bool = True
    #: Numbers that callbacks noted, by name, as many as they liked.
    hist_data: dict[str, list[float]] = {}
    #: What else callbacks kept, by name: images, sounds, paths of films.
    media: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A sample of a group may bring hundreds: in a third of the time that msgspec's own takes.
        return EpisodeResult, msgspec.structs.astuple(self)


class MetricsDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one `SampleMetrics` has counted for another to add."""

    results: list[EpisodeResult]
    #: By name, without those that have not changed.
    counts: dict[str, int]


def summarize(results: Iterable[EpisodeResult]) -> dict[str, Any]:
    """Return statistics of finished episodes, under the names of RLlib's result dicts.

    `episode_return_{mean,min,max}`, `episode_len_{mean,min,max}` (env steps),
    `agent_episode_returns_{...}` by agent id, `module_episode_returns_{...}` by policy id (one
    value per agent and episode), `custom_metrics`, `hist_data` (all numbers of a name, in the order
    of episodes) and `episode_media` (a list per name, with an item per episode that has one).
    Faulty episodes, those in which nobody ever acted and those that are not to be trained on are
    left out; without any other, so are the names that would have no value, and the dicts are empty.
    """
    episodes = [
        result
        for result in results
        if result.training_enabled and not result.faulty and any(result.agent_steps.values())
    ]
    agents: dict[AgentID, list[float]] = {}
    policies: dict[str, list[float]] = {}
    custom: dict[str, list[float]] = {}
    noted: dict[str, list[float]] = {}
    media: dict[str, list[Any]] = {}
    for result in episodes:
        for agent_id, value in result.agent_returns.items():
            agents.setdefault(agent_id, []).append(value)
            if (policy_id := result.agent_policies.get(agent_id)) is not None:
                policies.setdefault(policy_id, []).append(value)
        for name, value in result.custom_metrics.items():
            custom.setdefault(name, []).append(value)
        for name, values in result.hist_data.items():
            noted.setdefault(name, []).extend(values)
        for name, item in result.media.items():
            media.setdefault(name, []).append(item)
    out: dict[str, Any] = {}
    if episodes:
        out |= _spread("episode_return", [result.episode_return for result in episodes])
        out |= _spread("episode_len", [result.length for result in episodes])
    for name, groups in (("agent_episode_returns", agents), ("module_episode_returns", policies)):
        for key, values in groups.items():
            for full, number in _spread(name, values).items():
                out.setdefault(full, {})[key] = number
        for suffix in _SPREAD:
            out.setdefault(f"{name}_{suffix}", {})
    out["custom_metrics"] = {}
    for name, values in custom.items():
        out["custom_metrics"] |= _spread(name, values)
    out["hist_data"], out["episode_media"] = noted, media
    return out


class RecentResults:
    """The latest episodes that have ended: 100,000 of them, and the media of 100."""

    def __init__(self) -> None:
        self._results: deque[EpisodeResult] = deque(maxlen=MOST_RESULTS)
        self._appended = 0
        #: Which ones have media, counted as they were appended.
        self._with_media: deque[int] = deque()

    def append(self, result: EpisodeResult) -> None:
        """Add one; the oldest of too many leaves, or its media do."""
        self._results.append(result)
        self._appended += 1
        if not result.media:
            return
        self._with_media.append(self._appended - 1)
        if len(self._with_media) > MOST_MEDIA:
            index = self._with_media.popleft() - (self._appended - len(self._results))
            if index >= 0:
                self._results[index] = msgspec.structs.replace(self._results[index], media={})

    def take(self) -> list[EpisodeResult]:
        """Return them in their order, and forget them."""
        taken = list(self._results)
        self._results.clear()
        self._with_media.clear()
        return taken


class SampleMetrics:
    """Counts and finished episodes since they were last read, and counts over the whole life.

    Of the episodes it has the latest ones only: it may be that nobody reads them.
    """

    def __init__(self) -> None:
        self._results = RecentResults()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._lifetime = dict.fromkeys(_COUNTS, 0)

    @property
    def env_steps(self) -> int:
        """Env steps in all samples, over the whole life."""
        return self._lifetime["num_env_steps_sampled"]

    def add_steps(
        self, *, env_steps: int, agent_steps: int, module_steps: Mapping[str, int] | None = None
    ) -> None:
        """Count what a sample holds; `module_steps` are its rows by policy id."""
        self._count("num_env_steps_sampled", env_steps)
        self._count("num_agent_steps_sampled", agent_steps)
        for policy_id, rows in (module_steps or {}).items():
            self._count(f"{_MODULE_STEPS}/{policy_id}", rows)

    def add_episode(self, result: EpisodeResult) -> None:
        """Count an episode that is over, whole, however many fragments it came in."""
        if not result.training_enabled:
            self._count("num_untrained_episodes", 1)
            self._count("num_untrained_env_steps", result.length)
        elif result.faulty:
            self._count("num_faulty_episodes", 1)
        elif not any(result.agent_steps.values()):
            self._count("num_episodes_without_actions", 1)
        else:
            self._count("num_episodes", 1)
        self._results.append(result)

    def add_restart(self) -> None:
        """Count an env that was made anew."""
        self._count("num_env_restarts", 1)

    def add_dropped_rows(self, rows: int) -> None:
        """Count rows of faulty episodes that never left."""
        self._count("num_dropped_rows", rows)

    def read(self) -> dict[str, Any]:
        """Return `summarize`'s names and the counts, and clear all but the lifetime's.

        The counts are `num_env_steps_sampled`, `num_agent_steps_sampled`, `num_episodes`,
        `num_faulty_episodes`, `num_episodes_without_actions`, `num_env_restarts`,
        `num_dropped_rows`, `num_untrained_episodes`, `num_untrained_env_steps`, and
        `num_module_steps_sampled`, rows by policy id, each also with `_lifetime` behind its name;
        `faulty_eps_ids` are the ids of faulty episodes of which fragments had left before the
        fault.
        """
        results = self._results.take()
        out = summarize(results)
        out |= _by_policy(self._counts)
        out |= {f"{name}_lifetime": count for name, count in _by_policy(self._lifetime).items()}
        out["faulty_eps_ids"] = [
            result.eps_id for result in results if result.faulty and result.fragments
        ]
        self._counts = dict.fromkeys(_COUNTS, 0)
        return out

    def collect_delta(self) -> MetricsDelta:
        """Return what `read` would tell of, and clear it."""
        counts = {name: count for name, count in self._counts.items() if count}
        delta = MetricsDelta(results=self._results.take(), counts=counts)
        self._counts = dict.fromkeys(_COUNTS, 0)
        return delta

    def add_delta(self, delta: MetricsDelta) -> None:
        """Count what another has collected."""
        for result in delta.results:
            self._results.append(result)
        for name, count in delta.counts.items():
            self._count(name, count)

    def get_state(self) -> dict[str, int]:
        """Return the lifetime's counts."""
        return dict(self._lifetime)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from the lifetime's counts of another; unknown names are left alone."""
        known = [name for name in state if name in _COUNTS or name.startswith(f"{_MODULE_STEPS}/")]
        self._lifetime = dict.fromkeys(_COUNTS, 0) | {name: int(state[name]) for name in known}

    def _count(self, name: str, number: int) -> None:
        for counts in (self._counts, self._lifetime):
            counts[name] = counts.get(name, 0) + number


class PerfTimers:
    """Time per iteration of the sampling loop, in milliseconds, under RLlib's names.

    Args:
        ema_coef: None: the mean over all iterations. Else an exponential moving average,
            `(1 - ema_coef) * old + ema_coef * new`, that starts with the first iteration's time
            (RLlib's starts from 0 and is too low for long).

    Raises:
        ConfigError: `ema_coef` is not in (0, 1].
    """

    def __init__(self, ema_coef: float | None = None) -> None:
        check_number("ema_coef", ema_coef, over=0.0, most=1.0, optional=True)
        self.ema_coef = ema_coef
        self.iterations = 0
        self._current = dict.fromkeys(PERF_TIMERS, 0.0)
        self._values = dict.fromkeys(PERF_TIMERS, 0.0)

    def add(self, timer: str, seconds: float) -> None:
        """Add time of this iteration; `timer` is one of `PERF_TIMERS`."""
        self._current[timer] += seconds

    def end_iteration(self) -> None:
        """One poll is dealt with: its times enter the averages."""
        self.iterations += 1
        if self.ema_coef is None:
            for timer, seconds in self._current.items():
                self._values[timer] += seconds
        else:
            new = 1.0 if self.iterations == 1 else self.ema_coef
            for timer, seconds in self._current.items():
                self._values[timer] += new * (seconds - self._values[timer])
        self._current = dict.fromkeys(PERF_TIMERS, 0.0)

    def read(self) -> dict[str, float]:
        """Return `{"mean_env_wait_ms": ..., ...}`; zeros before the first iteration ends."""
        count = 1 if self.ema_coef is not None else max(self.iterations, 1)
        return {f"mean_{timer}_ms": 1e3 * value / count for timer, value in self._values.items()}


def _by_policy(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return counts with those per policy in a dict by its id."""
    modules: dict[str, int] = {}
    out: dict[str, Any] = {_MODULE_STEPS: modules}
    for name, count in counts.items():
        prefix, slash, policy_id = name.partition("/")
        if slash:
            modules[policy_id] = count
        else:
            out[prefix] = count
    return out


def _spread(name: str, values: list[float] | list[int]) -> dict[str, float]:
    column = np.asarray(values, np.float64)
    numbers = (column.mean(), np.min(column), np.max(column))
    return {
        f"{name}_{suffix}": float(number) for suffix, number in zip(_SPREAD, numbers, strict=True)
    }
