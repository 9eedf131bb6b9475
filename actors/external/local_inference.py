"""What a client that chooses actions itself does beside its callers: pulls models, sends fragments.

One thread does both. Leaves out what is kept (`fragments.py`) and who chooses (`local_policy.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import EpisodeError, EpisodeFinishedError, RefusedError
from envbus.actors.external.fragments import Fragments
from envbus.actors.external.local_policy import LocalPolicy
from envbus.actors.external.protocol import GetModel, Model
from envbus.actors.external.verbs import Verbs
from envbus.actors.spaces import Element
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

__all__ = ["LocalInference"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds until what could not be sent is tried again.
_PAUSE = 0.2


class LocalInference:
    """The verbs of a client that acts with its own copy of a policy.

    Args:
        verbs: The client's; it has joined.
        ask: `(request, seconds) -> reply`: sends and waits; may be called by any thread.
        policy: The copy.
        policy_id: Of which policy.
        fragments: Where steps wait.
        update_interval: Seconds between looks for a newer model.
        patience: Seconds that one of these requests waits for its answer.

    Raises:
        ConfigError: The bridge hands out no models.
        RequestTimeoutError: It has not answered in time.
        Exception: What the policy raises when it takes the first weights.
    """

    def __init__(
        self,
        verbs: Verbs,
        ask: Callable[[Payload, float], Any],
        policy: LocalPolicy,
        policy_id: str,
        fragments: Fragments,
        update_interval: float,
        patience: float,
    ) -> None:
        self._verbs, self._ask = verbs, ask
        self._policy, self._policy_id = policy, policy_id
        self._update_interval, self._patience = update_interval, patience
        #: Guards what follows.
        self._changed = threading.Condition()
        self._fragments = fragments
        self._fresh: Model | None = None
        #: Of the newest model that has come.
        self._version = -1
        self._pull_now = False
        self._dropped = 0
        self._done: dict[str, dict[Any, bool]] = {}
        #: Episodes whose end was sent, and not confirmed.
        self._ending: set[str] = set()
        self._stopped = False
        #: Why the bridge is out of reach; None: it is not, as far as is known.
        self._lost: PeerLostError | None = None
        #: Policies need not be thread-safe.
        self._choosing = threading.Lock()
        self._policy.take(self._pull())
        self._version = policy.version
        self._thread = threading.Thread(target=self._run, name="envbus-fragments", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        """Of the weights that choose."""
        return self._policy.version

    @property
    def num_unsent(self) -> int:
        """Steps that the bridge has not confirmed."""
        with self._changed:
            return self._fragments.num_waiting

    @property
    def num_dropped(self) -> int:
        """Steps that became no rows, as their weights were too old."""
        return self._dropped

    def begin(self, episode_id: str) -> None:
        """The bridge has started an episode."""
        with self._changed:
            self._fragments.begin(episode_id)

    def get_action(self, episode_id: str, observation: Element) -> Element:
        """Choose an action, and keep the step.

        Raises:
            SpaceMismatchError: The observation, or the policy's action, is outside its space.
            EpisodeError: The episode is not open, or the bridge has refused its steps.
            QueueFullError: Too many steps wait to be sent.
            Exception: What the policy raises.
        """
        taken = self._observed(episode_id, observation)
        with self._choosing:
            fresh, self._fresh = self._fresh, None
            if fresh is not None:
                self._take(fresh)
            answered = self._policy.answer(episode_id, taken, self._done.get(episode_id, {}))
        action = self._acted(episode_id, answered.action)
        with self._changed:
            self._fragments.add(
                episode_id,
                to_wire(taken),
                to_wire(action),
                policy_version=answered.policy_version,
                extras=answered.extras,
            )
            self._changed.notify_all()
        return action

    def log_action(self, episode_id: str, observation: Element, action: Element) -> None:
        """Keep a step that was chosen elsewhere; raises as `get_action`."""
        taken = self._observed(episode_id, observation)
        acted = self._acted(episode_id, action)
        with self._changed:
            self._fragments.add(episode_id, to_wire(taken), to_wire(acted))
            self._changed.notify_all()

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Any] | None,
        terminateds: Mapping[Any, bool] | None,
        truncateds: Mapping[Any, bool] | None,
    ) -> None:
        """Keep what the last action has led to; raises `EpisodeError`."""
        with self._changed:
            self._fragments.log(
                episode_id,
                to_wire(reward),
                to_wire(info),
                to_wire(terminateds),
                to_wire(truncateds),
            )
            for flags in (terminateds, truncateds):
                for agent, flag in (flags or {}).items():
                    if flag:
                        self._done.setdefault(episode_id, {})[agent] = True

    def end(self, episode_id: str, request: Payload, timeout: float) -> None:
        """Have all steps of an episode sent, then its end, and wait for both to be confirmed.

        Raises:
            RequestTimeoutError: Not in time. What was not sent waits; call it again.
            PeerLostError: The bridge is out of reach. The same.
            EpisodeError: The bridge refuses a step or the end.
            EnvbusError: As `ExternalEnvClient.end_episode`.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            try:
                self._fragments.finish(episode_id)
            except EpisodeError:  # refused for good: nothing of it is left to be sent
                self._drop(episode_id)
                raise
            self._changed.notify_all()
            while not self._fragments.is_sent(episode_id):
                left = deadline - time.monotonic()
                if self._stopped:
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
                self._changed.wait(min(left, 1.0))
        is_repeated = episode_id in self._ending
        self._ending.add(episode_id)
        try:
            self._ask(request, max(deadline - time.monotonic(), 0.001))
        except EpisodeFinishedError:
            if not is_repeated:
                raise
        except RefusedError:
            self._ending.discard(episode_id)
            raise
        self._forget(episode_id)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # --- private -----------------------------------------------------------------------------

    def _observed(self, episode_id: str, observation: Element) -> Element:
        with self._changed:
            self._fragments.check(episode_id)
        place = f"observation of episode {episode_id}"
        return self._verbs.agreement.take_observation(to_wire(observation), place)

    def _acted(self, episode_id: str, action: Element) -> Element:
        place = f"action of episode {episode_id}"
        return self._verbs.agreement.take_action(to_wire(action), place)

    def _take(self, model: Model) -> None:
        try:
            self._policy.take(model)
        except Exception:
            logger.exception(
                "version %d of policy %r cannot be taken over; version %d goes on",
                model.version,
                self._policy_id,
                self._policy.version,
            )

    def _drop(self, episode_id: str) -> None:
        self._fragments.end(episode_id)
        self._done.pop(episode_id, None)
        self._ending.discard(episode_id)

    def _forget(self, episode_id: str) -> None:
        with self._changed:
            self._drop(episode_id)
        with self._choosing:
            self._policy.end(episode_id)

    def _pull(self) -> Model:
        try:
            request = GetModel(policy_id=self._policy_id, have_version=self._version)
            model: Model = self._ask(request, self._patience)
        except RefusedError as exc:
            raise ConfigError(
                f'inference="client": {exc}; the bridge\'s owner publishes models by '
                "bridge.publish, or by RunnerConfig(publish=True)"
            ) from exc
        return model

    def _run(self) -> None:
        pull_at = time.monotonic() + self._update_interval
        while True:
            with self._changed:
                fragment = None if self._stopped else self._fragments.take()
                left = pull_at - time.monotonic()
                if not self._stopped and fragment is None and left > 0.0 and not self._pull_now:
                    self._changed.wait(left)
                    fragment = self._fragments.take()
                if self._stopped:
                    return
                is_due = self._pull_now or time.monotonic() >= pull_at
                self._pull_now = False
            try:
                if fragment is not None:
                    self._send(fragment)
                if is_due:
                    self._update()
                    pull_at = time.monotonic() + self._update_interval
            except ClosedError:
                self.stop()
            except EnvbusError as exc:
                logger.debug("%s; tried again", exc)
                with self._changed:
                    if isinstance(exc, PeerLostError):
                        self._lost = exc
                        self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped, _PAUSE)

    def _send(self, fragment: Any) -> None:
        try:
            self._verbs.check_open(fragment.episode_id)
            reply = self._ask(fragment, self._patience)
        except (RefusedError, ProtocolError, RemoteError) as exc:
            with self._changed:
                self._fragments.fail(fragment.episode_id, exc)
                self._changed.notify_all()
            return
        with self._changed:
            self._lost = None
            self._fragments.confirm(fragment)
            self._changed.notify_all()
            if reply.dropped:
                self._dropped += reply.dropped
                self._pull_now = True

    def _update(self) -> None:
        try:
            model = self._pull()
        except ConfigError as exc:
            logger.warning("%s; version %d goes on", exc, self._version)
            return
        if model.weights is not None or model.onnx is not None:
            self._version, self._fresh = model.version, model
