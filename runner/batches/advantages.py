"""Advantages and returns of recorded transitions. Pure.

All functions take columns `(rows,)`, in which trajectories follow each other, or arrays `(T, N)`,
and compute in float64. Three things end a sum:

- *termination*: the value behind it is 0;
- *truncation*, a fault that was kept, and the end of a fragment: the value of the observation
  that came last is put in, and no reward behind it is seen;
- *a missing last observation* without termination: there is nothing to take a value of, and 0
  would call it a terminal state. The row is masked (advantage 0, `mask` False), and the row
  before it ends as a truncated one, with the value of the last observation that there is.

Sources: J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
Estimation", 2016, https://arxiv.org/abs/1506.02438, equations 11 to 16. Stable-Baselines3 computes
the same recursion, `delta[t] = r[t] + gamma * v[t+1] * nonterminal - v[t]` and `gae[t] = delta[t] +
gamma * lambda * nonterminal * gae[t+1]`, and has truncation in its rewards, as `r[t] + gamma *
v(final observation)` (`RolloutBuffer.compute_returns_and_advantage`, `OnPolicyAlgorithm.
collect_rollouts`); TorchRL's `generalized_advantage_estimate` takes `done` and `terminated` apart,
as is done here. A test compares with the first form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.runner.batches.batch import SampleBatch

__all__ = [
    "Advantages",
    "Returns",
    "add_gae",
    "bootstrap_rows",
    "discounted_returns",
    "gae",
    "n_step_returns",
    "next_values",
]

_Floats: TypeAlias = npt.NDArray[np.floating[Any]]
_Bools: TypeAlias = npt.NDArray[np.bool_]


class Advantages(NamedTuple):
    """Of the shape that was handed in, and its float dtype."""

    advantages: _Floats
    #: What a value function is fitted to: advantages + values.
    value_targets: _Floats
    #: bool; False: nothing can be said about this row, leave it out of every loss.
    mask: _Bools


class Returns(NamedTuple):
    """Of the shape that was handed in, and its float dtype."""

    #: 0 where `mask` is False.
    returns: _Floats
    #: As in `Advantages`.
    mask: _Bools


def gae(
    rewards: _Floats,
    values: _Floats,
    next_values: _Floats,
    terminateds: _Bools,
    truncateds: _Bools,
    *,
    gamma: float,
    gae_lambda: float,
    starts: _Bools | None = None,
    next_obs_valid: _Bools | None = None,
) -> Advantages:
    """Return generalised advantage estimates.

    Args:
        rewards: `(rows,)` or `(T, N)`, as all arrays here.
        values: Of each row's observation.
        next_values: Of each row's next observation (see `next_values`). Not read where the row
            terminated or its next observation is missing: it may be anything there, also NaN.
        terminateds: bool.
        truncateds: bool.
        gamma: Discount, from 0 to 1.
        gae_lambda: 0: one step of reward and a value; 1: all rewards that were seen.
        starts: bool, for columns: where a row does not continue the one before
            (`SampleBatch.trajectory_starts`). None: they are one trajectory.
        next_obs_valid: bool; None: no observation is missing.

    Raises:
        ValueError: Shapes differ, or a coefficient is out of range.
    """
    sums = _Sums(rewards, terminateds, truncateds, gamma, starts, next_obs_valid)
    sums.check(values=values, next_values=next_values)
    _check_coefficient("gae_lambda", gae_lambda)
    old = values.astype(np.float64)
    delta = sums.one_step(next_values) - np.where(sums.mask, old, 0.0)
    advantages = sums.scan(delta, gamma * gae_lambda)
    dtype = np.result_type(rewards, values, np.float32)
    return Advantages(advantages.astype(dtype), (advantages + old).astype(dtype), sums.mask)


def n_step_returns(
    rewards: _Floats,
    next_values: _Floats,
    terminateds: _Bools,
    truncateds: _Bools,
    *,
    gamma: float,
    n: int,
    starts: _Bools | None = None,
    next_obs_valid: _Bools | None = None,
) -> Returns:
    """Return the sum of up to `n` discounted rewards and the discounted value behind them.

    Fewer rewards where the trajectory ends before. Arguments as in `gae`.

    Raises:
        ValueError: Shapes differ, `gamma` is out of range, or `n` is not positive.
    """
    sums = _Sums(rewards, terminateds, truncateds, gamma, starts, next_obs_valid)
    sums.check(next_values=next_values)
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    first = sums.one_step(next_values)
    plain = np.where(sums.mask, rewards, 0.0)
    returns = first
    for _ in range(min(n, len(first)) - 1):
        longer = first.copy()
        longer[:-1] = np.where(sums.ends[:-1], first[:-1], plain[:-1] + gamma * returns[1:])
        returns = longer
    return Returns(returns.astype(np.result_type(rewards, next_values, np.float32)), sums.mask)


def discounted_returns(
    rewards: _Floats,
    terminateds: _Bools,
    truncateds: _Bools,
    *,
    gamma: float,
    next_values: _Floats | None = None,
    starts: _Bools | None = None,
    next_obs_valid: _Bools | None = None,
) -> Returns:
    """Return the sum of all discounted rewards of the trajectory, from each row on.

    `next_values` are put in where rewards end without termination. None: nothing, the plain sums of
    the rewards that are there, in which no row is masked. All else as in `gae`.

    Raises:
        ValueError: Shapes differ, or `gamma` is out of range.
    """
    if next_values is None:
        sums = _Sums(rewards, terminateds, truncateds, gamma, starts, None)
        last = rewards.astype(np.float64)
        dtype = np.result_type(rewards, np.float32)
    else:
        sums = _Sums(rewards, terminateds, truncateds, gamma, starts, next_obs_valid)
        sums.check(next_values=next_values)
        last = sums.one_step(next_values)
        dtype = np.result_type(rewards, next_values, np.float32)
    plain = np.where(sums.mask, rewards, 0.0)
    returns = sums.scan(np.where(sums.ends, last, plain), gamma)
    return Returns(returns.astype(dtype), sums.mask)


def bootstrap_rows(
    terminateds: _Bools,
    truncateds: _Bools,
    *,
    starts: _Bools | None = None,
    next_obs_valid: _Bools | None = None,
) -> tuple[npt.NDArray[np.intp], ...]:
    """Return where a row's next observation is no other row's observation, and has a value.

    These are the only ones that a value function must be asked for beyond the rows' own.

    Returns:
        What indexes the arrays: one array of rows, or two, of steps and of envs.
    """
    ends = _ends(terminateds, truncateds, starts) & ~terminateds
    return np.nonzero(ends if next_obs_valid is None else ends & next_obs_valid)


def next_values(
    values: _Floats, rows: tuple[npt.NDArray[np.intp], ...], bootstrap_values: npt.ArrayLike
) -> _Floats:
    """Return the value of each row's next observation, as far as anybody will read it.

    Args:
        values: Of each row's observation, `(rows,)` or `(T, N)`.
        rows: From `bootstrap_rows`.
        bootstrap_values: Values of `next_obs[rows]`, in that order.

    Raises:
        ValueError: There are not as many of them as rows.
    """
    given = np.asarray(bootstrap_values)
    if given.shape != rows[0].shape:
        raise ValueError(f"{len(rows[0])} rows want a value to bootstrap from, got {given.shape}")
    # Whole numbers, or flags, would cut the ones that are put in.
    dtype = values.dtype if values.dtype.kind == "f" else np.result_type(values, given)
    shifted = np.zeros_like(values, dtype)
    shifted[:-1] = values[1:]
    shifted[rows] = given
    return shifted


def add_gae(
    batch: SampleBatch,
    bootstrap_values: npt.ArrayLike | Callable[[Any], npt.ArrayLike],
    *,
    gamma: float,
    gae_lambda: float,
) -> SampleBatch:
    """Return the batch with the columns `advantages`, `value_targets` and `loss_mask`.

        batch = add_gae(batch, value_fn, gamma=0.99, gae_lambda=0.95)

    Args:
        batch: With `vf_preds`, the values of its observations, or a function that knows them.
        bootstrap_values: A function that returns the values `(n,)` of n observations, batched as in
            `batch["obs"]`. Or the values of `batch["next_obs"][rows]`, where `(rows,) =
            bootstrap_rows(batch["terminateds"], batch["truncateds"],
            starts=batch.trajectory_starts(), next_obs_valid=batch["next_obs_valid"])`.
        gamma: As in `gae`.
        gae_lambda: As in `gae`.

    Raises:
        KeyError: A column is missing.
        ValueError: There are not as many values as rows want one.
    """
    ends = batch["terminateds"], batch["truncateds"]
    where: Any = {"starts": batch.trajectory_starts(), "next_obs_valid": batch["next_obs_valid"]}
    rows = bootstrap_rows(*ends, **where)
    if callable(bootstrap_values):
        value_fn = bootstrap_values
        if "vf_preds" not in batch:
            batch = batch.with_columns(vf_preds=_values_of(value_fn, batch["obs"], len(batch)))
        last = batch[rows[0]]["next_obs"]
        # Not asked for nothing: some networks take no empty batch.
        bootstrap_values = _values_of(value_fn, last, len(rows[0])) if len(rows[0]) else ()
    values = batch["vf_preds"]
    after = next_values(values, rows, bootstrap_values)
    found = gae(batch["rewards"], values, after, *ends, gamma=gamma, gae_lambda=gae_lambda, **where)
    return batch.with_columns(
        advantages=found.advantages, value_targets=found.value_targets, loss_mask=found.mask
    )


def _values_of(value_fn: Callable[[Any], npt.ArrayLike], obs: Any, number: int) -> _Floats:
    """Return the values of observations, `(n,)`, as a function tells them."""
    found = np.asarray(value_fn(obs))
    if found.shape != (number,):
        raise ValueError(
            f"the value function returned {found.shape} for {number} observations; it has to be "
            f"({number},)"
        )
    if found.dtype.kind not in "biuf":  # None would count as NaN
        raise ValueError(f"the value function returned {found.dtype}; values are numbers")
    return found


class _Sums:
    """Where sums over time end, for one set of arrays."""

    def __init__(
        self,
        rewards: _Floats,
        terminateds: _Bools,
        truncateds: _Bools,
        gamma: float,
        starts: _Bools | None,
        next_obs_valid: _Bools | None,
    ) -> None:
        _check_coefficient("gamma", gamma)
        if rewards.ndim not in (1, 2):
            raise ValueError(f"arrays must be (rows,) or (T, N), not {rewards.shape}")
        if starts is not None and rewards.ndim == 2:
            raise ValueError("starts are for columns; in (T, N) each column is one trajectory")
        self._rewards, self._gamma = rewards, gamma
        self._terminateds = terminateds
        self.check(terminateds=terminateds, truncateds=truncateds)
        valid = np.ones(rewards.shape, np.bool_) if next_obs_valid is None else next_obs_valid
        self.check(next_obs_valid=valid)
        self.mask: _Bools = valid | terminateds
        self.ends = _ends(terminateds, truncateds, starts)
        self.ends |= ~self.mask
        self.ends[:-1] |= ~self.mask[1:]

    def check(self, **arrays: npt.NDArray[Any]) -> None:
        for name, column in arrays.items():
            if column.shape != self._rewards.shape:
                raise ValueError(f"{name} is {column.shape}, rewards are {self._rewards.shape}")

    def one_step(self, next_values: _Floats) -> npt.NDArray[np.float64]:
        """Return reward and discounted value behind it; 0 where masked."""
        bootstrapped = self.mask & ~self._terminateds
        value = np.where(bootstrapped, next_values, 0.0)
        total: npt.NDArray[np.float64] = np.where(self.mask, self._rewards, 0.0)
        return total.astype(np.float64) + self._gamma * value.astype(np.float64)

    def scan(self, terms: npt.NDArray[Any], factor: float) -> npt.NDArray[np.float64]:
        """Return x with `x[t] = terms[t]` at ends, else `terms[t] + factor * x[t + 1]`."""
        x = terms.astype(np.float64)
        if x.ndim == 2:
            factors = np.where(self.ends, 0.0, factor)
            for t in range(len(x) - 2, -1, -1):
                x[t] += factors[t] * x[t + 1]
            return x
        # All trajectories at once, from their ends on: the j-th step back concerns those that
        # are longer than j, which stand in front when sorted.
        last = np.flatnonzero(self.ends)
        lengths = np.diff(last, prepend=-1)
        order = np.argsort(-lengths, kind="stable")
        last, lengths = last[order], lengths[order]
        longest = int(lengths[0]) if len(lengths) else 0
        counts = np.searchsorted(-lengths, -np.arange(longest), side="left")
        for j in range(1, longest):
            rows = last[: counts[j]] - j
            x[rows] += factor * x[rows + 1]
        return x


def _ends(terminateds: _Bools, truncateds: _Bools, starts: _Bools | None) -> _Bools:
    ends = terminateds | truncateds
    ends[-1:] = True
    if starts is not None:
        ends[:-1] |= starts[1:]
    return ends


def _check_coefficient(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be from 0 to 1, not {value!r}")
