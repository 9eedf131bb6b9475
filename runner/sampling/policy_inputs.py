"""What an `InputPolicy` is told besides observations, for envs with one agent each. Pure.

Leaves out which inputs there are (`policies/policy.py`), and those of agents one by one
(`inference.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from envbus.actors.spaces.spaces import is_fixed_size
from envbus.bus.errors import ConfigError
from envbus.runner.batches.metrics import SampleMetrics
from envbus.runner.batches.nested import Tree, map_tree
from envbus.runner.policies.connectors import Connector, given_space
from envbus.runner.policies.policy import zero_action
from envbus.runner.policies.policy_output import check_shapes
from envbus.runner.sampling.columns import RunningEpisodes

__all__ = ["ActionForm", "ColumnInputs"]

_Ints: TypeAlias = npt.NDArray[np.int64]
#: What comes of actions that are nested otherwise than their space.
_MISFITS: Final = (KeyError, IndexError, TypeError, ValueError)


class ActionForm(NamedTuple):
    """The form of the actions that a policy gives."""

    space: Space[Any]
    #: The zero of the space, as arrays.
    zero: Tree

    @classmethod
    def of(cls, space: Space[Any] | None, connector: Connector | None, whose: str) -> ActionForm:
        """Return the form of the actions of an env, or an agent.

        Args:
            space: Its own; None: it is not known.
            connector: Of actions, if there is one.
            whose: "the env", or which agent.

        Raises:
            ConfigError: There is no zero that all rows can have.
        """
        if space is None:
            raise ConfigError(f"prev_actions: {whose} does not tell its action space")
        given = given_space(connector, space)
        if not is_fixed_size(given):
            raise ConfigError(f"prev_actions: actions of {whose} have no fixed size: {given}")
        return cls(given, map_tree(np.asarray, zero_action(given)))

    def cast(self, action: Tree) -> Tree:
        """Return one action in the dtypes of the space.

        Raises:
            ValueError: It has not the form of the space.
        """
        check_shapes(action, self.space)
        try:
            return map_tree(lambda zero, leaf: np.array(leaf, zero.dtype), self.zero, action)
        except _MISFITS as exc:
            raise self.misfit(exc) from exc

    def misfit(self, error: Exception) -> ValueError:
        """Return what is to be raised where actions are not nested as the space is."""
        return ValueError(
            f"prev_actions: the policy's actions do not have the form of {self.space}: "
            f"{type(error).__name__}: {error}"
        )


class ColumnInputs:
    """The inputs of a policy, by env.

    Args:
        names: Which ones, of `INPUTS`.
        space: Of one action of an env.
        connector: Of actions, if there is one.
        episodes: Those that run.
        metrics: Count the env steps of samples.
    """

    def __init__(
        self,
        names: Sequence[str],
        num_envs: int,
        space: Space[Any],
        connector: Connector | None,
        episodes: RunningEpisodes,
        metrics: SampleMetrics,
    ) -> None:
        self._names = names
        self._episodes = episodes
        self._metrics = metrics
        self._rewards = np.zeros(num_envs, np.float32)
        #: None: they are not wanted.
        self._actions: Tree = None
        if "prev_actions" in names:
            self._form = ActionForm.of(space, connector, "the env")
            self._actions = map_tree(
                lambda leaf: np.repeat(leaf[np.newaxis], num_envs, axis=0), self._form.zero
            )

    def of(self, env_ids: _Ints) -> dict[str, Tree]:
        """Return all inputs of these envs by name, in arrays that are nobody else's."""
        return {name: self._one(name, env_ids) for name in self._names}

    def begin(self, env_ids: _Ints) -> None:
        """Episodes begin: nothing was done before."""
        self._rewards[env_ids] = 0.0
        if self._actions is not None:
            zero = self._form.zero
            map_tree(lambda kept, leaf: kept.__setitem__(env_ids, leaf), self._actions, zero)

    def act(self, env_ids: _Ints, actions: Tree) -> None:
        """The policy has chosen.

        Raises:
            ValueError: Actions have not the form of their space.
        """
        if self._actions is None:
            return
        check_shapes(actions, self._form.space, rows=True)
        try:
            map_tree(lambda kept, new: kept.__setitem__(env_ids, new), self._actions, actions)
        except _MISFITS as exc:
            raise self._form.misfit(exc) from exc

    def reward(self, env_ids: _Ints, rewards: npt.NDArray[Any]) -> None:
        """This came of it."""
        self._rewards[env_ids] = rewards

    def _one(self, name: str, env_ids: _Ints) -> Tree:
        match name:
            case "prev_actions":
                return map_tree(lambda leaf: leaf[env_ids], self._actions)
            case "prev_rewards":
                return self._rewards[env_ids]
            case "t":
                return self._episodes.length[env_ids]
            case "eps_id":
                return self._episodes.ids.running[env_ids]
            case "env_id":
                return env_ids.copy()
        assert name == "timestep"
        return np.full(len(env_ids), self._metrics.env_steps, np.int64)
