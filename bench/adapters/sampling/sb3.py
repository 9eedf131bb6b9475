"""Stable-Baselines3's `collect_rollouts` of A2C, with the value head that belongs to it.

The head is one layer on the network's input, the least that can be asked for. Options: `envs`:
"dummy" (one process) or "subproc" (one process per env).
"""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from envbus.bench.adapters.base import Opening
from envbus.bench.adapters.networks import HIDDEN, num_inputs, view
from envbus.bench.adapters.sampling.collecting import Collecting, fragment_of
from envbus.bench.adapters.workloads import env_fns

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("stable-baselines3", "torch", "gymnasium", "numpy")


class View(BaseFeaturesExtractor):
    """What the common network sees."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, num_inputs(observation_space))
        self._scale = 1.0 / 255.0 if observation_space.dtype.kind == "u" else 1.0

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = view(observations) * self._scale
        return seen


class Silent(BaseCallback):
    """Goes on."""

    def _on_step(self) -> bool:
        return True


class RolloutCollecting(Collecting):
    """Fills the rollout buffer again and again."""

    def __init__(self, opening: Opening) -> None:
        torch.set_num_threads(1)
        fns = env_fns(opening.workload, opening.num_envs)
        envs = (
            DummyVecEnv(fns)
            if opening.options["envs"] == "dummy"
            else SubprocVecEnv(fns, start_method="fork")
        )
        self._steps = fragment_of(opening.workload)
        self._num_envs = opening.num_envs
        self._model = A2C(
            "MlpPolicy",
            envs,
            n_steps=self._steps,
            seed=0,
            device="cpu",
            policy_kwargs={
                "net_arch": {"pi": [HIDDEN, HIDDEN], "vf": []},
                "activation_fn": torch.nn.Tanh,
                "features_extractor_class": View,
                "normalize_images": False,
            },
        )
        # Its buffers would be of pixels with the channels first, as they are.
        _, self._callback = self._model._setup_learn(2**62, Silent())
        self.collect()

    def collect(self) -> int:
        model = self._model
        model.policy.set_training_mode(False)
        model.collect_rollouts(model.env, self._callback, model.rollout_buffer, self._steps)
        return self._steps * self._num_envs

    def close(self) -> None:
        self._model.env.close()


def open_stepper(opening: Opening) -> Collecting:
    return RolloutCollecting(opening)
