"""The environments that are stepped, and the actions they are stepped with.

Imported in every library's own virtual environment, so it needs NumPy and Gymnasium only and
imports nothing else of envbus. Free envs return preallocated things: what is then measured is
the library that steps them, not the env.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt

__all__ = [
    "BURN_SECONDS",
    "TEAMS",
    "WORKLOADS",
    "BlasEnv",
    "BurnEnv",
    "DictEnv",
    "FrameEnv",
    "FreeNullEnv",
    "InfosEnv",
    "JitterEnv",
    "PixelsEnv",
    "ShortEnv",
    "TeamEnv",
    "action_ring",
    "autoreset_mode",
    "env_fns",
    "is_multi_agent",
    "make_env",
]

AnyEnv: TypeAlias = gym.Env[Any, Any]
StepResult: TypeAlias = tuple[Any, float, bool, bool, dict[str, Any]]

#: CPU seconds that one step of `BurnEnv` takes; the issue's number.
BURN_SECONDS = 200e-6
#: Steps of an episode of `ShortEnv`.
SHORT_EPISODE = 4
#: Rows and columns of the matrices of `BlasEnv`: a product takes a millisecond of one core.
BLAS_SIZE = 300
#: Lognormal of `JitterEnv`: mean 2 ms and 99th percentile 20 ms fix both parameters.
JITTER_MU, JITTER_SIGMA = -7.236, 1.429
#: Durations per jitter env before they repeat: so many that no env stays slower than the others.
#: With 512 one had a mean 1.36 times that of all, for good: slow by rule, not by chance.
JITTER_RING = 1 << 14
#: Batches of actions before they repeat; a power of two, small enough to stay in cache.
ACTION_RING = 32


class FreeEnv(gym.Env[Any, Any]):
    """An env whose step costs nothing: it returns `self.observation` and never ends."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own convention

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any] = gym.spaces.Discrete(2)
    observation: Any

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return `observation`."""
        super().reset(seed=seed, options=options)
        return self.observation, {}

    def step(self, action: object) -> StepResult:  # noqa: ARG002 - Gymnasium's signature
        """Return `observation`, no reward, and that the episode goes on."""
        return self.observation, 0.0, False, False, {}


class FreeNullEnv(FreeEnv):
    """Observes 4 float32; nothing else."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.observation = np.zeros(4, np.float32)


class PixelsEnv(FreeEnv):
    """Observes a stack of 4 grey frames of 84 x 84, uint8: 28 kB."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = gym.spaces.Discrete(6)
        self.observation = np.zeros((4, 84, 84), np.uint8)


class DictEnv(FreeEnv):
    """Observes an image (3 x 64 x 64 uint8), 17 float32 and one Discrete."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "image": gym.spaces.Box(0, 255, (3, 64, 64), np.uint8),
                "state": gym.spaces.Box(-1.0, 1.0, (17,), np.float32),
                "task": gym.spaces.Discrete(5),
            }
        )
        self.action_space = gym.spaces.Discrete(6)
        self.observation = {
            "image": np.zeros((3, 64, 64), np.uint8),
            "state": np.zeros(17, np.float32),
            "task": np.int64(1),
        }


class FrameEnv(FreeEnv):
    """Observes one frame of 3 x 512 x 512, uint8: 786 kB."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (3, 512, 512), np.uint8)
        self.action_space = gym.spaces.Discrete(6)
        self.observation = np.zeros((3, 512, 512), np.uint8)


class InfosEnv(FreeNullEnv):
    """Has five small values in each info, as MuJoCo's and Atari's envs have."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As `FreeEnv`, with an info."""
        observation, _ = super().reset(seed=seed, options=options)
        return observation, self._info()

    def step(self, action: object) -> StepResult:  # noqa: ARG002 - Gymnasium's signature
        """As `FreeEnv`, with an info."""
        self._steps += 1
        return self.observation, 0.0, False, False, self._info()

    def _info(self) -> dict[str, Any]:
        return {
            "x_position": 0.5,
            "x_velocity": 1.5,
            "reward_ctrl": -0.1,
            "lives": 3,
            "frame": self._steps,
        }


class ShortEnv(FreeNullEnv):
    """Has episodes of `SHORT_EPISODE` steps."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def step(self, action: object) -> StepResult:  # noqa: ARG002 - Gymnasium's signature
        """As `FreeEnv`, with an end."""
        self._steps += 1
        return self.observation, 0.0, self._steps % SHORT_EPISODE == 0, False, {}


class BurnEnv(FreeNullEnv):
    """Burns `BURN_SECONDS` of this thread's CPU time per step; waiting does not count."""

    def step(self, action: object) -> StepResult:  # noqa: ARG002 - Gymnasium's signature
        """Burn, then as `FreeEnv`."""
        end = time.thread_time() + BURN_SECONDS
        while time.thread_time() < end:
            pass
        return self.observation, 0.0, False, False, {}


