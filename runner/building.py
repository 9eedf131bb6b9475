"""How an actor comes up: its process, its hello, its envs built, its rows mapped, ready.

Leaves out how processes are started (`links.py`), and the end of those that do not come up
(`endings.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from typing import Any, Final

import cloudpickle
import gymnasium
import msgspec
from gymnasium.vector import AutoresetMode

from envbus.actors import env_source, spaces
from envbus.actors.protocol import Build, Built, Making, MapBlocks, Mapped
from envbus.actors.remote import REMOTE_SERVICE
from envbus.bus.brief import brief
from envbus.bus.broker_vocabulary import Notify, PeerReady
from envbus.bus.codec import decode
from envbus.bus.errors import ClosedError, DecodeError, EncodeError, NoPeerError, StartError
from envbus.bus.messages import Payload, Request, Tree
from envbus.runner.actor import Actor, ActorState
from envbus.runner.config import FleetConfig
from envbus.runner.crew import Stage
from envbus.runner.faults import to_exception
from envbus.runner.links import Links
from envbus.runner.news import Answer, Lost
from envbus.runner.replies import misfit
from envbus.runner.requests import Requests
from envbus.runner.row_map import RowMap

__all__ = ["Building", "raise_build_error"]

logger = logging.getLogger("envbus.runner.fleet")

#: Envs that one actor may have: far more than any has, and a few megabytes of what is kept per env.
MAX_ENVS: Final = 1 << 16


class Building:
    """Has the envs of actors built and their rows mapped, at the first start and at each later.

    At the first start, until `lay_out`, what fails is raised or left to the caller; later it is
    logged and ends the actor.

    Args:
        links: Where the actors are.
        requests: By which they are asked.
        config: How long they have, and whether they share memory.
        autoreset_mode: What all actors do at the end of an episode.
    """

    def __init__(
        self,
        links: Links[Actor],
        requests: Requests[Actor],
        config: FleetConfig,
        autoreset_mode: AutoresetMode,
    ) -> None:
        self._links = links
        self._requests = requests
        self._config = config
        self._autoreset_mode = autoreset_mode
        self._specs = env_source.local_registry()
        #: Where the rows are; None until the first start is over.
        self._rows: RowMap | None = None

    def start(self, actor: Actor) -> None:
        """Start an actor, or wait for a remote one; all that follows comes by what it sends.

        Raises:
            StartError: There is no process or no memory for it.
        """
        self._links.launch(actor)
        if actor.remote:
            self._employ()

    def on_hello(self, outcome: PeerReady) -> None:
        """A peer is there: have its envs built, or keep it for when it is needed."""
        actor = self._links.actor_of(outcome.peer)
        if actor is not None:
            self._build(actor)
        elif REMOTE_SERVICE in outcome.hello.services:
            self._links.join(outcome.peer, outcome.hello.name)
            self._employ()

    def on_notice(self, outcome: Notify) -> None:
        """An actor says which of its envs it is making."""
        actor = self._links.actor_of(outcome.peer)
        if actor is not None and outcome.header.payload_type == Making.__name__:
            with contextlib.suppress(DecodeError):  # it is for people only
                actor.making = decode(Making, outcome.frames).source

    def on_reply(self, answer: Answer[Actor]) -> bool:
        """An actor has done what it was asked; return whether it is READY with that."""
        if isinstance(answer.reply, Built):
            self._on_built(answer.actor, answer.reply)
        elif isinstance(answer.reply, Mapped):
            answer.actor.state = ActorState.READY
            return True
        return False

    def on_lost(self, lost: Lost[Actor]) -> bool:
        """A request by which an actor comes up failed; return whether that is seen to.

        If not, it is for the caller, whose first start has failed.
        """
        if self._rows is None:
            return False
        logger.error("%s did not come up: %s", lost.actor.describe(), lost.failed.message)
        self._links.kill(lost.actor)
        return True

    def lay_out(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        num_doers: int,
    ) -> RowMap:
        """Make the arrays for all envs, and have them mapped by each actor from now on.

        Args:
            observation_space: The single one.
            action_space: Likewise.
            num_envs: Rows.
            num_doers: Actors that may be asked by words: all, or 0.

        Raises:
            ConfigError: There is not enough shared memory.
        """
        self._rows = RowMap(
            observation_space,
            action_space,
            num_envs,
            shared=self._config.shared_memory,
            check_finite=self._config.check_finite,
            num_doers=num_doers,
        )
        return self._rows

    def map(self, actor: Actor) -> None:
        """Have an actor whose envs are built map its rows.

        Raises:
            NoPeerError: It has ended.
        """
        assert self._rows is not None
        request = self._rows.request_of(actor.index, actor.env_ids.start)
        arena = self._rows.arena
        if arena is not None and actor.child is not None:
            number = actor.child.pipe.next_number()
            try:
                actor.child.pipe.send_fd(number, arena.fd)
            except ClosedError as exc:
                self._links.end(actor)
                raise NoPeerError(str(exc), request_id=0, peer=actor.name) from exc
            request = msgspec.structs.replace(request, parcel=number)
        timeout = self._config.timeouts.start
        self._requests.ask(actor, request, timeout=timeout, tag=Stage.MAP)

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return where the arrays are, for other processes: see `RowMap.shared_rows`."""
        return None if self._rows is None else self._rows.shared_rows()

    def close(self) -> None:
        """Let go of the shared memory."""
        if self._rows is not None:
            self._rows.close()

    def _employ(self) -> None:
        """Give remote actors that have joined to those that wait for one."""
        while (actor := self._links.engage()) is not None:
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
        timeout = self._config.timeouts.start
        try:
            self._requests.ask(actor, build, timeout=timeout, tag=Stage.BUILD)
        except EncodeError:
            _raise_for_unsendable(actor, build)
            raise

    def _check(self, actor: Actor, request: Request[Any], reply: Payload | Exception) -> str | None:
        """Return what is wrong with a reply; None: nothing is."""
        leaves = None if self._rows is None else self._rows.blocks.observations
        return misfit(request, reply, len(actor.env_ids), leaves)

    def _on_built(self, actor: Actor, built: Built) -> None:
        actor.making = -1
        if built.errors:
            if self._rows is None:
                raise_build_error(actor, built)
            logger.error("%s: %s", actor.describe(), built.errors[0].traceback)
            self._links.kill(actor)
            return
        if (wrong := _misfit(actor, built, is_first=self._rows is None)) is not None:
            text = f"{actor.describe()} cannot be used: it says that it has built {wrong}"
            if self._rows is None:
                raise StartError(text)
            logger.error("%s", text)
            self._links.kill(actor)
            return
        actor.built = built
        actor.counts = built.counts
        actor.state = ActorState.BUILT
        if self._rows is not None:
            self.map(actor)


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
    try:
        distinct = [pair for pair in built.spaces.value if len(pair) == 2]
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


def _advice(source: object) -> str:
    """Name what a factory refers to and cannot take along to its actor; "" if there is none."""
    if not inspect.isfunction(source):
        return ""
    referred = inspect.getclosurevars(source)
    names = []
    for name, value in {**referred.nonlocals, **referred.globals}.items():
        try:
            cloudpickle.dumps(value)
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
    )
    if original is not None:
        raise original from env_error
    raise env_error
