"""What `EnvRunner.sample` is asked for and returns, and its settings. Pure."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.metrics import EpisodeResult
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.errors import Fault
from envbus.runner.policies.connectors import Connector, Pipeline, single_connectors
from envbus.runner.policies.policy import Policy
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.sampling.video import VideoConfig
from envbus.runner.workers.config import check_kind

__all__ = [
    "CONNECTED",
    "Connected",
    "EndlessEpisodes",
    "EnvQuotas",
    "Phase",
    "PolicyMapping",
    "Postprocess",
    "Quota",
    "RunnerConfig",
    "Sample",
    "split_quota",
    "worker_index",
]


_log = logging.getLogger(__name__)
#: Of whole episodes that do not end: env steps, and fragments, in one that are nothing to be told
#: of; iterations of a sample between two looks.
_LONG: Final = 10_000
_LONG_FRAGMENTS: Final = 10
_LOOK_INTERVAL: Final = 1_000
#: Settings that are counts, and how low they may be.
_LEAST = {
    "rollout_fragment_length": 1,
    "min_envs": 1,
    "envs_per_bridge": 1,
    "max_waiting_steps": 0,
    "run_ahead": 0,
    "worker_index": 0,
}

#: What connectors are for: each has a setting of that name.
Connected: TypeAlias = Literal["observation", "action", "reward"]
CONNECTED: Final[tuple[Connected, ...]] = get_args(Connected)
_Unit: TypeAlias = Literal["env_steps", "agent_steps", "episodes"]
#: `(agent_id, episode) -> policy id`.
PolicyMapping: TypeAlias = Callable[[AgentID, EpisodeRecorder], str]
#: `(rows of a policy, that policy) -> rows`.
Postprocess: TypeAlias = Callable[[SampleBatch, "Policy | None"], SampleBatch]


class Phase(enum.IntEnum):
    """Where an env is; ordered."""

    #: Between two episodes, and asked for nothing.
    ENDED = 0
    #: Its first observation is awaited.
    RESETTING = 1
    #: Its agents are to act on the last observations.
    WAITING = 2
    #: The policy was asked, and has not answered yet.
    ASKED = 3
    #: It was sent actions.
    STEPPING = 4
    #: It was given up.
    LOST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """How an `EnvRunner` samples."""

    #: Steps that each env contributes to a `sample()` that does not say how many.
    rollout_fragment_length: int = 200
    #: Exactly as many, cutting episodes; or whole episodes until there are at least as many.
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    #: What `rollout_fragment_length` counts: steps of the env, or rows of all its agents.
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    #: How many envs to wait for before the policies are asked; fewer where fewer are awaited.
    #: 1: whoever is ready is served. The number of envs: all together, which gives the same
    #: batches each time, and larger ones.
    min_envs: int = 1
    #: Seconds after the first env was ready, at most, that `min_envs` are waited for; with
    #: `min_envs=1`, all. None: no limit. For the envs of a pool; not with `pipelined`.
    batch_wait: float | None = None
    #: Two groups of envs, each with a part of every actor's: one steps while the policy chooses
    #: the actions of the other. The policy is asked for a whole group; `min_envs` counts for
    #: nothing. Only where rows are kept in columns.
    pipelined: bool = False
    #: As how many envs a bridge counts where what is asked for is shared out.
    envs_per_bridge: int = 1
    #: Env steps of a bridge's episodes that `serve` keeps for the next sample; when there are
    #: more, the oldest are dropped. Where whole episodes are sampled, an episode of a bridge that
    #: has more, and more than 100,000, is given up: it is answered, and its rows are dropped.
    max_waiting_steps: int = 100_000
    #: Give clients of bridges the policies' weights, whenever they are set, so that they can choose
    #: actions themselves.
    publish: bool = False
    #: A sample is over when this fraction of the envs, rounded up, has contributed its part: of
    #: the others it has what they have done, and what they were asked goes on in the next one.
    #: Not with `pipelined`.
    enough_envs: float = 1.0
    #: While a sample waits for slow envs, those that have contributed their part go on, by at most
    #: so many steps; these rows are the first of the next sample. Only where rows are kept in
    #: columns and episodes are cut; not with `pipelined` or `enough_envs`.
    run_ahead: int = 0
    #: Asked once per agent and episode. None: the only policy.
    policy_mapping_fn: PolicyMapping | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    #: Between env and policy: one for all agents, or by policy id. The batch has what the policy
    #: saw.
    observation_connector: Connector | Mapping[str, Connector] | None = None
    #: Between policy and env, likewise. The batch has what the policy gave.
    action_connector: Connector | Mapping[str, Connector] | None = None
    #: Between env and what is learnt from, likewise: clipped rewards, for example, `(rows,)`
    #: float64. The batch has what it makes of them, the metrics have the env's own.
    reward_connector: Connector | Mapping[str, Connector] | None = None
    #: Bring actions, last of all, into the finite bounds of the action space's Boxes, also inside
    #: Dict and Tuple: those of a Gaussian leave them. The batch has what the policy gave.
    clip_actions: bool = True
    #: Called where the rows are made, with those of each policy in a sample, one trajectory after
    #: the other (`SampleBatch.map_trajectories`), and with the policy; None of one that was
    #: removed. Returns the rows that leave: with more columns, such as advantages, or others.
    postprocess: Postprocess | None = None
    #: What becomes of the rows of an episode whose env failed: none leaves the runner, or they
    #: are kept up to the fault, and truncated there.
    faulty_episodes: Literal["drop", "truncate"] = "drop"
    #: What follows where an episode of a pool's env is over and no agent has acted in it, mostly by
    #: a defect of the env: a ValueError, or it is counted. Episodes of a bridge are counted.
    episodes_without_actions: Literal["raise", "count"] = "raise"
    #: Keep a column `infos`.
    infos: bool = False
    #: Episodes to film.
    video: VideoConfig | None = None
    #: Which env of the pool is seen on the screen: made with `render_mode="human"` it has a window
    #: of its own; the frames of one with "rgb_array" are shown in a window of this process.
    render_env: int | None = None
    #: What policies are told, unless `sample` says otherwise. Without it connectors learn nothing.
    explore: bool = True
    #: Env i is reset with `seed + i` the first time.
    seed: int | None = None
    #: Which of several runners it is: makes `eps_id` and `unroll_id` unique among them.
    worker_index: int = 0
    #: None: timers are means; else the coefficient of an exponential moving average.
    ema_coef: float | None = None
    #: Whether rows are kept in columns over all envs, without a Python object per step. None:
    #: where that is possible: one agent, spaces of fixed size, one policy, no callbacks that are
    #: told of single episodes, no infos, no video, no window.
    vectorized: bool | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_number(name, getattr(self, name), whole=True, least=least)
        check_number("seed", self.seed, whole=True, optional=True)
        check_number("ema_coef", self.ema_coef, optional=True)
        check_number("enough_envs", self.enough_envs, over=0.0, most=1.0)
        check_number("render_env", self.render_env, whole=True, least=0, optional=True)
        check_number("batch_wait", self.batch_wait, least=0.0, optional=True)
        self._check_kinds()
        if self.pipelined and self.enough_envs < 1.0:
            raise ConfigError("enough_envs: groups that take turns wait for their slowest env")
        if self.pipelined and self.batch_wait is not None:
            raise ConfigError("batch_wait: groups that take turns wait for their slowest env")
        if self.run_ahead:
            self._check_run_ahead()
        choices = {
            "batch_mode": ("truncate_episodes", "complete_episodes"),
            "count_steps_by": ("env_steps", "agent_steps"),
            "faulty_episodes": ("drop", "truncate"),
            "episodes_without_actions": ("raise", "count"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")

    def _check_kinds(self) -> None:
        check_kind("callbacks", self.callbacks, Callbacks, example="Callbacks()")
        if self.video is not None:
            check_kind("video", self.video, VideoConfig, example='VideoConfig(folder="videos")')
        check_mapping(self.policy_mapping_fn)
        if self.postprocess is not None and not callable(self.postprocess):
            raise ConfigError(
                f"postprocess must be a function of rows and policy, not {self.postprocess!r:.80}"
            )
        for name, example in (
            ("observation_connector", "Normalize(space)"),
            ("action_connector", "RescaleActions(space)"),
            ("reward_connector", "ClipRewards()"),
        ):
            if (given := getattr(self, name)) is not None:
                for one in given.values() if isinstance(given, Mapping) else (given,):
                    check_kind(name, one, Connector, example=f"{example}, or by policy id,")

    def _check_run_ahead(self) -> None:
        if self.pipelined:
            found = "pipelined=True: groups that take turns wait for their slowest env"
        elif self.enough_envs < 1.0:
            why = "it does not wait for slow envs; choose one of both"
            found = f"enough_envs={self.enough_envs}: {why}"
        elif self.batch_mode == "complete_episodes":
            found = 'batch_mode="complete_episodes": whole episodes end where they end'
        else:
            return
        raise ConfigError(f"run_ahead={self.run_ahead} with {found}")

    def envs_to_wait_for(self, num_envs: int) -> int:
        """Return for how many of so many envs to wait at a time."""
        if self.batch_wait is not None and self.min_envs == 1:
            return num_envs
        return self.min_envs

    def connector(self, kind: Connected, policy_id: str) -> Connector | None:
        """Return what the observations, actions or rewards of a policy's agents go through.

        A pipeline, as that names what fails within it.
        """
        given = getattr(self, f"{kind}_connector")
        one: Connector | None = given.get(policy_id) if isinstance(given, Mapping) else given
        return one if one is None or isinstance(one, Pipeline) else Pipeline([one])

    def connectors(self) -> dict[str, Connector]:
        """Return all connectors by names of their own: "observation", "action/policy id", ...

        Each comes once, also one that several policies share, so that what it learns is collected
        once. Those of a pipeline stand for themselves: "observation/1:Normalize".
        """
        found: dict[str, Connector] = {}
        for kind in CONNECTED:
            given = getattr(self, f"{kind}_connector")
            named = given if isinstance(given, Mapping) else {None: given}
            for policy_id, one in named.items():
                if one is not None:
                    found |= single_connectors(
                        kind if policy_id is None else f"{kind}/{policy_id}", one
                    )
        first = {id(one): name for name, one in reversed(found.items())}
        return {name: one for name, one in found.items() if first[id(one)] == name}

    def unique(self, number: int) -> int:
        """Return `number` as no runner with another index has it."""
        return (self.worker_index << 40) + number


def check_mapping(policy_mapping_fn: object) -> None:
    """Raise `ConfigError` unless it is a function, or None."""
    if policy_mapping_fn is not None and not callable(policy_mapping_fn):
        raise ConfigError(
            "policy_mapping_fn must be a function of agent id and episode, "
            f"not {policy_mapping_fn!r:.80}"
        )


@dataclass(frozen=True, slots=True)
class Sample(MultiAgentBatch):
    """What `EnvRunner.sample` returns: rows by policy id, and how they came about.

    Rows are ordered by env, then by episode, agent and time.
    """

    #: Envs that had not contributed their part when the time was over, or enough others had; what
    #: they were asked goes on.
    late: tuple[int, ...] = ()
    #: Envs that failed meanwhile.
    faults: tuple[Fault, ...] = ()
    #: Episodes that ended, faulty ones too, in the order in which they did.
    episodes: tuple[EpisodeResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a call asks for; without a number, one fragment of each env."""

    unit: Literal["env_steps", "episodes", "fragment"] = "fragment"
    amount: int = 0

    @classmethod
    def of(cls, num_env_steps: int | None, num_episodes: int | None) -> Quota:
        """Return what a call asks for.

        Raises:
            ValueError: Both numbers are given, or one is negative.
        """
        if num_env_steps is not None and num_episodes is not None:
            raise ValueError("give num_env_steps or num_episodes, not both")
        amount = num_episodes if num_env_steps is None else num_env_steps
        if amount is None:
            return cls()
        name = "num_episodes" if num_env_steps is None else "num_env_steps"
        check_number(name, amount, whole=True, least=0)
        return cls("episodes" if num_env_steps is None else "env_steps", amount)

    @property
    def num_env_steps(self) -> int | None:
        """As `EnvRunner.sample` takes it."""
        return self.amount if self.unit == "env_steps" else None

    @property
    def num_episodes(self) -> int | None:
        """As `EnvRunner.sample` takes it."""
        return self.amount if self.unit == "episodes" else None


