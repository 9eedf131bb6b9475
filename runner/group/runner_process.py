"""The processes of a group's runners: what is known of each, and how it comes up.

Leaves out what they are asked once they are there (`rounds.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from gymnasium import Space

from envbus.actors import spaces
from envbus.bus.broker_vocabulary import Notify, PeerReady
from envbus.bus.errors import NoPeerError
from envbus.bus.messages import Tree
from envbus.bus.pipe_codec import PipeCodec
from envbus.runner.actor import ActorState, Member
from envbus.runner.config import FleetConfig
from envbus.runner.crew import Crew, Stage
from envbus.runner.group.host import ENTRY
from envbus.runner.group.protocol import EnvsMade, MakeEnvs, MakeRunner, Parts, RunnerMade
from envbus.runner.group.shares import worker_index
from envbus.runner.links import Links
from envbus.runner.news import Answer, Lost
from envbus.runner.requests import Requests
from envbus.runner.seeding import restart_seed

__all__ = ["RunnerCrew", "RunnerProcess"]

logger = logging.getLogger("envbus.runner.group")


class RunnerProcess(Member):
    """What a group knows of one runner."""

    def __init__(self, index: int, parts: Parts) -> None:
        super().__init__("runner", index)
        self.parts = parts
        #: 0 until its envs have been made once.
        self.num_envs = 0
        #: Id in the group of its env 0.
        self.first_env = 0

    def _holds(self) -> list[str]:
        if not self.num_envs:
            return []
        return [f"envs {self.first_env}-{self.first_env + self.num_envs - 1}"]


class _BringUp:
    """Has the envs of each runner made, then, when it is known which envs they are, itself."""

    def __init__(
        self,
        links: Links[RunnerProcess],
        requests: Requests[RunnerProcess],
        config: FleetConfig,
        num_runners: int,
    ) -> None:
        self._links = links
        self._requests = requests
        self._timeout = config.timeouts.start
        self._num_runners = num_runners
        #: Whether the first start is over: then what fails ends the process.
        self.is_up = False
        self.made: RunnerMade | None = None

    def start(self, actor: RunnerProcess) -> None:
        self._links.launch(actor)
        assert actor.child is not None
        # Samples are copied when they are joined, and need not be before.
        actor.codec = PipeCodec(actor.child.pipe)

    def on_hello(self, outcome: PeerReady) -> None:
        actor = self._links.actor_of(outcome.peer)
        if actor is not None:
            actor.state = ActorState.BUILDING
            request = MakeEnvs(index=actor.index, parts=Tree(actor.parts))
            self._requests.ask(actor, request, timeout=self._timeout, tag=Stage.BUILD)

    def on_notice(self, outcome: Notify) -> None:
        del outcome

    def on_reply(self, answer: Answer[RunnerProcess]) -> bool:
        actor, reply = answer.actor, answer.reply
        if isinstance(reply, RunnerMade):
            actor.state = ActorState.READY
            self.made = reply
            return True
        assert isinstance(reply, EnvsMade)
        if self.is_up and reply.num_envs != actor.num_envs:
            reason = f"it came back with {reply.num_envs} envs, and had {actor.num_envs}"
            logger.error("%s: %s", actor.describe(), reason)
            self._links.kill(actor, reason=reason)
            return False
        actor.num_envs = reply.num_envs
        actor.state = ActorState.BUILT
        if self.is_up:
            self.make(actor)
        return False

    def on_lost(self, lost: Lost[RunnerProcess]) -> bool:
        if not self.is_up:
            return False
        logger.error("%s did not come up: %s", lost.actor.describe(), lost.failed.message)
        self._links.kill(lost.actor)
        return True

    def make(self, actor: RunnerProcess) -> None:
        config = actor.parts.config
        seed = None if config.seed is None else config.seed + actor.first_env
        if actor.incarnation:
            seed = restart_seed(seed, actor.index, actor.incarnation)
        index = worker_index(config.worker_index, actor.index, actor.incarnation, self._num_runners)
        request = MakeRunner(seed=seed, worker_index=index)
        self._requests.ask(actor, request, timeout=self._timeout, tag=Stage.MAP)

    def close(self) -> None:
        pass


class RunnerCrew(Crew[RunnerProcess]):
    """The processes of a group.

    Args:
        parts: What each runner is made of.
        config: How they are started and watched.
    """

    def __init__(self, parts: Sequence[Parts], config: FleetConfig) -> None:
        def bring_up(links: Links[RunnerProcess], requests: Requests[RunnerProcess]) -> _BringUp:
            self._bringing_up = _BringUp(links, requests, config, len(parts))
            return self._bringing_up

        runners = [RunnerProcess(index, part) for index, part in enumerate(parts)]
        super().__init__(runners, config, ENTRY, bring_up)

    def start(self) -> None:
        """Start all runners and have their envs made, side by side.

        Raises:
            StartError: A process ended, or was not ready within `timeouts.start`.
            EncodeError: Something that a runner is made of cannot be pickled.
            RemoteError: A factory, an env or the runner's constructor raised.
        """
        self.start_all(until=ActorState.BUILT)
        first = 0
        for actor in self.actors:
            actor.first_env = first
            first += actor.num_envs
            with contextlib.suppress(NoPeerError):  # the news of its end follow
                self._bringing_up.make(actor)
        self.wait_for_all(ActorState.READY)
        self._bringing_up.is_up = True

    @property
    def num_envs(self) -> int:
        """Envs of all runners, once started."""
        return sum(actor.num_envs for actor in self.actors)

    def spaces(self) -> dict[Any, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the runner has told that came last."""
        assert self._bringing_up.made is not None
        return {
            agent_id: (spaces.from_plain(observation), spaces.from_plain(action))
            for agent_id, (observation, action) in self._bringing_up.made.spaces.value.items()
        }

    def first_versions(self) -> dict[str, int]:
        """Return the policies' versions of the runner that came last."""
        assert self._bringing_up.made is not None
        return dict(self._bringing_up.made.policy_versions)
