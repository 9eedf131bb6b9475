"""PPO of TorchRL: its collector, its loss, its advantages."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, ParallelEnv, SerialEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from envbus.bench.training.cases import OURS
from envbus.bench.training.program import Trained, Training, run, timed
from envbus.runner.adapters.torchrl import BusEnv

__all__ = ["train"]

#: Rows of one update, how often each is used, and rows of one step of the optimizer.
_ROWS = 2048
_EPOCHS = 6
_BATCH = 256


def train(training: Training) -> Trained:
    """Train, and return how long that took."""
    torch.set_num_threads(1)
    torch.manual_seed(training.seed)
    name, num_envs = training.env, training.num_envs
    if training.way == OURS:
        envs = BusEnv([name] * num_envs)
    else:
        kind = SerialEnv if training.way == "one process" else ParallelEnv
        envs = kind(num_envs, lambda: GymEnv(name, categorical_action_encoding=True))
    envs.set_seed(training.seed)
    inputs = envs.observation_spec["observation"].shape[-1]

    def body(outputs: int) -> MLP:
        return MLP(
            in_features=inputs,
            out_features=outputs,
            num_cells=[64, 64],
            activation_class=torch.nn.Tanh,
        )

    actor = ProbabilisticActor(
        TensorDictModule(body(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(body(1), in_keys=["observation"])
    loss_of = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=1e-3)
    lengths: list[float] = []

    def learn() -> None:
        collector = Collector(envs, actor, frames_per_batch=_ROWS, total_frames=training.steps)
        for rows in collector:
            lengths.append(rows.numel() / max(int(rows["next", "done"].sum()), 1))
            with torch.no_grad():
                advantages(rows)
            flat = rows.reshape(-1)
            for _ in range(_EPOCHS):
                for part in torch.randperm(flat.numel()).split(_BATCH):
                    losses = loss_of(flat[part])
                    total = sum(one for key, one in losses.items() if key.startswith("loss_"))
                    optimizer.zero_grad()
                    total.backward()
                    torch.nn.utils.clip_grad_norm_(loss_of.parameters(), 0.5)
                    optimizer.step()
        collector.shutdown()

    seconds = timed(learn)
    last = lengths[-2:]
    return Trained(seconds, sum(last) / len(last))  # of CartPole, the return is the length


if __name__ == "__main__":
    run(train)