@dataclass(frozen=True, slots=True)
class EnvQuotas:
    """How much of a `Quota` each env is to contribute."""

    #: `(num_envs,)` int64; 0: nothing.
    amounts: npt.NDArray[np.int64]
    unit: _Unit
    #: Only whole episodes count.
    complete: bool
    #: How many envs need not contribute all of it.
    stragglers: int = 0

    def to_wait_for(self, unmet: int, min_envs: int) -> int:
        """Return how many of `unmet` envs to wait for at a time; 0: enough have contributed."""
        return max(min(min_envs, unmet - self.stragglers), 0)

    @classmethod
    def of(
        cls,
        config: RunnerConfig,
        live: npt.NDArray[np.bool_],
        *,
        num_env_steps: int | None = None,
        num_episodes: int | None = None,
        turn: int = 0,
        first: npt.NDArray[np.bool_] | None = None,
    ) -> EnvQuotas:
        """Return what a call asks for, shared out among the envs that live, `(num_envs,)`.

        Args:
            config: Says what holds if neither number is given.
            live: Which envs were not given up.
            num_env_steps: In total, exactly; in complete_episodes mode: at least.
            num_episodes: In total, exactly, each from its first step to its end.
            turn: Which env gets one more first, if the number does not divide.
            first: `(num_envs,)` those that get one more before all others: they step already.

        Raises:
            ValueError: Both numbers are given, or one is negative.
            ConfigError: A number of episodes, where envs run ahead in episodes that are cut.
        """
        asked = Quota.of(num_env_steps, num_episodes)
        if asked.unit == "episodes" and config.run_ahead:
            raise ConfigError(
                f"num_episodes={num_episodes}: with run_ahead={config.run_ahead} episodes are cut "
                "between samples; ask for num_env_steps"
            )
        order = np.roll(np.flatnonzero(live), -turn)
        if first is not None:
            order = order[np.argsort(~first[order], kind="stable")]
        unit: _Unit = config.count_steps_by
        total = config.rollout_fragment_length * len(order)
        if asked.unit != "fragment":
            unit, total = asked.unit, asked.amount
        amounts = _equal_parts(total, len(live), order)
        num_asked = int(np.count_nonzero(amounts))
        enough = math.ceil(num_asked * config.enough_envs - 1e-9)
        complete = config.batch_mode == "complete_episodes" or unit == "episodes"
        return cls(amounts, unit, complete, num_asked - enough)


