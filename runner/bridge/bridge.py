"""`ExternalEnvBridge`: makes simulators that call us look like envs to a runner.

Owns the sockets, and is what a runner sees. Leaves out how clients are served (`dispatcher.py`),
what is decided (`episodes.py`), and simulators that this process starts (`hosting.py`).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from envbus.actors.external.agreement import Agreement, SpaceLike
from envbus.actors.external.errors import SimulatorError
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.external.protocol import BRIDGE
from envbus.actors.spaces.spaces import Space
from envbus.bus.brief import brief
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import MAX_HEARTBEAT, BrokerConfig, BrokerStatistics
from envbus.bus.broker.loop import Broker
from envbus.bus.errors import ClosedError
from envbus.bus.forking import StaysHere, disown_in_forks
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.gateway.gateway import PRELOAD
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.settings import check_number
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.curve_keys import Allow, BrokerKeys, Entrance, PathLike
from envbus.bus.transport.local_router import LocalRouter, with_local_links
from envbus.bus.transport.zmq_sockets import ZmqRouter
from envbus.bus.wire.messages import Failed, FailureCode
from envbus.runner.batches.episode import DEFAULT_POLICY_ID
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.bridge.dispatcher import EpisodeDispatcher
from envbus.runner.bridge.episodes import Episodes
from envbus.runner.bridge.hosting import Hosts, PrivateEndpoint, Where
from envbus.runner.bridge.models import Models
from envbus.runner.bridge.requests import checked, told
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.bridge.vocabulary import (
    BridgeStatistics,
    ClientIdentity,
    Confirm,
    Drain,
    EpisodeLimits,
    GiveUp,
    RequestNote,
)
from envbus.runner.monitoring.figures import EpisodeFigures, PartFigures, figures_of
from envbus.runner.monitoring.registry import show, unshow
from envbus.runner.workers.config import check_kind, endpoints_of, list_of

__all__ = ["ExternalEnvBridge"]

#: Seconds that a `poll` without a time-out waits.
_PATIENCE = 300.0
#: Seconds beyond its time-out that it takes what is there already.
_REST = 0.25


class ExternalEnvBridge(StaysHere):
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
        allow: Whose keys: as in `envbus.bus.broker.standalone.serve_broker`.
        insecure: Allow binding wider than this host without keys.
        policy_ids: What clients are told of who may act.
        limits: Of episodes and clients; None: the defaults.
        gateway: Lets simulators without ZeroMQ in, over plain TCP and WebSocket; None: none.
        confirm_ends: Tell a client that its episode has ended only when `confirm` says that it is
            safe: in a file, for example. An `EnvRunner` says so after `Callbacks.on_episode_end`,
            and what that raises the client raises.
        local_links: Whether Python clients of this user and host may come without ZeroMQ, where
            that can be: beside loopback and `ipc://` endpoints of a bridge without keys.

    Attributes:
        confirm_ends: As given.

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
        policy_ids: Iterable[str] = (DEFAULT_POLICY_ID,),
        limits: EpisodeLimits | None = None,
        gateway: GatewayConfig | None = None,
        confirm_ends: bool = False,
        local_links: bool = True,
    ) -> None:
        agreement = Agreement.of(observation_space, action_space)
        names = list_of("policy_ids", policy_ids, '["default_policy"]')
        for name in names:
            check_kind("the id of a policy", name, str, example='"default_policy"')
        if limits is not None:
            check_kind("limits", limits, EpisodeLimits, example="EpisodeLimits(lease=10.0)")
        if gateway is not None:
            check_kind("gateway", gateway, GatewayConfig, example="GatewayConfig()")
        self._limits = limits or EpisodeLimits()
        self.confirm_ends = confirm_ends
        transport = _listen(
            bind, keys=keys, allow=allow, insecure=insecure, local_links=local_links
        )
        config = BrokerConfig(owner=BRIDGE, max_heartbeat=MAX_HEARTBEAT)
        self._broker = Broker(transport, BrokerCore(config))
        self._models = Models(self._limits.max_version_lag)
        self._episodes = Episodes(
            self._limits,
            lambda: secrets.token_hex(16),
            is_stale=self._models.is_stale,
            confirm_ends=confirm_ends,
        )
        self._dispatcher = EpisodeDispatcher(
            self._broker, self._episodes, self._models, agreement, self._limits.lease
        )
        self.policy_ids = names
        self._private = PrivateEndpoint(transport.bind_private)
        #: Where the bridge's own processes come in; None: at the private endpoint.
        self._own_tcp = transport.own_tcp
        self._hosts = Hosts(
            self._entrance,
            self._broker.watch,
            self._dispatcher.end_client,
            self._episodes.knows,
            self._limits.lease,
        )
        self._gateway: Gateway | None = None
        self._stopped = False
        #: Whether nobody comes but a simulator that runs here, so that without it nothing comes.
        self._is_for_one = False
        #: What Ctrl-C kept from the caller of `poll`.
        self._kept: list[BridgeResult] = []
        disown_in_forks(self)
        if gateway is not None:
            try:
                own = self._entrance(PRELOAD)
                self._gateway = Gateway(own.endpoint, gateway, keys=own.keys)
                self._dispatcher.find_client = self._gateway.client_of
                self._broker.watch(self._gateway.fileno())
            except BaseException:
                self.stop()
                raise
        show(self, type(self).__name__)

    @classmethod
    def of(cls, env: ExternalEnv, **settings: Any) -> ExternalEnvBridge:
        """Return a bridge for one simulator of this process, which it runs in a thread.

            with ExternalEnvBridge.of(Robot(action_space, observation_space)) as bridge:
                while True:
                    result = bridge.poll()
                    bridge.send_actions(policy(result.observations))

        What RLlib's `ExternalEnv.to_base_env` is for. When the simulator's `run` has raised or
        returned, and all that it had to tell was returned, each `poll` raises how it has ended.

        Args:
            env: It; its spaces are the bridge's.
            **settings: Further arguments of the bridge.

        Raises:
            ConfigError: It is no `ExternalEnv`, or a setting cannot be used.
            TransportError: An endpoint cannot be bound.
        """
        check_kind("env", env, ExternalEnv, example="Robot(action_space, observation_space)")
        bridge = cls(env.observation_space, env.action_space, **settings)
        try:
            bridge.host(env)
        except BaseException:
            bridge.stop()
            raise
        bridge._is_for_one = True
        return bridge

    # --- what it is ---------------------------------------------------------------------------

    @property
    def gateway(self) -> Gateway | None:
        """Where those without ZeroMQ connect: `gateway.tcp`, `gateway.websocket`."""
        return self._gateway

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
            ConfigError: The bridge is bound to TCP that other hosts can reach.
            TransportError: It cannot be bound.
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        return self._private.open()

    @property
    def policy_ids(self) -> list[str]:
        """Who may act, as clients are told; those who join later are told of changes."""
        return self._dispatcher.policy_ids

    @policy_ids.setter
    def policy_ids(self, policy_ids: list[str]) -> None:
        self._dispatcher.policy_ids = policy_ids

    @property
    def observation_space(self) -> Space | None:
        """Of the agent, or an `AgentSpaces`; None until the first client has told it."""
        agreement = self._dispatcher.agreement
        return None if agreement is None else agreement.observation_space

    @property
    def action_space(self) -> Space | None:
        """As `observation_space`."""
        agreement = self._dispatcher.agreement
        return None if agreement is None else agreement.action_space

    def use_spaces(self, on_spaces: Callable[[Space, Space], object] | None) -> None:
        """Look at the spaces that a client tells, where the bridge was given none.

        Args:
            on_spaces: Called by `poll` with the observation space and the action space, before the
                client is let in. What it raises refuses that client, and the next one may tell
                others. Spaces then hold for as long as anybody uses them, instead of for good.
        """
        self._dispatcher.on_spaces = (
            None
            if on_spaces is None
            else lambda told: on_spaces(told.observation_space, told.action_space)
        )

    def watch_requests(self, on_request: Callable[[RequestNote], object] | None) -> None:
        """Hear of each request for an episode, and of each client that joins; of no other content.

        Args:
            on_request: Called by `poll`, before the request is answered; it raises nothing. Of a
                request for an action that is not refused it is called when that has come, and
                nothing is chosen yet.
        """
        self._dispatcher.on_request = on_request

    def client_of(self, episode_id: str) -> ClientIdentity | None:
        """Return whose an episode is; None: it is not open."""
        return self._dispatcher.client_of(episode_id)

    @property
    def is_multi_agent(self) -> bool:
        """Whether the spaces are given by agent; else the one agent is `"agent0"`."""
        agreement = self._dispatcher.agreement
        return agreement is not None and agreement.multi_agent

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
        restart: bool | RestartPolicy = False,
        start_timeout: float = 300.0,
    ) -> str:
        """Run a simulator here, beside others that connect, and return its name.

        When its `run` raises or returns, or its process ends, its open episodes end faulty at once,
        and the next `poll` raises how, unless it is started again. A process that gives no sign of
        life (stopped, or stuck in C code) until the bridge's lease is over is killed, and has ended
        then. A loop without end in Python gives such signs. A thread cannot be killed: one that
        hangs is left to itself.

        Args:
            env: It, or a function that makes it. For a process it is pickled by cloudpickle.
            where: `"thread"`, of this process; or `"process"`, one of its own, which ends with this
                one whatever happens.
            name: For people; None: a new one.
            restart: True, or a `RestartPolicy` that says how often and how soon: start it again, as
                an actor of a pool is; by default not after its `run` has returned. `poll` raises
                when it is given up.
            start_timeout: Seconds that a process has, from its start, until it has joined: one that
                has not is killed. Only those count in which you `poll`. Infinite: no deadline.

        Raises:
            ConfigError: It is no `ExternalEnv`, cannot be pickled, or is not given by a function
                though it is to be made again in a thread.
            StartError: The process did not come up.
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        return self._hosts.start(env, where, name, RestartPolicy.chosen(restart), start_timeout)

    # --- the dict side --------------------------------------------------------------------------

    def poll(
        self, timeout: float | None = None, *, min_envs: int = 1, max_envs: int | None = None
    ) -> BridgeResult:
        """Wait for episodes to have something, and return it.

        Returns as soon as `min_envs` episodes have something, or all that are open; or when
        `timeout` is over. It waits without spinning, and serves all clients meanwhile.

        Args:
            timeout: Seconds; 0: look, do not wait; None: 300.
            min_envs: Episodes to wait for.
            max_envs: Episodes of which something is returned at one time; None: all. The next
                call returns what the others have.

        Returns:
            By episode and agent: see `BridgeResult`. Empty if the time was over.

        Raises:
            ConfigError: `min_envs` or `max_envs` is not positive, or `timeout` is negative.
            SimulatorError: A simulator that `host` runs has ended for good; says how, with its
                traceback. Told once for each; nothing is lost by it.
            RestartLimitError: The gateway died, or hung, too often.
            ClosedError: The bridge was stopped.

        After Ctrl-C the next call returns what this one would have, or goes on waiting for it.
        """
        check_number("timeout", timeout, least=0, optional=True)
        check_number("min_envs", min_envs, whole=True, least=1)
        check_number("max_envs", max_envs, whole=True, least=1, optional=True)
        timeout = _PATIENCE if timeout is None else timeout
        self._assert_usable()
        return hand_out(
            lambda: self._poll(min_envs, max_envs, timeout),
            self._kept.append,
            self._hosts.was_raised,
        )

    def _poll(self, min_envs: int, max_envs: int | None, timeout: float) -> BridgeResult:
        """Do what `poll` promises."""
        if self._kept:
            return self._kept.pop()
        self._serve_until(min_envs, timeout)
        return self._dispatcher.collect(max_envs)

    def _serve_until(self, min_envs: int, timeout: float) -> None:
        """Serve until so many episodes have something for the runner, or the time is over."""
        episodes, clock = self._episodes, time.monotonic
        now = clock()
        deadline = now + timeout
        self._look_after(now)
        if episodes.has_enough(min_envs):
            self._dispatcher.serve(0.0)  # what has come meanwhile goes with it
            return
        if self._is_for_one:
            self._check_is_awaited()
        while True:
            until = deadline
            for wake_at in (
                episodes.wake_at(),
                self._hosts.wake_at(),
                self._gateway_wake_at(),
                self._private.wake_at(),
            ):
                if wake_at is not None and wake_at < until:
                    until = wake_at
            self._dispatcher.serve(max(until - now, 0.0))
            now = clock()
            self._look_after(now)
            if episodes.has_enough(min_envs):
                return
            if now >= deadline and (now >= deadline + _REST or not self._dispatcher.has_more):
                return

    def _check_is_awaited(self) -> None:
        """Raise how the only simulator has ended: all that it had told is returned."""
        end = self._hosts.last_end
        if end is not None and not self._episodes.has_enough(1):
            raise SimulatorError(str(end)) from end.__cause__

    def _look_after(self, now: float) -> None:
        """Start again what has ended of what runs beside the bridge, where that is to be."""
        self._private.look_after(now)
        self._hosts.look_after(now)
        if self._gateway is not None:
            self._gateway.check()

    def _gateway_wake_at(self) -> float | None:
        return None if self._gateway is None else self._gateway.wake_at()

    @uninterrupted_call
    def send_actions(
        self, actions: Mapping[str, Mapping[Any, Any]], *, policy_version: int = 0
    ) -> None:
        """Answer those who wait, by `{episode_id: {agent_id: action}}`.

        Actions that nobody waits for (the episode was ended, the client's time is over, or it has
        acted itself) are dropped and counted. Those for an observation that an interrupt kept from
        you are dropped: call `poll` first.

        Args:
            actions: Of all agents that were observed and are not done; those of others are ignored.
            policy_version: What clients are told.

        Raises:
            SpaceMismatchError: An action is outside the action space. Those who wait for such a one
                are told; all others have got theirs.
            ValueError: The action of an agent is missing. Nobody has got anything.
            TypeError: `actions` are no dict.
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        dispatcher = self._dispatcher
        if not isinstance(actions, Mapping):
            raise TypeError(
                f"actions are {{episode_id: {{agent_id: action}}}}, not {brief(actions)}"
            )
        if self._kept:
            unseen = {i for result in self._kept for i in result.observations}
            actions = {i: actions[i] for i in actions.keys() - unseen}
        events, error = checked(
            actions, self._episodes.awaited, dispatcher.agreement, policy_version
        )
        dispatcher.handle_all(events)
        if error is not None:
            raise error

    @uninterrupted_call
    def fail(
        self, episode_ids: Iterable[str], error: BaseException, *, traceback: bool = True
    ) -> None:
        """Tell those who wait for actions of these episodes why they get none: `error`.

        The episodes go on; the observations that were not acted upon are void. Clients raise the
        exception as what it is, if they know its class.

        Args:
            episode_ids: Of whom.
            error: As above.
            traceback: Whether clients are told where it was raised, with files and lines of code.
        """
        self._assert_usable()
        failed = told(error, traceback=traceback)
        for episode_id in episode_ids:
            self._dispatcher.handle(GiveUp(episode_id, failed))

    @uninterrupted_call
    def confirm(
        self,
        episode_ids: Iterable[str],
        error: BaseException | None = None,
        *,
        traceback: bool = True,
    ) -> None:
        """Tell clients that their episodes, which were in `ended`, are over; see `confirm_ends`.

        Args:
            episode_ids: Others than those that wait for this are ignored.
            error: Why they are not safe, for the clients to raise.
            traceback: As in `fail`.
        """
        self._assert_usable()
        failed = None if error is None else told(error, traceback=traceback)
        for episode_id in episode_ids:
            self._dispatcher.handle(Confirm(episode_id, failed))

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
        self._dispatcher.handle(Drain())

    def fileno(self) -> int:
        """Return a descriptor to wait for beside others.

        Where it is readable call `poll(0)`, and wait again only after that has brought nothing,
        also behind `send_actions`. It tells of what simulators send; for deadlines and restarts,
        and where descriptors are used up, make that call now and then in any case, each second
        for example.

        Raises:
            ClosedError: The bridge was stopped.
        """
        self._assert_usable()
        return self._broker.fileno()

    def statistics(self) -> BridgeStatistics:
        """Return counts since the start."""
        counts = self._episodes.statistics()
        counts.refused += self._dispatcher.refused
        counts.surprises = self._dispatcher.complaints.counts["request"]
        counts.host_restarts = self._hosts.restarts
        return counts

    @property
    def latency(self) -> LatencyHistogram:
        """From when requests for actions were taken until the actions were sent."""
        return self._episodes.latency

    def broker_statistics(self) -> BrokerStatistics:
        """Return the counts of the message bus below."""
        return self._broker.statistics()

    # --- end ------------------------------------------------------------------------------------

    def figures(self, name: str) -> PartFigures:
        """Return what a window shows; called by another thread than polls."""
        counts, levels = figures_of(self.statistics())
        return PartFigures(
            name=name,
            kind=type(self).__name__,
            counts=counts,
            levels=levels,
            latencies={"get_action": self.latency.counts()},
        )

    def episode_figures(self) -> list[EpisodeFigures]:
        """Return what a window shows of the open episodes. As `figures`."""
        return self._episodes.figures()

    @uninterrupted_call
    def stop(self) -> None:
        """Close the sockets; all clients are told. Idempotent."""
        if self._stopped:
            return
        failed = Failed(code=FailureCode.PEER_LOST, message="the bridge was stopped", peer=BRIDGE)
        self._dispatcher.dismiss(failed)
        self._stopped = True
        unshow(self)
        with contextlib.ExitStack() as rest:  # also after Ctrl-C, which breaks off the waits
            rest.callback(self._private.close)
            rest.callback(self._broker.close)
            if self._gateway is not None:
                rest.callback(self._gateway.close)
            self._hosts.close()

    def disown(self) -> None:
        """In a forked copy: be stopped, without a word to anybody."""
        self._stopped = True

    def __enter__(self) -> ExternalEnvBridge:
        return self

    def __exit__(self, *exc_info: object) -> None:
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

    def _entrance(self, preload: Sequence[str]) -> Entrance:
        """Return where the bridge's own processes come in."""
        return self._own_tcp or Entrance(self._private.open(preload))

    def _assert_usable(self) -> None:
        if self._stopped:
            raise ClosedError(
                "this bridge was stopped, or belongs to the process that this one was forked from"
            )


def _listen(
    bind: str | Sequence[str],
    *,
    keys: PathLike | None,
    allow: Allow | None,
    insecure: bool,
    local_links: bool,
) -> ZmqRouter | LocalRouter:
    """Return where clients come in."""
    router = ZmqRouter(endpoints_of(bind), keys=BrokerKeys.load(keys, allow), insecure=insecure)
    return with_local_links(router) if local_links and keys is None else router
