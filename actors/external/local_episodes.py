"""What a client that chooses actions itself keeps, sends and asks for. Pure.

No socket, clock, thread or loop in this file. Verbs that need nobody are plain methods. What has to
ask the bridge or to wait is *work*: a generator that yields an `Ask` or a `Wait` and goes on with
what came of it. Threads and event loops do that alike (`local_inference.py`); only one of all works
and verbs runs at a time, and nothing runs while one of them waits.

Leaves out how steps are kept (`fragments.py`) and who chooses (`local_policy.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from envbus.actors.agent_spaces import AgentSpaces
from envbus.actors.clipping import agent_clip, clip_of, remembered
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import EpisodeError, EpisodeFinishedError, RefusedError
from envbus.actors.external.fragments import Fragments
from envbus.actors.external.local_policy import Answered, LocalPolicy
from envbus.actors.external.protocol import GetModel, LogFragment, Model
from envbus.actors.external.verbs import Verbs
from envbus.actors.spaces import Element, Space
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    EnvbusError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RequestTimeoutError,
)
from envbus.bus.messages import Payload

__all__ = ["Ask", "LocalEpisodes", "Wait", "Work"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds until what could not be sent is tried again.
_PAUSE = 0.2


class Ask(NamedTuple):
    """Send a request, and go on with its reply, or with what it raises."""

    payload: Payload
    #: Until it is given up.
    seconds: float


class Wait(NamedTuple):
    """Go on when something has changed, or after this time."""

    seconds: float


T = TypeVar("T")
Work: TypeAlias = Generator[Ask | Wait, Any, T]


class LocalEpisodes:
    """The episodes of one client, and its copy of a policy.

    `choose` may run beside all others, one at a time; policies need not be thread-safe.

    Args:
        verbs: The client's; it has joined.
        policy: The copy.
        policy_id: Of which policy.
        fragments: Where steps wait.
        update_interval: Seconds between looks for a newer model.
        patience: Seconds that such a request, or a fragment, waits for its answer.
        clock: Returns seconds.

    Attributes:
        changed: Called when somebody who waits should look again.
        stopped: Whether there is nothing more to be done.
    """

    def __init__(
        self,
        verbs: Verbs,
        policy: LocalPolicy,
        policy_id: str,
        fragments: Fragments,
        update_interval: float,
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        self._verbs = verbs
        self._policy, self._policy_id = policy, policy_id
        self._fragments = fragments
        self._update_interval, self._patience = update_interval, patience
        self._clock = clock
        self._clip_of = remembered(_clip_of)
        self.changed: Callable[[], object] = lambda: None
        self.stopped = False
        self._fresh: Model | None = None
        #: Of the newest model that has come.
        self._version = -1
        self._pull_now = False
        self._dropped = 0
        self._done: dict[str, dict[Any, bool]] = {}
        #: Episodes whose end was sent, and not confirmed.
        self._ending: set[str] = set()
        #: Why the bridge is out of reach; None: it is not, as far as is known.
        self._lost: PeerLostError | None = None

    @property
    def policy_version(self) -> int:
        """Of the weights that choose."""
        return self._policy.version

    @property
    def num_unsent(self) -> int:
        """Steps that the bridge has not confirmed."""
        return self._fragments.num_waiting

    @property
    def num_dropped(self) -> int:
        """Steps that became no rows, as their weights were too old."""
        return self._dropped

    # --- verbs --------------------------------------------------------------------------------

    def begin(self, episode_id: str) -> None:
        """The bridge has started an episode."""
        self._fragments.begin(episode_id)

    def observe(self, episode_id: str, observation: Element) -> Element:
        """Return an observation as the policy takes it.

        Raises:
            SpaceMismatchError: It is outside its space.
            EpisodeError: The episode is not open, or the bridge has refused its steps.
            QueueFullError: Too many steps wait to be sent.
        """
        self._fragments.check(episode_id)
        place = f"observation of episode {episode_id}"
        return self._verbs.agreement.take_observation(to_wire(observation), place)

    def take_fresh(self) -> Model | None:
        """Return the model that has come since the last time, for `choose`."""
        fresh, self._fresh = self._fresh, None
        return fresh

    def choose(self, episode_id: str, observation: Element, fresh: Model | None) -> Answered:
        """Have the policy choose, after it has taken over a newer model; raises what it raises."""
        if fresh is not None:
            try:
                self._policy.take(fresh)
            except Exception:
                logger.exception(
                    "version %d of policy %r cannot be taken over; version %d goes on",
                    fresh.version,
                    self._policy_id,
                    self._policy.version,
                )
        return self._policy.answer(episode_id, observation, self._done.get(episode_id, {}))

    def act(
        self, episode_id: str, observation: Element, action: Element, chosen: Answered | None
    ) -> Element:
        """Keep a step, and return its action; `chosen` is None if the simulator has chosen it.

        Raises as `observe`, also of the action.
        """
        place = f"action of episode {episode_id}"
        if chosen is not None:  # a Gaussian leaves its Box
            action = self._clipped(action)
        action = self._verbs.agreement.take_action(to_wire(action), place)
        self._fragments.add(
            episode_id,
            to_wire(observation),
            to_wire(action),
            policy_version=-1 if chosen is None else chosen.policy_version,
            extras=None if chosen is None else chosen.extras,
        )
        self.changed()
        return action

    def _clipped(self, action: Element) -> Element:
        clip = self._clip_of(self._verbs.agreement.action_space)
        return action if clip is None else clip(action)

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Any] | None,
        terminateds: Mapping[Any, bool] | None,
        truncateds: Mapping[Any, bool] | None,
    ) -> None:
        """Keep what the last action has led to; raises `EpisodeError`."""
        self._fragments.log(
            episode_id, to_wire(reward), to_wire(info), to_wire(terminateds), to_wire(truncateds)
        )
        for flags in (terminateds, truncateds):
            for agent, flag in (flags or {}).items():
                if flag:
                    self._done.setdefault(episode_id, {})[agent] = True

    def stop(self) -> None:
        """Let all work end. Idempotent."""
        self.stopped = True
        self.changed()

    # --- work ---------------------------------------------------------------------------------

    def start(self) -> Work[None]:
        """Have the policy take its first weights.

        Raises:
            ConfigError: The bridge hands out no models.
            RequestTimeoutError: It has not answered in time.
            Exception: What the policy raises.
        """
        self._policy.take((yield from self._pull()))
        self._version = self._policy.version

    def run(self) -> Work[None]:
        """Send fragments and pull models, until `stop`."""
        pull_at = self._clock() + self._update_interval
        while not self.stopped:
            fragment = self._fragments.take()
            left = pull_at - self._clock()
            if fragment is None and left > 0.0 and not self._pull_now:
                yield Wait(left)
                continue
            is_due = self._pull_now or left <= 0.0
            self._pull_now = False
            try:
                if fragment is not None:
                    yield from self._send(fragment)
                if is_due:
                    yield from self._update()
                    pull_at = self._clock() + self._update_interval
            except ClosedError:
                self.stop()
            except EnvbusError as exc:
                logger.debug("%s; tried again", exc)
                if isinstance(exc, PeerLostError):
                    self._lost = exc
                    self.changed()
                yield from self._pause()

    def end(self, episode_id: str, request: Payload, timeout: float) -> Work[None]:
        """Have all steps of an episode sent, then its end, and wait for both to be confirmed.

        Raises:
            RequestTimeoutError: Not in time. What was not sent waits; call it again.
            PeerLostError: The bridge is out of reach. The same.
            EpisodeError: The bridge refuses a step or the end.
            EnvbusError: As `ExternalEnvClient.end_episode`.
        """
        deadline = self._clock() + timeout
        try:
            self._fragments.finish(episode_id)
        except EpisodeError:  # refused for good: nothing of it is left to be sent
            self._forget(episode_id)
            raise
        self.changed()
        while not self._fragments.is_sent(episode_id):
            left = deadline - self._clock()
            if self.stopped:
                raise ClosedError("this client was closed")
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise lost
            if left <= 0.0:
                raise RequestTimeoutError(
                    f"episode {episode_id}: {self._fragments.num_waiting} steps wait to be "
                    f"sent, and the bridge has not taken them within {timeout:g} s",
                    request_id=0,
                    peer="bridge",
                )
            yield Wait(min(left, 1.0))
        is_repeated = episode_id in self._ending
        self._ending.add(episode_id)
        try:
            yield Ask(request, max(deadline - self._clock(), 0.001))
        except EpisodeFinishedError:
            if not is_repeated:
                raise
        except RefusedError:
            self._ending.discard(episode_id)
            raise
        self._forget(episode_id)

    # --- private ------------------------------------------------------------------------------

    def _forget(self, episode_id: str) -> None:
        self._fragments.end(episode_id)
        self._done.pop(episode_id, None)
        self._ending.discard(episode_id)
        self._policy.end(episode_id)

    def _pause(self) -> Work[None]:
        end = self._clock() + _PAUSE
        while not self.stopped and (left := end - self._clock()) > 0.0:
            yield Wait(left)

    def _pull(self) -> Work[Model]:
        request = GetModel(policy_id=self._policy_id, have_version=self._version)
        try:
            model: Model = yield Ask(request, self._patience)
        except RefusedError as exc:
            raise ConfigError(
                f'inference="client": {exc}; the bridge\'s owner publishes models by '
                "bridge.publish, or by RunnerConfig(publish=True)"
            ) from exc
        return model

    def _send(self, fragment: LogFragment) -> Work[None]:
        try:
            self._verbs.check_open(fragment.episode_id)
            reply = yield Ask(fragment, self._patience)
        except (RefusedError, ProtocolError, RemoteError) as exc:
            self._fragments.fail(fragment.episode_id, exc)
            self.changed()
            return
        self._lost = None
        self._fragments.confirm(fragment)
        if reply.dropped:
            self._dropped += reply.dropped
            self._pull_now = True
        self.changed()

    def _update(self) -> Work[None]:
        try:
            model = yield from self._pull()
        except ConfigError as exc:
            logger.warning("%s; version %d goes on", exc, self._version)
            return
        if model.weights is not None or model.onnx is not None:
            self._version, self._fresh = model.version, model


def _clip_of(space: Space | None) -> Callable[[Element], Element] | None:
    return agent_clip(space) if isinstance(space, AgentSpaces) else clip_of(space)