class BlasEnv(FreeNullEnv):
    """Multiplies two matrices per step, with as many threads as NumPy's BLAS chooses."""

    def __init__(self) -> None:
        super().__init__()
        self._matrix = np.ones((BLAS_SIZE, BLAS_SIZE))
        self._product = np.empty_like(self._matrix)

    def step(self, action: object) -> StepResult:  # noqa: ARG002 - Gymnasium's signature
        """Multiply, then as `FreeEnv`."""
        np.matmul(self._matrix, self._matrix, out=self._product)
        return self.observation, 0.0, False, False, {}


class JitterEnv(FreeNullEnv):
    """Sleeps a lognormal time per step, as an env that waits for something outside does.

    Args:
        index: Which env of the vector this is. It seeds the durations, so that every library
            meets the same ones.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = np.random.default_rng(index)
        self._durations = generator.lognormal(JITTER_MU, JITTER_SIGMA, JITTER_RING).tolist()
        self._steps = 0

    def step(self, action: object) -> StepResult:  # noqa: ARG002 - Gymnasium's signature
        """Sleep, then as `FreeEnv`."""
        time.sleep(self._durations[self._steps % JITTER_RING])
        self._steps += 1
        return self.observation, 0.0, False, False, {}


class TeamEnv:
    """Four agents in the manner of RLlib's MultiAgentEnv, whose steps cost nothing.

    All observe 8 float32 and act in each of an episode's 100 steps.
    """

    possible_agents = ("a0", "a1", "a2", "a3")
    length = 100

    def __init__(self) -> None:
        box, discrete = gym.spaces.Box(-1.0, 1.0, (8,), np.float32), gym.spaces.Discrete(4)
        self.agents = list(self.possible_agents)
        self.observation_spaces = dict.fromkeys(self.agents, box)
        self.action_spaces = dict.fromkeys(self.agents, discrete)
        self._observations = {agent: np.zeros(8, np.float32) for agent in self.agents}
        self._rewards = dict.fromkeys(self.agents, 1.0)
        self._steps = 0

    def reset(
        self,
        *,
        seed: int | None = None,  # noqa: ARG002 - there is no chance in it
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        self._steps = 0
        return self._observations, {}

    def step(self, action_dict: dict[str, Any]) -> tuple[dict[str, Any], ...]:  # noqa: ARG002
        """Return the observations, rewards of 1, and whether the time is over."""
        self._steps += 1
        ends = {"__all__": self._steps >= self.length}
        return self._observations, self._rewards, {"__all__": False}, ends, {}


def _pong() -> AnyEnv:
    import ale_py  # only where this workload is run: others need not have it installed

    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5")


#: Name of the workload -> constructor of its env number `index`.
WORKLOADS: dict[str, Callable[[int], AnyEnv]] = {
    "null": lambda _: FreeNullEnv(),
    "cartpole": lambda _: gym.make("CartPole-v1"),
    "pixels": lambda _: PixelsEnv(),
    "dict": lambda _: DictEnv(),
    "infos": lambda _: InfosEnv(),
    "short": lambda _: ShortEnv(),
    "frame": lambda _: FrameEnv(),
    "halfcheetah": lambda _: gym.make("HalfCheetah-v5"),
    "pong": lambda _: _pong(),
    "burn": lambda _: BurnEnv(),
    "blas": lambda _: BlasEnv(),
    "jitter": JitterEnv,
}

#: Those with several agents, which only the sampling benchmark knows.
TEAMS: dict[str, Callable[[int], Any]] = {"team": lambda _: TeamEnv()}


#: Those whose envs begin anew in the step that ends an episode; all others do it in the next one.
_SAME_STEP = ("short",)


def autoreset_mode(workload: str) -> gym.vector.AutoresetMode:
    """Return when a workload's envs begin anew, in libraries that leave it to the caller."""
    modes = gym.vector.AutoresetMode
    return modes.SAME_STEP if workload in _SAME_STEP else modes.NEXT_STEP


def is_multi_agent(workload: str) -> bool:
    """Return whether a workload's envs have several agents."""
    return workload in TEAMS


def make_env(workload: str, index: int = 0) -> Any:
    """Return env number `index` of a workload.

    Raises:
        KeyError: There is no such workload.
    """
    return (WORKLOADS | TEAMS)[workload](index)


def env_fns(workload: str, num_envs: int) -> list[Callable[[], AnyEnv]]:
    """Return one constructor per env; plain pickle can carry them."""
    return [functools.partial(make_env, workload, index) for index in range(num_envs)]


def action_ring(workload: str, num_envs: int) -> list[npt.NDArray[Any]]:
    """Return `ACTION_RING` batches of actions, `(num_envs, *action_shape)` each.

    Sampled before the clock runs, from a fixed seed: every library gets the same ones. None for
    several agents, whose actions policies choose.
    """
    if is_multi_agent(workload):
        return []
    env = make_env(workload)
    space = gym.vector.utils.batch_space(env.action_space, num_envs)
    env.close()
    space.seed(0)
    return [np.asarray(space.sample()) for _ in range(ACTION_RING)]
