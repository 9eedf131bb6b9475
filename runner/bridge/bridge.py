"""`ExternalEnvBridge`: makes simulators that call us look like envs to a runner.

Owns the sockets and performs what `episodes.py` decides. Leaves out what is asked for and how it is
checked (`requests.py`), and simulators that this process starts itself (`hosting.py`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from envbus.actors.external.agreement import Agreement, SpaceLike
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import RefusedError, SimulatorError, SpaceMismatchError
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.external.protocol import (
    BRIDGE,
    ActionChosen,
    BridgeJoined,
    GetModel,
    JoinBridge,
)
from envbus.actors.spaces import Space
from envbus.bus.broker import Broker, Outcome
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import (
    MAX_HEARTBEAT,
    BrokerConfig,
    BrokerStatistics,
    Notify,
    PeerLeft,
)
from envbus.bus.codec import decode
from envbus.bus.errors import ClosedError, ConfigError, EncodeError, ProtocolError
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.gateway.gateway import PRELOAD
from envbus.bus.keys import Allow, BrokerKeys, PathLike
from envbus.bus.lane_router import with_lanes
from envbus.bus.messages import Failed, FailureCode, Header, Kind, Reply
from envbus.bus.serve import describe
from envbus.bus.transport import Frames
from envbus.bus.zmq_transport import ZmqRouter
from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.bridge.episodes import Episodes
from envbus.runner.bridge.hosting import Hosts, Where
from envbus.runner.bridge.models import Models
from envbus.runner.bridge.private_door import PrivateDoor
from envbus.runner.bridge.requests import VERBS, read
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.bridge.vocabulary import (
    Act,
    Answer,
    BridgeStatistics,
    Chosen,
    ClientLost,
    Confirm,
    Drain,
    Effect,
    EpisodeLimits,
    GiveUp,
    Join,
    Record,
    Refuse,
    Tick,
    Welcome,
)
from envbus.runner.latency import LatencyHistogram

__all__ = ["ExternalEnvBridge"]

logger = logging.getLogger("envbus.runner.bridge")

#: Messages that are taken at one go. Whoever sends the next ones does so while the owner acts upon
#: these; taking all there are would have both wait for each other by turns.
_MOST_TAKEN = 256
#: Seconds that a `poll` without a time-out waits.
_PATIENCE = 300.0


class ExternalEnvBridge:
    """A server to which simulators connect; each of their episodes is an env to its owner.

        with ExternalEnvBridge(observation_space, action_space) as bridge:
            print("simulators connect to", bridge.address)
            while True:
                result = bridge.poll()
                bridge.send_actions({
                    episode: policy(agents)
                    for episode, agents in result.observations.items()
                    if episode not in result.ended
                })

    Simulators are served while `poll` runs, and wait while it does not. One thread creates, uses
    and stops the bridge; nothing of it survives a fork.

    Args:
        observation_space: Of the one agent, or a dict by agent; None: the first client's.
        action_space: The same.
        bind: Endpoints for simulators. A wider one than this host needs `keys`, or `insecure`.
        keys: File of the bridge's secret key: see docs/security.md.
        allow: Whose keys: as in `envbus.bus.standalone.serve_broker`.
        insecure: Allow binding wider than this host without keys.
        policy_ids: What clients are told of who may act.
        limits: Of episodes and clients; None: the defaults.
        gateway: Lets simulators without ZeroMQ in, over plain TCP and WebSocket; None: none.
        confirm_ends: Tell a client that its episode has ended only when `confirm` says that it is
            safe: in a file, for example.
        lanes: Whether Python clients of this user and host may come without ZeroMQ, where that can
            be: beside loopback and `ipc://` endpoints of a bridge without keys.

    Attributes:
        gateway: Where those connect: `gateway.tcp`, `gateway.websocket`; None: nowhere.
        policy_ids: As above; those who join later are told of changes.

    Raises:
        ConfigError: Spaces, endpoints, keys, limits or the gateway's settings cannot be used.
        TransportError: An endpoint or address cannot be bound.
    """

    def __init__(
        self,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        *,
        bind: str | Sequence[str] = "tcp://127.0.0.1:*",
        keys: PathLike | None = None,
        allow: Allow | None = None,
        insecure: bool = False,
        policy_ids: Iterable[str] = ("default",),
        limits: EpisodeLimits | None = None,
        gateway: GatewayConfig | None = None,
        confirm_ends: bool = False,
        lanes: bool = True,
    ) -> None:
        if (observation_space is None) != (action_space is None):
            raise ConfigError("give both spaces, or neither: then the first client's are taken")
        self._agreement: Agreement | None = None
        if observation_space is not None and action_space is not None:
            self._agreement = Agreement(observation_space, action_space)
        self.policy_ids = list(policy_ids)
        self._limits = limits or EpisodeLimits()
        router = ZmqRouter(
            [bind] if isinstance(bind, str) else list(bind),
            keys=BrokerKeys.load(keys, allow),
            insecure=insecure,
        )
        config = BrokerConfig(owner=BRIDGE, max_heartbeat=MAX_HEARTBEAT)
        self._router = with_lanes(router) if lanes and keys is None else router
        self._broker = Broker(self._router, BrokerCore(config))
        self._models = Models(self._limits.max_version_lag)
        self._episodes = Episodes(
            self._limits,
            lambda: secrets.token_hex(16),
            is_stale=self._models.is_stale,
            confirm_ends=confirm_ends,
        )
        #: Peers that know no ext types.
        self._plain: set[bytes] = set()
        self._names: dict[bytes, str] = {}
        #: Those of whom the log has told.
        self._greeted: set[bytes] = set()
        #: Requests that were refused for what they hold, before any episode was asked.
        self._refused = 0
        self._door = PrivateDoor(self._router.bind_private)
        self._hosts = Hosts(self._door.open, self._broker.watch)
        self._ends: deque[SimulatorError] = deque()
        self._clock = time.monotonic
        self._stopped = False
        self.gateway: Gateway | None = None
        if gateway is not None:
            try:
                self.gateway = Gateway(self._door.open(PRELOAD), gateway)
            except BaseException:
                self.stop()
                raise
            self._broker.watch(self.gateway.fileno())

    # --- what it is ---------------------------------------------------------------------------

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What simulators connect to; a `*` port is replaced by the real one."""
        return self._broker.endpoints

    @property
    def address(self) -> str:
        """The first of `endpoints`."""
        return self.endpoints[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """`endpoints`, and the gateway's: `stream://`, `ws://`, with TLS `streams://`, `wss://`."""
        return self.endpoints + (() if self.gateway is None else self.gateway.addresses)

    @property
    def private_endpoint(self) -> str:
        """What processes of this user and host can connect to without keys; made when asked for.

        Raises:
            TransportError: It cannot be bound.
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        return self._door.open()

    @property
    def observation_space(self) -> Space | None:
        """Of the agent, or an `AgentSpaces`; None until the first client has told it."""
        return None if self._agreement is None else self._agreement.observation_space

    @property
    def action_space(self) -> Space | None:
        """As `observation_space`."""
        return None if self._agreement is None else self._agreement.action_space

    @property
    def is_multi_agent(self) -> bool:
        """Whether the spaces are given by agent; else the one agent is `"agent0"`."""
        return self._agreement is not None and self._agreement.multi_agent

    @property
    def closed(self) -> bool:
        """Whether it was stopped."""
        return self._stopped

    @property
    def limits(self) -> EpisodeLimits:
        """As given, or the defaults."""
        return self._limits

    def host(
        self,
        env: ExternalEnv | Callable[[], ExternalEnv],
        *,
        where: Where = "thread",
        name: str | None = None,
    ) -> str:
        """Run a simulator here, beside others that connect, and return its name.

        When its `run` raises or returns, or its process ends, the next `poll` raises that.

        Args:
            env: It, or a function that makes it. For a process it is pickled by cloudpickle.
            where: `"thread"`, of this process; or `"process"`, one of its own, which ends with this
                one whatever happens.
            name: For people; None: a new one.

        Raises:
            ConfigError: It is no `ExternalEnv`, or cannot be pickled.
            StartError: The process did not come up.
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        return self._hosts.start(env, where, name)

    # --- the dict side --------------------------------------------------------------------------

    def poll(self, timeout: float | None = None, *, min_envs: int = 1) -> BridgeResult:
        """Wait for episodes to have something, and return it.

        Returns as soon as `min_envs` episodes have something, or all that are open; or when
        `timeout` is over. It waits without spinning, and serves all clients meanwhile.

        Args:
            timeout: Seconds; 0: look, do not wait; None: 300.
            min_envs: Episodes to wait for.

        Returns:
            By episode and agent: see `BridgeResult`. Empty if the time was over.

        Raises:
            ValueError: `min_envs` is not positive, or `timeout` is negative.
            SimulatorError: A simulator that `host` runs has ended; says how, with its traceback.
                Told once for each; nothing is lost by it.
            ClosedError: The bridge was stopped.
        """
        timeout = _PATIENCE if timeout is None else timeout
        if min_envs < 1 or not timeout >= 0.0:
            raise ValueError(f"min_envs={min_envs} must be 1 or more, timeout={timeout} 0 or more")
        self._assert_usable()
        episodes, clock = self._episodes, self._clock
        now = clock()
        deadline = now + timeout
        self._raise_end()
        while True:
            if self._has_enough(min_envs):
                self._serve(0.0)  # what has come meanwhile goes with it
                break
            wake_at = episodes.wake_at()
            until = deadline if wake_at is None else min(deadline, wake_at)
            self._serve(max(until - now, 0.0))
            self._raise_end()
            now = clock()
            if now >= deadline or self._has_enough(min_envs):
                break
        return self._collect()

    def send_actions(
        self, actions: Mapping[str, Mapping[Any, Any]], *, policy_version: int = 0
    ) -> None:
        """Answer those who wait, by `{episode_id: {agent_id: action}}`.

        Actions that nobody waits for (the episode was ended, the client's time is over, or it has
        acted itself) are dropped and counted.

        Args:
            actions: Of all agents that were observed and are not done; those of others are ignored.
            policy_version: What clients are told.

        Raises:
            SpaceMismatchError: An action is outside the action space. Those who wait for such a one
                are told; all others have got theirs.
            ValueError: The action of an agent is missing. Nobody has got anything.
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        awaited = self._episodes.awaited
        given: dict[str, dict[Any, Any] | SpaceMismatchError] = {}
        for episode_id, by_agent in actions.items():
            agents = awaited(episode_id)
            if agents is None:
                given[episode_id] = {}
                continue
            for agent in agents:
                if agent not in by_agent:
                    missing = [str(agent) for agent in agents if agent not in by_agent]
                    raise ValueError(f"episode {episode_id}: no action for {', '.join(missing)}")
            try:
                given[episode_id] = self._checked(episode_id, agents, by_agent)
            except SpaceMismatchError as mismatch:
                given[episode_id] = mismatch
        error: SpaceMismatchError | None = None
        handle, clock = self._episodes.handle, self._clock
        for episode_id, action in given.items():
            if type(action) is dict:
                event: GiveUp | Chosen = Chosen(episode_id, action, policy_version)
            else:
                assert isinstance(action, SpaceMismatchError)
                error = action
                event = GiveUp(episode_id, _told(error))
            self._perform(handle(event, clock()))
        if error is not None:
            raise error

    def fail(self, episode_ids: Iterable[str], error: BaseException) -> None:
        """Tell those who wait for actions of these episodes why they get none: `error`.

        The episodes go on; the observations that were not acted upon are void. Clients raise the
        exception as what it is, if they know its class.
        """
        self._assert_usable()
        failed, now = _told(error), self._clock()
        for episode_id in episode_ids:
            self._perform(self._episodes.handle(GiveUp(episode_id, failed), now))

    def confirm(self, episode_ids: Iterable[str], error: BaseException | None = None) -> None:
        """Tell clients that their episodes, which were in `ended`, are over; see `confirm_ends`.

        Args:
            episode_ids: Others than those that wait for this are ignored.
            error: Why they are not safe, for the clients to raise.
        """
        self._assert_usable()
        failed, now = None if error is None else _told(error), self._clock()
        for episode_id in episode_ids:
            self._perform(self._episodes.handle(Confirm(episode_id, failed), now))

    def publish(
        self,
        policy_id: str,
        *,
        weights: Mapping[str, Any] | None = None,
        onnx: bytes | None = None,
        version: int,
    ) -> None:
        """Let clients choose a policy's actions themselves; those that do so get this model soon.

        May be called by any thread.

        Args:
            policy_id: Its id.
            weights: As the policy's `get_weights` gives them; copied.
            onnx: A file's content instead.
            version: Of these weights; rows say it.

        Raises:
            ConfigError: Neither or both are given, or it is too large.
        """
        self._models.publish(policy_id, weights=weights, onnx=onnx, version=version)

    def retain_models(self, policy_ids: Iterable[str]) -> None:
        """Hand out no more models but those of these policies."""
        self._models.retain(set(policy_ids))

    def drain(self) -> None:
        """Let no more episodes begin; those that are open go on. Clients are told when they try."""
        self._assert_usable()
        self._perform(self._episodes.handle(Drain(), self._clock()))

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `poll(0)` is worth a call."""
        return self._router.fileno()

    def statistics(self) -> BridgeStatistics:
        """Return counts since the start."""
        counts = self._episodes.statistics()
        counts.refused += self._refused
        return counts

    @property
    def latency(self) -> LatencyHistogram:
        """From when requests for actions were taken until the actions were sent."""
        return self._episodes.latency

    def broker_statistics(self) -> BrokerStatistics:
        """Return the counts of the message bus below, as a frozen struct."""
        return self._broker.statistics()

    # --- end ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Close the sockets; all clients are told. Idempotent."""
        if self._stopped:
            return
        failed = Failed(code=FailureCode.PEER_LOST, message="the bridge was stopped", peer=BRIDGE)
        now = self._clock()
        for episode_id in self._episodes.open_ids():
            self._perform(self._episodes.handle(GiveUp(episode_id, failed), now))
        for episode_id in self._episodes.unconfirmed_ids():
            self._perform(self._episodes.handle(Confirm(episode_id, failed), now))
        for peer in self._names:
            self._broker.shut_down(peer)
        self._stopped = True
        self._hosts.close()
        if self.gateway is not None:
            self.gateway.close()
        self._broker.close()
        self._door.close()

    def __enter__(self) -> ExternalEnvBridge:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self._stopped:
            return "<ExternalEnvBridge stopped>"
        counts = self.statistics()
        return (
            f"<ExternalEnvBridge {self.address} clients={counts.clients_now} "
            f"episodes={counts.episodes_now}>"
        )

    # --- private ----------------------------------------------------------------------------------

    def _has_enough(self, min_envs: int) -> bool:
        ready = self._episodes.num_ready
        return ready >= min_envs or (0 < ready >= self._episodes.num_open)

    def _serve(self, timeout: float) -> None:
        """Wait for messages and take those that are there; then judge deadlines."""
        if self.gateway is not None:
            self.gateway.check()
            restart_at = self.gateway.wake_at()
            if restart_at is not None:
                timeout = min(timeout, max(restart_at - self._clock(), 0.0))
        for outcome in self._broker.poll(timeout, most=_MOST_TAKEN):
            self._take(outcome)
        wake_at = self._episodes.wake_at()
        if wake_at is not None and wake_at <= self._clock():
            for outcome in self._broker.poll(0.0):  # all that is there counts
                self._take(outcome)
            self._perform(self._episodes.handle(Tick(), self._clock()))

    def _raise_end(self) -> None:
        """Raise what became of one simulator that has ended."""
        if self._hosts.is_used:
            self._ends += self._hosts.take_ends()
            if self._ends:
                raise self._ends.popleft()

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Notify):
            if outcome.header.kind is Kind.REQUEST:
                self._on_request(outcome.peer, outcome.header, outcome.frames)
        elif isinstance(outcome, PeerLeft):
            self._plain.discard(outcome.peer)
            self._greeted.discard(outcome.peer)
            if (name := self._names.pop(outcome.peer, None)) is not None:
                logger.info("client %s is gone: %s", name, outcome.reason)
            self._perform(
                self._episodes.handle(ClientLost(outcome.peer, outcome.reason), self._clock())
            )

    def _on_request(self, peer: bytes, header: Header, frames: Frames) -> None:
        try:
            if header.payload_type in VERBS:
                if self._agreement is None:
                    raise ProtocolError("join the bridge first, by a JoinBridge")
                event: Any = read(header, frames, peer, self._agreement)
            elif header.payload_type == GetModel.__name__:
                self._answer(peer, header.request_id, self._models.answer(decode(GetModel, frames)))
                return
            elif header.payload_type == JoinBridge.__name__:
                event = self._join(peer, header, decode(JoinBridge, frames))
            else:
                known = ", ".join((JoinBridge.__name__, GetModel.__name__, *VERBS))
                raise ProtocolError(f"a bridge answers no {header.payload_type}; it does: {known}")
        except RefusedError as error:
            self._refused += 1
            self._answer(peer, header.request_id, error.failed())
        except ProtocolError as error:
            self._refused += 1
            failed = Failed(code=FailureCode.PROTOCOL, message=str(error), peer=BRIDGE)
            self._answer(peer, header.request_id, failed)
        else:
            self._perform(self._episodes.handle(event, self._clock()))

    def _join(self, peer: bytes, header: Header, payload: JoinBridge) -> Join:
        spaces = payload.observation_space, payload.action_space
        if (spaces[0] is None) != (spaces[1] is None):
            raise SpaceMismatchError("tell both spaces, or neither")
        if spaces[0] is not None:
            announced = Agreement.from_wire(*spaces)
            if self._agreement is None:
                self._agreement = announced
            self._agreement.check_equal(announced)
        elif self._agreement is None:
            raise SpaceMismatchError("the bridge has no spaces yet: tell yours")
        (self._plain.add if payload.plain else self._plain.discard)(peer)
        self._names[peer] = payload.client
        return Join(peer, header.request_id, payload.client, payload.resume)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Act):
                agreement = self._agreement
                assert agreement is not None
                action = effect.action
                if not agreement.multi_agent:
                    action = action[DUMMY_AGENT]
                value = to_wire(action, plain=effect.peer in self._plain)
                reply: Reply | Failed = ActionChosen(
                    action=value, policy_version=effect.policy_version
                )
            elif isinstance(effect, Answer):
                reply = effect.reply
            elif isinstance(effect, Refuse):
                reply = effect.failed
            else:
                reply = self._welcome(effect)
            self._answer(effect.peer, effect.request_id, reply)

    def _welcome(self, effect: Welcome) -> BridgeJoined:
        assert self._agreement is not None
        observation_space, action_space = self._agreement.wire
        name, held = self._names[effect.peer], len(effect.episodes)
        if effect.peer not in self._greeted:  # it may ask again, for the spaces
            self._greeted.add(effect.peer)
            logger.info("client %s has joined%s", name, f"; its episodes: {held}" if held else "")
        return BridgeJoined(
            observation_space=observation_space,
            action_space=action_space,
            multi_agent=self._agreement.multi_agent,
            policy_ids=self.policy_ids,
            lease=self._limits.lease,
            session=effect.session,
            inference=["server", "client"] if self._models else ["server"],
            episodes=effect.episodes,
        )

    def _answer(self, peer: bytes, request_id: int, answer: Reply | Failed) -> None:
        try:
            self._broker.answer(peer, request_id, answer)
        except EncodeError as error:
            failed = Failed(code=FailureCode.PROTOCOL, message=str(error), peer=BRIDGE)
            self._broker.answer(peer, request_id, failed)

    def _checked(
        self, episode_id: str, agents: Sequence[Any], by_agent: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        assert self._agreement is not None
        take, place = self._agreement.take_action, f"action for episode {episode_id}"
        if not self._agreement.multi_agent:
            (agent,) = agents
            return {agent: take(by_agent[agent], place)}
        taken: dict[Any, Any] = take({agent: by_agent[agent] for agent in agents}, place)
        return taken

    def _collect(self) -> BridgeResult:
        records, effects = self._episodes.collect()
        if effects:
            self._perform(effects)
        return _gathered(records)

    def _assert_usable(self) -> None:
        if self._stopped:
            raise ClosedError("this bridge was stopped")


def _gathered(records: Sequence[Record]) -> BridgeResult:
    """Return what the runner is shown of `records`."""
    result = BridgeResult.empty()
    observations, rewards, terminateds, truncateds, infos, off_policy_actions = result
    for record in records:
        episode_id, content = record.episode_id, record.content
        if record.fault is not None:
            result.faults.append(record.fault)
        else:
            observations[episode_id] = content["observations"]
            rewards[episode_id] = content["rewards"]
            terminateds[episode_id] = content["terminateds"]
            truncateds[episode_id] = content["truncateds"]
            infos[episode_id] = content["infos"]
            if record.off_policy is not None:
                off_policy_actions[episode_id] = record.off_policy
                if record.choice is not None:
                    result.choices[episode_id] = record.choice
            if record.first:
                result.started.append(episode_id)
        if record.last:
            result.ended.append(episode_id)
        if not record.training_enabled:
            result.untrained.add(episode_id)
        if record.unacted:
            result.unacted.add(episode_id)
    return result


def _told(error: BaseException) -> Failed:
    """Return what a client is told of an exception here: its type, text and traceback."""
    if isinstance(error, RefusedError):
        return error.failed()
    failed = describe(error)
    return msgspec.structs.replace(failed, code=FailureCode.REMOTE, peer=BRIDGE)
