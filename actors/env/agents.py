"""Envs with several agents, made to look like an env with one.

So that slots, restarts, seeds and errors need not know of agents: the observation is a *record*,
a plain dict of what the agents got, and the action a dict by agent. Three kinds are taken:
PettingZoo's ParallelEnv, its AECEnv, and RLlib's MultiAgentEnv, or what looks like it. None of
these libraries is imported here: an env that is there has imported its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

import gymnasium
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from envbus.actors.arrays.copies import own
from envbus.actors.env.old_gym import CUT_SHORT, note_old_api, takes
from envbus.actors.spaces.agent_spaces import AgentID, AgentSpaces, RecordSpace
from envbus.actors.spaces.spaces import Plain, to_plain
from envbus.bus.brief import brief

__all__ = ["ALL", "AgentsEnv", "in_agents_env"]

#: Stands beside the agents in terminateds and truncateds, for the env as a whole.
ALL = "__all__"

#: Where envs tell which agents they may ever have.
_AGENT_LISTS = ("possible_agents", "get_agent_ids", "_agent_ids", "agents")


def in_agents_env(made: object) -> object:
    """Return an `AgentsEnv` around `made` if that is an env with several agents, else `made`.

    PettingZoo's AECEnv goes through PettingZoo's own `aec_to_parallel` where it says that it can;
    one that takes turns (board games) steps only who is to move.
    """
    if isinstance(made, type | AgentsEnv | VectorEnv):
        return made
    zoo: Any = sys.modules.get("pettingzoo.utils.env")
    if zoo is not None and isinstance(made, zoo.AECEnv):
        return AgentsEnv(_in_parallel(made), derive_all=True)
    if zoo is not None and isinstance(made, zoo.ParallelEnv):
        return AgentsEnv(made, derive_all=True)
    if not callable(getattr(made, "reset", None)) or not callable(getattr(made, "step", None)):
        return made
    if isinstance(made, gymnasium.Env):
        if _is_rllib(made):
            return AgentsEnv(made, derive_all=False)
        return made
    if callable(getattr(made, "observation_space", None)):  # PettingZoo's form, its class or not
        return AgentsEnv(made, derive_all=True)
    if _is_rllib(made) or any(hasattr(made, name) for name in (*_AGENT_LISTS, "action_spaces")):
        return AgentsEnv(made, derive_all=False)
    return made


def _is_rllib(made: object) -> bool:
    # Not by the names of attributes alone: a Gymnasium env may well have `agents`.
    return any(cls.__name__ == "MultiAgentEnv" for cls in type(made).__mro__) or callable(
        getattr(made, "get_agent_ids", None)
    )


def _in_parallel(env: Any) -> object:
    if not (getattr(env, "metadata", None) or {}).get("is_parallelizable", False):
        return TurnEnv(env)
    from pettingzoo.utils.conversions import aec_to_parallel  # it has made `env`

    return aec_to_parallel(env)


class AgentsEnv(gymnasium.Env[Any, Any]):
    """An env with several agents as a `gymnasium.Env`.

    Its observation is a record:

        {"observations": {agent: ...}, "rewards": {agent: ...},
         "terminateds": {agent: ..., "__all__": ...}, "truncateds": {..., "__all__": ...},
         "infos": {agent: ...}, "agents": [...]}

    where the dicts may name different agents, just as the env gave them; "agents" are those that
    are alive. After a reset all rewards are 0 and all flags False. The reward is the sum of the
    rewards (0 if they are no numbers), the flags are those of "__all__", the info is empty. Other
    attributes are the env's.

    Args:
        env: The env.
        derive_all: "__all__" follows from the env's list of living agents, as in PettingZoo;
            else the env says it, and it is an error if it does not.
    """

    def __init__(self, env: Any, *, derive_all: bool) -> None:
        self.inner = env
        self._derive_all = derive_all
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self._takes = takes(env.reset)
        #: By agent, shapes of the rewards of this episode that are arrays.
        self._reward_shapes: dict[AgentID, tuple[int, ...]] = {}
        agents = _possible_agents(env)
        self.observation_space = RecordSpace({a: space_of(env, a, "observation") for a in agents})
        self.action_space = AgentSpaces({a: space_of(env, a, "action") for a in agents})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the env; return the record and an empty info.

        Raises:
            TypeError: The env returned something else than two dicts, or one of the old Gym API.
        """
        given: dict[str, Any] = {"seed": seed, "options": options}
        given = {name: value for name, value in given.items() if value is not None}
        if not options and "options" not in self._takes:  # empty: only a mask was given
            given.pop("options", None)
        if "seed" in given and "seed" not in self._takes:  # the old API
            seed_by_method = getattr(self.inner, "seed", None)
            if callable(seed_by_method):
                seed_by_method(given.pop("seed"))
        result = self.inner.reset(**given)
        observations, infos = self._dicts("reset", result, ["observations", "infos"])
        self._reward_shapes.clear()
        record = {
            "observations": observations,
            "rewards": dict.fromkeys(observations, 0.0),
            "terminateds": {**dict.fromkeys(observations, False), ALL: False},
            "truncateds": {**dict.fromkeys(observations, False), ALL: False},
            "infos": infos,
            "agents": self._agents(observations),
        }
        return record, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Step the env by `{agent: action}`, which may be empty.

        Raises:
            TypeError: The env returned something else than five dicts, or four of the old Gym API,
                or a reward that cannot be added to others.
            ValueError: "__all__" is missing from its flags, or stands where agents stand; or an
                agent's rewards are arrays of different shapes.
        """
        names = ["observations", "rewards", "terminateds", "truncateds", "infos"]
        result = self.inner.step(action)
        observations, rewards, terminateds, truncateds, infos = self._dicts("step", result, names)
        self._check_rewards(rewards)
        alive = self._agents(observations)
        if self._derive_all:
            terminateds[ALL], truncateds[ALL] = _derive_all(alive, terminateds, truncateds)
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            if ALL not in flags:
                raise ValueError(
                    f"{self}: step returned {name} without {ALL!r}, which says whether the episode "
                    f"is over for all agents; it has {_some(flags)}"
                )
        record = {
            "observations": observations,
            "rewards": rewards,
            # Some envs give None, or 0.0.
            "terminateds": {agent: bool(flag) for agent, flag in terminateds.items()},
            "truncateds": {agent: bool(flag) for agent, flag in truncateds.items()},
            "infos": infos,
            "agents": alive,
        }
        return record, _total(rewards), bool(terminateds[ALL]), bool(truncateds[ALL]), {}

    def agent_spaces(self, agent_id: AgentID) -> list[Plain]:
        """Return observation and action space of any agent, in `spaces/spaces.py`'s plain form."""
        return [
            to_plain(space_of(self.inner, agent_id, kind)) for kind in ("observation", "action")
        ]

    def render(self) -> Any:
        """Return what the env draws."""
        return self.inner.render()

    def close(self) -> None:
        """Close the env, if it can be closed."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()

    @property
    def unwrapped(self) -> Any:
        """The env itself, without PettingZoo's wrappers."""
        return getattr(self.inner, "unwrapped", self.inner)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the env."""
        if not force and not hasattr(self.inner, name):
            return False
        setattr(self.inner, name, value)
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # not made yet, or a copy in the making
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __str__(self) -> str:
        return f"env {self.metadata.get('name') or type(self.inner).__qualname__}"

    def _agents(self, observations: dict[Any, Any]) -> list[Any]:
        agents = getattr(self.inner, "agents", None)
        return list(observations if agents is None else agents)

    def _check_rewards(self, rewards: Mapping[Any, Any]) -> None:
        """Refuse what would fail where rewards of several steps are added up."""
        for agent, reward in rewards.items():
            if type(reward) is float:
                continue
            try:
                0.0 + reward
            except TypeError:
                raise TypeError(
                    f"{self}: step returned the reward {brief(reward)} for agent {brief(agent)}; "
                    "rewards are numbers"
                ) from None
            if shape := getattr(reward, "shape", ()):
                known = self._reward_shapes.setdefault(agent, shape)
                if shape != known:
                    raise ValueError(
                        f"{self}: step returned a reward of shape {shape} for agent "
                        f"{brief(agent)}; earlier ones had {known}"
                    )

    def _dicts(self, verb: str, result: object, names: list[str]) -> list[dict[Any, Any]]:
        """Return plain dicts of what `verb` returned: a defaultdict would not cross a socket."""
        if not isinstance(result, tuple) or len(result) != len(names):
            result = self._of_old_api(verb, result)
        if not isinstance(result, tuple) or len(result) != len(names):
            came = f"{len(result)} values" if isinstance(result, tuple) else _kind(result)
            raise TypeError(f"{self}: {verb} must return {', '.join(names)}; got {came}")
        for name, found in zip(names, result, strict=True):
            if type(found) is not dict and not isinstance(found, Mapping):
                raise TypeError(
                    f"{self}: {name} of {verb} must be a dict by agent, got a {found!r}"
                )
            if ALL in found and name in ("observations", "rewards"):
                raise ValueError(f"{self}: {name} of {verb} have an agent called {ALL!r}")
        return [dict(cast("Mapping[Any, Any]", found)) for found in result]

    def _of_old_api(self, verb: str, result: object) -> object:
        """Return in today's form what `verb` has returned in that of the old API, or as it is."""
        told = result
        if verb == "reset" and isinstance(result, Mapping):
            told = result, {agent: {} for agent in result}
        elif verb == "step" and isinstance(result, tuple) and len(result) == 4:
            told = _five_dicts(*result)
        if told is not result:
            note_old_api(self.unwrapped)
        return told


