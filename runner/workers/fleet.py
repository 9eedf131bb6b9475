"""The env actors of one pool: how each comes up, and what `BusVectorEnv` and `ActorPool` share.

A worker group (`worker_group.py`) whose processes host envs, and the arrays that these and the pool
exchange. An actor comes up by its process, its hello, its envs built, its rows mapped; then it is
ready. Leaves out how processes are started (`connections.py`), the end of those that do not come up
(`lifecycle.py`), what is where in the arrays (`actors/arrays/blocks.py`), and what a step means to
its caller.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import gymnasium
import msgspec
from gymnasium.vector import AutoresetMode

from envbus.actors.arrays.blocks import BlockLayout, Blocks
from envbus.actors.arrays.finite import CheckFinite, in_words
from envbus.actors.arrays.info_columns import RECORD_BYTES, InfoReader, records_of
from envbus.actors.env import source as env_source
from envbus.actors.process.host import ENTRY
from envbus.actors.process.remote import REMOTE_SERVICE
from envbus.actors.protocol import Build, Built, Making, MapBlocks, MapInfos, Mapped
from envbus.actors.spaces import spaces
from envbus.bus.brief import brief
from envbus.bus.broker.events import Notify, PeerReady
from envbus.bus.errors import ClosedError, DecodeError, EncodeError, NoPeerError, StartError
from envbus.bus.memory.arena import Arena
from envbus.bus.process.pickling import pickled
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.words import BYTES_PER_DOER, WORDS_EXIST, Asker
from envbus.bus.wire.codec import decode
from envbus.bus.wire.messages import Payload, Request, Tree
from envbus.runner.errors import to_exception
from envbus.runner.workers.config import FleetConfig, choose_num_actors
from envbus.runner.workers.elements import Elements
from envbus.runner.workers.replies import misfit
from envbus.runner.workers.step_words import StepWords
from envbus.runner.workers.waiting_note import WaitingNote
from envbus.runner.workers.worker import Actor, ActorState, Replied, WorkerEvent, share_out
from envbus.runner.workers.worker_group import Stage, WorkerGroup, raise_if_failed

__all__ = ["Fleet", "RowMap", "env_spaces", "raise_build_error"]

logger = logging.getLogger("envbus.runner.workers.fleet")

#: Envs that one actor may have: far more than any has, and a few megabytes of what is kept per env.
MAX_ENVS: Final = 1 << 16


class RowMap:
    """One row per env, in shared memory or in this process' own.

    Args:
        observation_space: The single one.
        action_space: Likewise.
        num_envs: Rows.
        shared: Whether others map the same memory.
        check_finite: What follows where an env writes what is not finite.
        num_doers: How many others may be asked by words; 0: nobody.

    Attributes:
        observation_space: As it was given.
        blocks: This process' views of all rows.
        request: Maps the rows of env 0; what else is needed for those of others is theirs to add.
        arena: The shared memory; None: there is none.
        words: By which all may be asked to step; None: they are asked by messages only.
        infos: What they leave there besides of steps that were asked so; None with `words`.

    Raises:
        ConfigError: There is not enough shared memory.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        *,
        shared: bool,
        check_finite: CheckFinite,
        num_doers: int = 0,
    ) -> None:
        self.observation_space = observation_space
        layout = BlockLayout.of(observation_space, action_space, num_envs)
        is_fixed = layout.observations is not None and layout.actions is not None
        num_doers = num_doers if shared and is_fixed else 0
        self._words_at = layout.size
        self._infos_at = self._words_at + num_doers * BYTES_PER_DOER
        size = self._infos_at + (num_envs * RECORD_BYTES if num_doers else 0)
        self.arena = Arena.create(size) if shared else None
        self.words: Asker | None = None
        self.infos: InfoReader | None = None
        if self.arena is not None and num_doers:
            memory = self.arena.buffer
            self.words = Asker(memory[self._words_at : self._infos_at], num_doers)
            self.infos = InfoReader(records_of(memory[self._infos_at :], num_envs))
        self.blocks = layout.views(
            bytearray(layout.size) if self.arena is None else self.arena.buffer
        )
        self.request = MapBlocks(
            observation_space=Tree(spaces.to_plain(observation_space)),
            action_space=Tree(spaces.to_plain(action_space)),
            num_envs=num_envs,
            first_row=0,
            check_finite=in_words(check_finite),
        )
        self._has_observations = layout.observations is not None

    def request_of(self, index: int, first_row: int) -> MapBlocks:
        """Return what maps the rows of one of those who may be asked, and its words."""
        request = msgspec.structs.replace(self.request, first_row=first_row)
        if self.words is None:
            return request
        words = self._words_at + index * BYTES_PER_DOER
        return msgspec.structs.replace(request, words=words, infos=self._infos_at)

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return descriptor and bytes of the shared memory and what is where.

        For another process of this host to read; the descriptor stays this object's. None: there
        is none, or observations are not in it.
        """
        if self.arena is None or not self._has_observations:
            return None
        return self.arena.fd, self.arena.size, self.request

    def close(self) -> None:
        """Let go of the shared memory. Idempotent."""
        if self.arena is not None:
            self.arena.close()


def _misfit(actor: Actor, built: Built, *, is_first: bool) -> str | None:
    """Return what an actor says that cannot be, for people; None: it can.

    A remote one may be anybody's program: nothing is made room for before this.
    """
    counts, expected = built.counts, len(actor.sources)
    if len(counts) != expected or len(built.space_of) != expected:
        return f"{len(counts)} of {expected} envs, with spaces of {len(built.space_of)}"
    if min(counts) < 1 or sum(counts) > MAX_ENVS:
        return f"{brief(counts)} envs; 1 to {MAX_ENVS} are allowed"
    if not is_first and counts != actor.counts:
        return f"{brief(counts)} envs, and {brief(actor.counts)} before"
    if not isinstance(built.metadata.value, dict):
        return f"envs whose metadata are {brief(built.metadata.value)}"
    try:
        distinct = built.spaces.value
        if any(len(pair) != 2 for pair in distinct):
            return f"envs of {brief(distinct)}, which are no pairs of spaces"
        if min(built.space_of) < 0 or max(built.space_of) >= len(distinct):
            return f"spaces {brief(built.space_of)} of {len(distinct)}"
        if actor.remote:
            for pair in distinct:
                for space in pair:
                    spaces.from_plain(space)
    except (ValueError, TypeError) as exc:
        return f"envs of unknown spaces: {exc}"
    return None


def _raise_for_unsendable(actor: Actor, build: Build) -> None:
    """Raise for the first source of an actor that cannot be sent, and say which it is."""
    assert actor.codec is not None
    for number, source in enumerate(actor.sources, actor.first_source):
        try:
            actor.codec.encode(msgspec.structs.replace(build, sources=Tree(source), specs=None))
        except EncodeError as exc:
            raise EncodeError(
                f"env {number} cannot be sent to its actor: {exc}{_advice(source)}"
            ) from exc


def _names_one_of(source: object, ids: Sequence[str]) -> bool:
    """Return whether a source in its plain form is one of Gymnasium ids."""
    return isinstance(source, dict) and str(source.get("gym")).rpartition(":")[2] in ids


def _advice(source: object) -> str:
    """Name what a factory refers to and cannot take along to its actor; "" if there is none."""
    if not inspect.isfunction(source):
        return ""
    referred = inspect.getclosurevars(source)
    names = []
    for name, value in {**referred.nonlocals, **referred.globals}.items():
        try:
            pickled(value)
        except Exception:  # any object's own code may run here
            names.append(repr(name))
    if not names:
        return ""
    return f"; it refers to {', '.join(names)}: let the factory make that itself, in the actor"


def raise_build_error(actor: Actor, built: Built) -> None:
    """Raise what the constructor of an actor's env raised, as its own type where possible."""
    error = built.errors[0]
    env_error, original = to_exception(
        error,
        env_id=actor.env_ids.start + error.slot,
        actor=actor.name,
        incarnation=actor.incarnation,
        trusted=not actor.remote,
    )
    if original is not None:
        raise original from env_error
    raise env_error