class EndlessEpisodes:
    """Warns once, of the first episode that seems to have no end, where whole ones are awaited.

    Such a sample lasts for ever, and its rows pile up: mostly of an env that has no time limit.
    """

    def __init__(self, config: RunnerConfig) -> None:
        self._limit = max(_LONG, _LONG_FRAGMENTS * config.rollout_fragment_length)
        self._iterations = 0
        self._told = False

    def is_due(self) -> bool:
        """Return whether to `look`; called in each iteration of a sample of whole episodes."""
        self._iterations += 1
        return not self._told and self._iterations % _LOOK_INTERVAL == 0

    def look(self, lengths: dict[int, int]) -> None:
        """Warn if an episode is too long; `lengths` are env steps so far, by env."""
        env_id, length = max(lengths.items(), key=lambda item: item[1], default=(0, 0))
        if length > self._limit:
            self._told = True
            _log.warning(
                "env %d: its episode goes on after %d steps, and whole episodes are awaited; does "
                "it end, or is max_episode_steps missing?",
                env_id,
                length,
            )


def _equal_parts(total: int, num_envs: int, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return `(num_envs,)` parts of the envs in `order`, of which the first get one more."""
    parts = np.zeros(num_envs, np.int64)
    each, rest = divmod(total, max(len(order), 1))
    parts[order] = each
    parts[order[:rest]] += 1
    return parts


def split_quota(
    total: Quota, num_envs: Sequence[int], owed: Sequence[Quota | None], *, turn: int
) -> list[Quota | None]:
    """Return what each of some runners is to be asked for; None: nothing.

    Each env contributes an equal part, wherever it is. Who has been asked before and has not
    delivered is not asked again: what it owes counts, so that the total comes out exactly.
    Env `turn` is the first to get one more, if the number does not divide.
    """
    free = [index for index, quota in enumerate(owed) if quota is None]
    quotas: list[Quota | None] = [None] * len(owed)
    if total.unit == "fragment" or not free:
        for index in free:
            quotas[index] = total
        return quotas
    coming = sum(quota.amount for quota in owed if quota is not None and quota.unit == total.unit)
    counts = [num_envs[index] for index in free]
    count = sum(counts)
    order = np.roll(np.arange(count), -turn)
    parts = _equal_parts(max(total.amount - coming, 0), count, order)
    for index, part in zip(free, np.split(parts, np.cumsum(counts)[:-1]), strict=True):
        amount = int(part.sum())
        if amount:
            quotas[index] = Quota(total.unit, amount)
    return quotas


def worker_index(first: int, index: int, incarnation: int, num_runners: int) -> int:
    """Return the `RunnerConfig.worker_index` of one life of one runner; no other life has it."""
    return first + index + num_runners * incarnation
