"""The env actors of one pool.

What `BusVectorEnv` and `ActorPool` share: a crew (`crew.py`) whose processes host envs
(`building.py`). Leaves out what a step means to its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from envbus.actors import env_source, spaces
from envbus.actors.blocks import Blocks
from envbus.actors.host import ENTRY
from envbus.actors.protocol import MapBlocks, MapInfos
from envbus.bus.errors import NoPeerError
from envbus.bus.words import WORDS_EXIST
from envbus.runner.actor import Actor, ActorState, share_out
from envbus.runner.building import Building
from envbus.runner.config import FleetConfig, choose_num_actors
from envbus.runner.crew import Crew, raise_if_failed
from envbus.runner.links import Links, usable_cores
from envbus.runner.news import News
from envbus.runner.requests import Requests
from envbus.runner.step_words import StepWords
from envbus.runner.waiting_note import WaitingNote

__all__ = ["Fleet", "env_spaces"]


class Fleet(Crew[Actor]):
    """The actors of one pool. One thread creates, uses and closes it.

    Args:
        env_sources: One per env: anything that `env_source.parse_source` takes.
        autoreset_mode: What all actors do at the end of an episode.
        config: How actors are started and watched.
    """

    #: None of its envs is in this process: see `LocalFleet.in_place`.
    in_place: None = None

    def __init__(
        self, env_sources: Sequence[object], autoreset_mode: AutoresetMode, config: FleetConfig
    ) -> None:
        num_actors = choose_num_actors(
            len(env_sources),
            config.num_actors,
            cores=usable_cores(),
            max_concurrency=config.max_concurrency,
            remote=config.remote_actors,
        )
        actors = share_out(
            [env_source.to_plain(env_source.parse_source(source)) for source in env_sources],
            num_actors,
            remote=config.remote_actors,
            shared=config.shared_memory,
        )

        def bring_up(links: Links[Actor], requests: Requests[Actor]) -> Building:
            self._building = Building(links, requests, config, autoreset_mode)
            return self._building

        #: By which all actors may be asked to step at once; None: by messages only.
        self.words: StepWords | None = None
        #: Tells of envs that wait, once all are ready; None: it has nothing to say (any more).
        self._note: WaitingNote | None = None
        super().__init__(actors, config, ENTRY, bring_up)

    def start(self) -> None:
        """Start all actors and have their envs built, side by side.

        Raises:
            StartError: An actor's process ended, or was not ready within `timeouts.start`.
            Exception: What an env's constructor raised, as its own type where possible.
        """
        self.start_all(until=ActorState.BUILT)
        next_row = 0
        for actor in self.actors:
            actor.env_ids = range(next_row, next_row + sum(actor.counts))
            next_row = actor.env_ids.stop

    @property
    def num_envs(self) -> int:
        """Envs in all actors, once started."""
        return self.actors[-1].env_ids.stop

    def env_spaces(self) -> list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        """Return each env's observation and action space, once started."""
        return env_spaces(self.actors)

    def map_blocks(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> Blocks:
        """Lay out the arrays that runner and actors exchange, and return the runner's views.

        With shared memory they are the very arrays that the actors write; without it, they are
        private, of the same layout, and the caller fills them from the replies.

        Raises:
            StartError: An actor ended, or there is not enough shared memory.
        """
        doze = self._links.can_doze and WORDS_EXIST
        rows = self._building.lay_out(
            observation_space, action_space, self.num_envs, len(self.actors) if doze else 0
        )
        if rows.words is not None:
            assert rows.infos is not None
            self.words = StepWords(
                rows.words,
                rows.infos,
                self.actors,
                self._links,
                self._ask_unawaited,
                self.config.timeouts.step,
            )
        for actor in self.actors:
            with contextlib.suppress(NoPeerError):  # the news of its end follow
                self._building.map(actor)
        while any(actor.state is not ActorState.READY for actor in self.actors):
            for news in self.poll(1.0):
                raise_if_failed(news)
        if len(self.actors) < self.num_envs and not self.config.remote_actors:
            self._note = WaitingNote(self.num_envs)
        return rows.blocks

    def poll(self, timeout: float) -> Iterator[News[Actor]]:
        """Wait for news, as `Crew.poll`."""
        news = super().poll(timeout)
        if self._note is not None:
            waited = self.waited if self.words is None else self.waited + self.words.waited
            if waited >= self._note.due:
                pids = [actor.child.pid for actor in self.actors if actor.child]
                self._note = None if self._note.look(waited, pids) else self._note
        return news

    def _ask_unawaited(self, actor: Actor, request: MapInfos) -> None:
        self.ask(actor, request, timeout=None, tag=None)

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return where the arrays are, for other processes: see `Building.shared_rows`."""
        return self._building.shared_rows()


def env_spaces(
    actors: Sequence[Actor],
) -> list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
    """Return each env's observation and action space; all envs are built."""
    pairs: list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]] = []
    for actor in actors:
        assert actor.built is not None
        distinct = [
            (spaces.from_plain(observation), spaces.from_plain(action))
            for observation, action in actor.built.spaces.value
        ]
        for count, which in zip(actor.counts, actor.built.space_of, strict=True):
            pairs += [distinct[which]] * count
    return pairs