class TurnEnv:
    """A game whose agents take turns, stepped by the action of the agent that is to move.

    For PettingZoo's AECEnv where PettingZoo cannot make a ParallelEnv of it. Its two dicts and five
    dicts are those of a ParallelEnv: who is to move has an observation, and at the end each agent
    has a last one.

    An agent's reward is what it got since its own last move, as `AECEnv.last` counts it.
    """

    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self, **kwargs: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Reset the game; return observation and info of the agent that begins."""
        self._env.reset(**kwargs)
        observations, _, _, _, infos = self._hand_out()
        return observations, infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Make the move of the agent whose turn it is; return five dicts.

        Raises:
            ValueError: There is no action of that agent.
        """
        agent = self._env.agent_selection
        if agent not in actions:
            raise ValueError(
                f"it is the turn of {agent!r}, but there are actions of {list(actions)} only"
            )
        self._env.step(actions[agent])
        return self._hand_out()

    def observation_space(self, agent_id: AgentID) -> gymnasium.Space[Any]:
        """Return an agent's space."""
        space: gymnasium.Space[Any] = self._env.observation_space(agent_id)
        return space

    def action_space(self, agent_id: AgentID) -> gymnasium.Space[Any]:
        """Return an agent's space."""
        space: gymnasium.Space[Any] = self._env.action_space(agent_id)
        return space

    @property
    def unwrapped(self) -> Any:
        """The game itself."""
        return self._env.unwrapped

    def __getattr__(self, name: str) -> Any:
        if name == "_env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def _hand_out(self) -> tuple[dict[Any, Any], ...]:
        """Let agents that are done leave, each with its last observation, up to who is to move."""
        env = self._env
        observations: dict[Any, Any] = {}
        rewards: dict[Any, Any] = {}
        terminateds: dict[Any, Any] = {}
        truncateds: dict[Any, Any] = {}
        infos: dict[Any, Any] = {}
        while env.agents:
            agent = env.agent_selection
            # The game may write to it for whom comes next.
            observation, reward, terminated, truncated, info = own(env.last())
            observations[agent], rewards[agent], infos[agent] = observation, reward, info
            terminateds[agent], truncateds[agent] = terminated, truncated
            if not (terminated or truncated):
                break
            env.step(None)
        return observations, rewards, terminateds, truncateds, infos