class Fleet(WorkerGroup[Actor]):
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
            env_source.keep(
                [env_source.to_plain(env_source.parse_source(source)) for source in env_sources]
            ),
            num_actors,
            remote=config.remote_actors,
            shared=config.shared_memory,
        )

        self._autoreset_mode = autoreset_mode
        self._specs = env_source.local_registry()
        #: Where the rows are; None until all envs are built.
        self._rows: RowMap | None = None
        #: Of remote actors, by index: what may stand in their rows.
        self._elements: dict[int, Elements] = {}
        #: By which all actors may be asked to step at once; None: by messages only.
        self.words: StepWords | None = None
        #: Tells of envs that wait, once all are ready; None: it has nothing to say (any more).
        self._note: WaitingNote | None = None
        super().__init__(actors, config, ENTRY)

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
            StartError: An actor ended.
            ConfigError: There is not enough shared memory.
        """
        links = self._connections.ringing_links if WORDS_EXIST else None
        self._rows = rows = RowMap(
            observation_space,
            action_space,
            self.num_envs,
            shared=self.config.shared_memory,
            check_finite=self.config.check_finite,
            num_doers=0 if links is None else len(self.actors),
        )
        self._is_up = True
        if rows.words is not None:
            assert rows.infos is not None
            assert links is not None
            self.words = StepWords(
                rows.words,
                rows.infos,
                self.actors,
                links,
                self._connections.spins,
                self._ask_unawaited,
                self.config.timeouts.step,
            )
        for actor in self.actors:
            with contextlib.suppress(NoPeerError):  # the event of its end follows
                self._map(actor)
        while any(actor.state is not ActorState.READY for actor in self.actors):
            for event in self.poll(1.0):
                raise_if_failed(event)
        if len(self.actors) < self.num_envs and not self.config.remote_actors:
            self._note = WaitingNote(self.num_envs)
        return rows.blocks

    def poll(self, timeout: float) -> Iterator[WorkerEvent[Actor]]:
        """Wait for events, as `WorkerGroup.poll`."""
        events = super().poll(timeout)
        if self._note is not None:
            waited = self.waited if self.words is None else self.waited + self.words.waited
            # One that is being started again may have no process, and nobody's env waits there.
            if waited >= self._note.due and all(a.state is ActorState.READY for a in self.actors):
                pids = [actor.child.pid for actor in self.actors if actor.child]
                self._note = None if self._note.look(waited, pids) else self._note
        return events

    def _ask_unawaited(self, actor: Actor, request: MapInfos) -> None:
        self.ask(actor, request, timeout=None, tag=None)

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return where the arrays are, for other processes: see `RowMap.shared_rows`."""
        return None if self._rows is None else self._rows.shared_rows()

    # --- how an actor comes up: its process, its hello, its envs built, its rows mapped -------

    def _start(self, actor: Actor) -> None:
        self._connections.launch(actor)
        if actor.remote:
            self._employ()

    def _on_hello(self, outcome: PeerReady) -> None:
        """A peer is there: have its envs built, or keep it for when it is needed."""
        actor = self._connections.actor_of(outcome.peer)
        if actor is not None:
            self._build(actor)
        elif REMOTE_SERVICE in outcome.hello.services:
            self._connections.join(outcome.peer, outcome.hello.name)
            self._employ()

    def _on_notice(self, outcome: Notify) -> None:
        """An actor says which of its envs it is making."""
        actor = self._connections.actor_of(outcome.peer)
        if actor is not None and outcome.header.payload_type == Making.__name__:
            with contextlib.suppress(DecodeError):  # it is for people only
                actor.making = decode(Making, outcome.frames).source

    def _on_stage(self, answer: Replied[Actor]) -> bool:
        """An actor has done what it was asked; return whether it is READY with that."""
        if isinstance(answer.reply, Built):
            self._on_built(answer.actor, answer.reply)
        elif isinstance(answer.reply, Mapped):
            answer.actor.state = ActorState.READY
            return True
        return False

    def _employ(self) -> None:
        """Give remote actors that have joined to those that wait for one."""
        while (actor := self._connections.engage()) is not None:
            with contextlib.suppress(NoPeerError):  # it left as well, which is told next
                self._build(actor)

    def _build(self, actor: Actor) -> None:
        actor.state = ActorState.BUILDING
        actor.making = -1
        if actor.remote:
            actor.check = functools.partial(self._check, actor)
        build = Build(
            sources=Tree(actor.sources),
            autoreset_mode=self._autoreset_mode.value,
            first_env_id=actor.env_ids.start,
            specs=Tree(self._specs) if self._specs and not actor.remote else None,
        )
        timeout = self.config.timeouts.start
        with self._telling(actor):
            try:
                self._requests.ask(actor, build, timeout=timeout, tag=Stage.BUILD)
            except EncodeError as exc:
                _raise_for_unsendable(actor, build)
                self._specs, left = env_source.sendable(self._specs)
                if not left or any(_names_one_of(source, left) for source in actor.sources):
                    raise
                logger.warning("actors do not know %s: %s", ", ".join(left), exc)
                build = msgspec.structs.replace(build, specs=Tree(self._specs))
                self._requests.ask(actor, build, timeout=timeout, tag=Stage.BUILD)

    def _check(self, actor: Actor, request: Request[Any], reply: Payload | Exception) -> str | None:
        """Return what is wrong with a reply; None: nothing is."""
        leaves = None if self._rows is None else self._rows.blocks.observations
        elements = self._elements.get(actor.index)
        if elements is not None and actor.is_behind:
            elements.forget()
        return misfit(request, reply, len(actor.env_ids), leaves, elements)

    def _on_built(self, actor: Actor, built: Built) -> None:
        actor.making = -1
        if built.errors:
            if self._rows is None:
                raise_build_error(actor, built)
            logger.error("%s: %s", actor.describe(), built.errors[0].traceback)
            self._connections.kill(actor)
            return
        if (wrong := _misfit(actor, built, is_first=self._rows is None)) is not None:
            text = f"{actor.describe()} cannot be used: it says that it has built {wrong}"
            if self._rows is None:
                raise StartError(text)
            logger.error("%s", text)
            self._connections.kill(actor)
            return
        actor.built = built
        actor.counts = built.counts
        actor.state = ActorState.BUILT
        if self._rows is not None:
            self._map(actor)

    def _map(self, actor: Actor) -> None:
        """Have an actor whose envs are built map its rows.

        Raises:
            NoPeerError: It has ended.
        """
        assert self._rows is not None
        if actor.remote:
            space, first = self._rows.observation_space, actor.env_ids.start
            self._elements[actor.index] = Elements(space, first, self._autoreset_mode)
        request = self._rows.request_of(actor.index, actor.env_ids.start)
        arena = self._rows.arena
        with self._telling(actor):
            if arena is not None and actor.child is not None:
                number = actor.child.pipe.next_number()
                try:
                    actor.child.pipe.send_fd(number, arena.fd)
                except ClosedError as exc:
                    self._connections.end(actor)
                    raise NoPeerError(str(exc), request_id=0, peer=actor.name) from exc
                request = msgspec.structs.replace(request, passed=number)
            timeout = self.config.timeouts.start
            self._requests.ask(actor, request, timeout=timeout, tag=Stage.MAP)

    def _let_go(self) -> None:
        if self._rows is not None:
            self._rows.close()


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
