"""What is trained, with which vector envs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "OURS", "TrainingCase"]

#: The way that is meant by "envbus".
OURS = "envbus"


@dataclass(frozen=True)
class TrainingCase:
    """One row of the table: a library, an env, and how many of it."""

    library: str
    label: str
    env: str
    num_envs: int
    steps: int
    #: Vector envs: in one process, in processes of the library's own, and envbus.
    ways: tuple[str, ...] = ("one process", "subprocesses", OURS)

    @property
    def name(self) -> str:
        """Return what it is called on the command line."""
        return f"{self.library}:{self.env}:{self.num_envs}"

    @property
    def environment(self) -> str:
        """Return which of `environments.LIBRARIES` it runs in."""
        return f"training_{'sb3' if self.library == 'cleanrl' else self.library}"


CASES = {
    case.name: case
    for case in (
        TrainingCase("sb3", "Stable-Baselines3 PPO", "CartPole-v1", 64, 100_000),
        TrainingCase("sb3", "Stable-Baselines3 PPO", "HalfCheetah-v5", 8, 32_768),
        TrainingCase("rllib", "RLlib PPO", "CartPole-v1", 16, 16_000),
        TrainingCase("tianshou", "Tianshou PPO", "CartPole-v1", 16, 50_000),
        TrainingCase("torchrl", "TorchRL PPO", "CartPole-v1", 16, 32_768),
        TrainingCase(
            "cleanrl", "CleanRL's PPO", "CartPole-v1", 16, 102_400, ("subprocesses", OURS)
        ),
    )
}