def _five_dicts(
    observations: Any, rewards: Any, dones: Any, infos: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the five dicts that four of the old API mean: who is done by a time limit is cut."""
    if not isinstance(dones, Mapping) or not isinstance(infos, Mapping):
        return observations, rewards, dones, {ALL: False}, infos  # it is told what is wrong
    limited = {a for a, info in infos.items() if isinstance(info, Mapping) and info.get(CUT_SHORT)}
    if limited:
        limited.add(ALL)
    truncateds = {agent: bool(done) and agent in limited for agent, done in dones.items()}
    terminateds = {agent: bool(done) and not truncateds[agent] for agent, done in dones.items()}
    return observations, rewards, terminateds, truncateds, infos


def _derive_all(
    alive: list[Any], terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]
) -> tuple[bool, bool]:
    """Return "__all__" of both flags: over when nobody is left, and then by one of them.

    It counts as truncated if anybody who left with this step could have gone on, else as
    terminated: an agent whose both flags are set has terminated.
    """
    if any(not (terminateds.get(a, False) or truncateds.get(a, False)) for a in alive):
        return False, False
    cut = any(flag and not terminateds.get(agent, False) for agent, flag in truncateds.items())
    return not cut, cut


def _total(rewards: Mapping[Any, Any]) -> float:
    try:
        return float(sum(rewards.values()))
    except (TypeError, ValueError):  # e.g. vectors, of envs with several objectives
        return 0.0


def _possible_agents(env: Any) -> list[Any]:
    """Return the agents that the env names before its first reset; empty if it does not."""
    for name in _AGENT_LISTS:
        found = getattr(env, name, None)
        if callable(found):
            found = found()
        if found:  # sets of strings have another order in each process
            return sorted(found, key=repr) if isinstance(found, set | frozenset) else list(found)
    for name in ("observation_spaces", "observation_space"):
        by_agent = _by_agent(getattr(env, name, None))
        if by_agent:
            return list(by_agent)
    return []


def space_of(env: Any, agent_id: AgentID, kind: str) -> gymnasium.Space[Any]:
    """Return an agent's space, in whichever way the env tells it.

    Args:
        env: The env.
        agent_id: One of its agents.
        kind: "observation" or "action".

    Raises:
        TypeError: It does not tell.
        Exception: What the env raises for an agent that it does not know.
    """
    one = getattr(env, f"{kind}_space", None)
    found: object
    if callable(one):
        found = one(agent_id)
    else:
        by_agent = {**_by_agent(one), **_by_agent(getattr(env, f"{kind}_spaces", None))}
        ask = getattr(env, f"get_{kind}_space", None)
        if agent_id in by_agent:
            found = by_agent[agent_id]
        elif one is None and callable(ask):
            found = ask(agent_id)
        else:
            found = one
    if not isinstance(found, gymnasium.Space):
        raise TypeError(
            f"the env {type(env).__qualname__} has no {kind} space for agent {agent_id!r}, but "
            f"{_kind(found)}; give it {kind}_spaces, a dict by agent"
        )
    return found


def _by_agent(found: object) -> Mapping[Any, Any]:
    if isinstance(found, spaces.Dict):
        return found.spaces  # `in` asks the Dict itself for an element, not for a key
    return found if isinstance(found, Mapping) else {}


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _some(flags: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, list(flags)[:10])) or "no key"
