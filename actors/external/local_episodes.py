"""What a client that chooses actions itself keeps, sends and asks for. Pure.

No socket, clock, thread or loop in this file. A verb, and what goes on behind the verbs, is *work*:
a generator that yields a `SendRequest`, a `Choose` or a `Wait` and goes on with what came of it.
Threads and event loops do that alike (`client.py`, `aio.py`); only one of all works runs at a time,
and others come in while one of them asks, has the policy choose, or waits.

Leaves out who chooses (`local_policy.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from envbus.actors.arrays.copies import own
from envbus.actors.external.elements import opened, to_wire
from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RefusedError,
)
from envbus.actors.external.local_policy import (
    Answered,
    LocalPolicy,
    LocalSettings,
    PolicyOrFactory,
)
from envbus.actors.external.protocol import (
    EndEpisode,
    FragmentStep,
    GetAction,
    GetModel,
    LogAction,
    LogFragment,
    LogReturns,
    Model,
    StartEpisode,
    Value,
)
from envbus.actors.external.verbs import ClientState, EpisodeRequest
from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.clipping import agent_clip, clip_of, remembered
from envbus.actors.spaces.spaces import Element, Space
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    EnvbusError,
    PeerLostError,
    ProtocolError,
    QueueFullError,
    RemoteError,
    RequestTimeoutError,
)
from envbus.bus.interrupts import interruptible, uninterrupted
from envbus.bus.settings import check_number
from envbus.bus.wire.messages import Request

__all__ = ["Choose", "Fragments", "LocalEpisodes", "SendRequest", "Wait", "Work", "check_inference"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds until what could not be sent is tried again.
_PAUSE = 0.2
#: Bytes of one fragment, beside its first step's. A bridge takes eight times as many in one
#: request, and 256 times of one client by default; but over a slow line a message that takes too
#: long never arrives (`bus/transport/zmq_sockets.py`, `KEEPALIVE_MS`).
_MOST_BYTES = 1 << 20
#: What a step, a list or map, an array and anything else take besides their content, at most; of
#: lists and maps a bridge takes so few in one request that these count for more.
_STEP_BYTES, _CONTAINER_BYTES, _ARRAY_BYTES, _VALUE_BYTES = 256, 16, 64, 9


#: What was asked may have been done all the same, as after Ctrl-C.
_UNTOLD = (RequestTimeoutError, PeerLostError)


class SendRequest(NamedTuple):
    """Send a request, and go on with its reply, or with what it raises."""

    payload: Request[Any]
    #: Until it is given up.
    seconds: float


class Choose(NamedTuple):
    """Have the policy choose, by `LocalEpisodes.choose`, and go on with what it has done."""

    episode_id: str
    observation: Element


class Wait(NamedTuple):
    """Go on when something has changed, or after this time."""

    seconds: float


T = TypeVar("T")
Work: TypeAlias = Generator[SendRequest | Choose | Wait, Any, T]


def check_inference(inference: str, policy: object, update_interval: float) -> None:
    """Raise `ConfigError` unless a client's settings fit each other."""
    if inference not in ("server", "client"):
        raise ConfigError(f'inference must be "server" or "client", not {inference!r}')
    if (policy is None) != (inference == "server"):
        raise ConfigError('policy belongs to inference="client", which needs one')
    check_number("update_interval", update_interval, over=0.0, most=1e9)


_NOTHING = FragmentStep()


class _Steps:
    """One episode: what is not confirmed yet."""

    def __init__(self) -> None:
        #: Number of the first that waits.
        self.first = 0
        #: Each with its bytes.
        self.waiting: deque[tuple[FragmentStep, int]] = deque()
        #: What was logged since the last observation.
        self.logged = _NOTHING
        #: All is to be sent, however little it is.
        self.is_due = False
        self.error: Exception | None = None


class Fragments:
    """The steps of all episodes of a client. Not thread-safe.

    One fragment is under way at a time: `take` it, then `confirm`, or `take` it again.

    Args:
        policy_id: Whose copy the client has.
        length: Steps after which a fragment of an episode that goes on is sent.
        most: Steps that may wait, of all episodes together.
        multi_agent: Whether values are maps by agent.

    Attributes:
        trouble: Why the bridge has not taken what was sent last; "": it has.
    """

    def __init__(self, policy_id: str, length: int, most: int, *, multi_agent: bool) -> None:
        self._policy_id = policy_id
        self._length = length
        self._most = most
        self._multi_agent = multi_agent
        self._episodes: dict[str, _Steps] = {}
        self._num_waiting = 0
        self.trouble = ""

    @property
    def num_waiting(self) -> int:
        """Steps that no bridge has confirmed."""
        return self._num_waiting

    def episode_ids(self) -> list[str]:
        """Return the episodes that are not over."""
        return list(self._episodes)

    def begin(self, episode_id: str) -> None:
        """An episode was started."""
        if episode_id in self._episodes:
            raise EpisodeAlreadyStartedError(f"Episode {episode_id} is already started.")
        self._episodes[episode_id] = _Steps()

    def expect(self, episode_id: str) -> None:
        """An episode may have been started: the bridge will tell."""
        self._episodes.setdefault(episode_id, _Steps())

    def check(self, episode_id: str) -> None:
        """Raise unless another step of an episode can be added.

        Raises:
            EpisodeNotFoundError: It was not started by this client, or is over.
            QueueFullError: Too much waits to be sent.
            EpisodeError: The bridge has refused what came before.
        """
        self._of(episode_id)
        if self._num_waiting >= self._most:
            raise QueueFullError(
                f"episode {episode_id}: {self._num_waiting} steps wait to be sent, which is the "
                "limit; the bridge is out of reach, or its runner does not sample: wait, and ask "
                f"again{self.why()}"
            )

    def why(self) -> str:
        """Return what was said of that the bridge has not taken what was sent, if anything."""
        return self.trouble and f"; {self.trouble}"

    def add(
        self,
        episode_id: str,
        observation: Value,
        action: Value,
        *,
        policy_version: int = -1,
        extras: Value = None,
    ) -> None:
        """Keep a step; -1: its action was chosen elsewhere. Raises as `check`."""
        self.check(episode_id)
        self._append(
            self._of(episode_id),
            observation=observation,
            action=action,
            policy_version=policy_version,
            extras=extras,
        )

    def skip(self, episode_id: str, observation: Value) -> None:
        """Keep an observation that got no answer: the row before ends there."""
        steps = self._episodes.get(episode_id)
        if steps is not None and steps.error is None:
            self._append(steps, observation=observation, action={})

    def take_back(self, episode_id: str) -> None:
        """The action that was added last was not taken. One that was sent is in a row."""
        steps = self._episodes.get(episode_id)
        if steps is not None and steps.waiting:
            step, size = steps.waiting[-1]
            untaken = msgspec.structs.replace(step, action={}, policy_version=-1, extras=None)
            steps.waiting[-1] = untaken, size

    def log(
        self,
        episode_id: str,
        reward: Value,
        info: Mapping[Any, Any] | None,
        terminateds: Mapping[Any, bool] | None,
        truncateds: Mapping[Any, bool] | None,
    ) -> None:
        """Add what the last action has led to.

        Raises:
            EpisodeNotFoundError: As `check`.
            EpisodeError: It is not what it has to be. Nothing was added.
        """
        steps = self._of(episode_id)
        logged = steps.logged
        total = self._sum(episode_id, logged.reward, reward)
        merged = self._merged(episode_id, logged.info, info)
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            if flags is not None and not (self._multi_agent and isinstance(flags, Mapping)):
                raise EpisodeError(f"Episode {episode_id}: {name} are a map by agent, of several.")
        steps.logged = FragmentStep(
            reward=total,
            info=merged,
            terminateds=_or(logged.terminateds, terminateds),
            truncateds=_or(logged.truncateds, truncateds),
        )

    def finish(self, episode_id: str) -> None:
        """All of an episode is to be sent now. Raises `EpisodeNotFoundError`."""
        steps = self._of(episode_id)
        if steps.logged is not _NOTHING:
            self._append(steps)
        steps.is_due = bool(steps.waiting)

    def is_sent(self, episode_id: str) -> bool:
        """Return whether nothing of an episode waits. Raises what it was refused with."""
        return not self._of(episode_id).waiting

    def end(self, episode_id: str) -> None:
        """Forget an episode."""
        steps = self._episodes.pop(episode_id, None)
        if steps is not None:
            self._num_waiting -= len(steps.waiting)

    def fail(self, episode_id: str, error: Exception) -> None:
        """The bridge has refused a fragment for good: what waits is dropped, and later calls fail.

        `end` forgets the episode.
        """
        steps = self._episodes.get(episode_id)
        if steps is not None:
            self._num_waiting -= len(steps.waiting)
            steps.waiting.clear()
            steps.error, steps.is_due = error, False

    def take(self) -> LogFragment | None:
        """Return what is to be sent next, again if it was not confirmed; None: nothing is.

        Episodes take turns, those that are to be sent whole first.
        """
        found = None
        for episode_id, steps in self._episodes.items():
            if steps.is_due:
                found = episode_id
                break
            if found is None and len(steps.waiting) >= self._length:
                found = episode_id
        if found is None:
            return None
        steps = self._episodes[found]
        taken: list[FragmentStep] = []
        room = _MOST_BYTES
        for step, size in steps.waiting:
            room -= size
            if taken and (len(taken) == self._length or room < 0):
                break
            taken.append(step)
        return LogFragment(
            episode_id=found, policy_id=self._policy_id, first=steps.first, steps=taken
        )

    def confirm(self, fragment: LogFragment) -> None:
        """The bridge has these."""
        self.trouble = ""
        steps = self._episodes.get(fragment.episode_id)
        if steps is None or steps.first != fragment.first:
            return  # of an episode that is over, or told once more
        self._episodes[fragment.episode_id] = self._episodes.pop(fragment.episode_id)  # behind all
        count = min(len(fragment.steps), len(steps.waiting))
        for _ in range(count):
            steps.waiting.popleft()
        self._num_waiting -= count
        steps.first += count
        steps.is_due = steps.is_due and bool(steps.waiting)

    # --- private -----------------------------------------------------------------------------

    def _of(self, episode_id: str) -> _Steps:
        steps = self._episodes.get(episode_id)
        if steps is None:
            raise EpisodeNotFoundError(f"Episode {episode_id} not found.")
        if steps.error is not None:
            raise steps.error
        return steps

    def _append(self, steps: _Steps, **taken: Any) -> None:
        step = msgspec.structs.replace(steps.logged, **taken)
        steps.waiting.append((step, _num_bytes(step)))
        steps.logged = _NOTHING
        self._num_waiting += 1

    def _sum(self, episode_id: str, before: Value, reward: Value) -> Value:
        if not self._multi_agent:
            return _number(episode_id, reward) + (0.0 if before is None else before)
        if reward is None:
            reward = {}
        if not isinstance(reward, Mapping):
            raise EpisodeError(f"Episode {episode_id}: rewards are a map by agent.")
        total = dict(before or {})
        for agent, number in reward.items():
            total[agent] = total.get(agent, 0.0) + _number(episode_id, number)
        return total

    def _merged(self, episode_id: str, before: Any, info: Any) -> Any:
        if info is None:
            return before
        if not isinstance(info, Mapping):
            raise EpisodeError(
                f"Episode {episode_id}: an info is a map, not a {type(info).__name__}."
            )
        if not self._multi_agent:
            return {**(before or {}), **info}
        merged = dict(before or {})
        for agent, more in info.items():
            merged[agent] = {**merged.get(agent, {}), **(more or {})}
        return merged


class LocalEpisodes:
    """The episodes of one client, and its copy of a policy.

    `choose` may run beside all work, once at a time; policies need not be thread-safe.

    Args:
        state: The client's; it has joined.
        policy: The copy, or what makes it.
        settings: None: the defaults.
        update_interval: Seconds between looks for a newer model.
        patience: Seconds that such a request, or a fragment, waits for its answer.
        clock: Returns seconds.

    Attributes:
        changed: Called when somebody who waits should look again.
        stopped: Whether there is nothing more to be done.

    Raises:
        ConfigError: `policy` is neither.
    """

    def __init__(
        self,
        state: ClientState,
        policy: PolicyOrFactory,
        settings: LocalSettings | None,
        update_interval: float,
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        settings = settings or LocalSettings()
        self._state = state
        self._policy_id = settings.policy_id or state.joined.policy_ids[0]
        self._policy = LocalPolicy(
            policy, state.observation_space, state.action_space, explore=settings.explore
        )
        self._fragments = Fragments(
            self._policy_id,
            settings.fragment_length,
            settings.max_unsent,
            multi_agent=state.joined.multi_agent,
        )
        self._update_interval, self._patience = update_interval, patience
        self._clock = clock
        self._clip_of = remembered(_clip_of)
        self.changed: Callable[[], object] = lambda: None
        self.stopped = False
        #: The model that has come since the policy has chosen last, if one has.
        self._fresh: deque[Model] = deque(maxlen=1)
        #: Of the newest model that has come.
        self._version, self._digest = -1, ""
        self._pull_now = False
        self._is_choosing = False
        self._dropped = 0
        self._done: dict[str, dict[Any, bool]] = {}
        #: How often a bridge had been joined when it was looked for episodes that are lost.
        self._joins = state.joins
        #: Episodes whose end was sent, and not confirmed.
        self._ending: set[str] = set()
        #: How often the bridge was found to be out of reach, and what was said of it last.
        self._losses = 0
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

    def perform(self, request: EpisodeRequest, timeout: float) -> Work[Any]:
        """Do a verb, and return what it returns.

        Raises:
            SpaceMismatchError: The observation, or the policy's action, is outside its space.
            EpisodeError: The episode is not open, or the bridge has refused its steps.
            QueueFullError: Too many steps wait to be sent.
            EnvbusError: Of a start or an end, what the bridge says; see `_end`.
            Exception: What the policy raises.
        """
        self._drop_lost()
        if isinstance(request, StartEpisode):
            return (yield from self._start(request, timeout))
        if isinstance(request, GetAction):
            observation = self._observed(request.episode_id, request.observation)
            try:
                chosen = yield Choose(request.episode_id, observation)
                return self._act(request.episode_id, observation, chosen.action, chosen)
            except BaseException:  # what the policy raises, Ctrl-C
                self._fragments.skip(request.episode_id, to_wire(own(observation)))
                raise
        if isinstance(request, LogAction):
            observation = self._observed(request.episode_id, request.observation)
            self._act(request.episode_id, observation, request.action, None)
        elif isinstance(request, LogReturns):
            self._log_returns(request)
        else:
            yield from self._end(request, timeout)
        return None

    def choose(self, asked: Choose) -> Answered:
        """Have the policy choose, after it has taken over a newer model; raises what it raises.

        Raises:
            EpisodeBusyError: It chooses already: it asks its own client.
        """
        if self._is_choosing:
            raise EpisodeBusyError(
                f"Episode {asked.episode_id}: the policy asks its own client for an action while "
                "it is to choose one itself."
            )
        with uninterrupted():
            self._is_choosing = True
            try:
                with interruptible():
                    return self._choose(asked)
            finally:
                self._is_choosing = False

    def _choose(self, asked: Choose) -> Answered:
        while self._fresh:
            fresh = self._fresh.pop()
            try:
                self._policy.take(fresh)
            except Exception:
                logger.exception(
                    "version %d of policy %r cannot be taken over; version %d goes on",
                    fresh.version,
                    self._policy_id,
                    self._policy.version,
                )
        episode_id = asked.episode_id
        return self._policy.answer(episode_id, asked.observation, self._done.get(episode_id, {}))

    def _observed(self, episode_id: str, observation: Value) -> Element:
        """Return an observation as the policy takes it."""
        self._fragments.check(episode_id)
        place = f"observation of episode {episode_id}"
        return self._state.agreement.take_observation(observation, place)

    def _act(
        self, episode_id: str, observation: Element, action: Element, chosen: Answered | None
    ) -> Element:
        """Keep a step, and return its action; `chosen` is None if the simulator has chosen it."""
        place = f"action of episode {episode_id}"
        if chosen is not None:  # a Gaussian leaves its Box
            action = self._clipped(action)
        action = self._state.agreement.take_action(to_wire(action), place)
        self._fragments.add(
            episode_id,
            to_wire(own(observation)),  # which waits, and the simulator may write in its arrays
            to_wire(own(action)),
            policy_version=-1 if chosen is None else chosen.policy_version,
            extras=None if chosen is None else chosen.extras,
        )
        self.changed()
        return action

    def _clipped(self, action: Element) -> Element:
        clip = self._clip_of(self._state.agreement.action_space)
        return action if clip is None else clip(action)

    def _log_returns(self, request: LogReturns) -> None:
        episode_id = request.episode_id
        terminateds, truncateds = request.terminateds, request.truncateds
        info = own(request.info)
        self._fragments.log(episode_id, request.reward, info, terminateds, truncateds)
        for flags in (terminateds, truncateds):
            for agent, flag in (flags or {}).items():
                if flag:
                    self._done.setdefault(episode_id, {})[agent] = True

    def stop(self) -> None:
        """Let all work end. Idempotent."""
        self.stopped = True
        self.changed()

    def take_back(self, episode_id: str) -> None:
        """The action that `get_action` has returned last did not reach the simulator."""
        self._fragments.take_back(episode_id)

    # --- work ---------------------------------------------------------------------------------

    def start(self) -> Work[None]:
        """Have the policy take its first weights.

        Raises:
            ConfigError: The bridge hands out no models.
            RequestTimeoutError: It has not answered in time.
            Exception: What the policy raises.
        """
        model = yield from self._pull()
        self._policy.take(model)
        self._version, self._digest = self._policy.version, model.digest

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
            except Exception as exc:  # also where memory ran out: nobody else would send the rest
                logger.debug("%s; tried again", _told(exc))
                if isinstance(exc, PeerLostError):
                    self._losses, self._lost = self._losses + 1, exc
                    self.changed()
                yield from self._pause()

    def _start(self, request: StartEpisode, timeout: float) -> Work[str]:
        try:
            episode_id: str = yield SendRequest(request, timeout)
        except BaseException as exc:
            was_told = isinstance(exc, EnvbusError) and not isinstance(exc, _UNTOLD)
            if request.episode_id is not None and not was_told:
                self._fragments.expect(request.episode_id)
            raise
        self._forget(episode_id)  # one of that id was lost with another bridge
        self._fragments.begin(episode_id)
        return episode_id

    def _end(self, request: EndEpisode, timeout: float) -> Work[None]:
        """Have all steps of an episode sent, then its end, and wait for both to be confirmed.

        Raises:
            RequestTimeoutError: Not in time. What was not sent waits; call it again.
            PeerLostError: The bridge is out of reach. The same.
            EpisodeError: The bridge refuses a step or the end.
            EnvbusError: As `ExternalEnvClient.end_episode`.
        """
        episode_id = request.episode_id
        deadline, losses = self._clock() + timeout, self._losses
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
            if self._lost is not None and self._losses > losses:
                raise self._lost
            if left <= 0.0:
                raise RequestTimeoutError(
                    f"episode {episode_id}: {self._fragments.num_waiting} steps wait to be "
                    f"sent, and the bridge has not taken them within {timeout:g} s"
                    f"{self._fragments.why()}",
                    request_id=0,
                    peer="bridge",
                )
            yield Wait(min(left, 1.0))
        is_repeated = episode_id in self._ending
        self._ending.add(episode_id)
        try:
            yield SendRequest(request, max(deadline - self._clock(), 0.001))
        except EpisodeFinishedError:
            if not is_repeated:
                raise
        except RefusedError:
            self._ending.discard(episode_id)
            raise
        self._forget(episode_id)

    # --- private ------------------------------------------------------------------------------

    def _drop_lost(self) -> None:
        """Let go of steps of episodes that no bridge has any more; nobody may end those."""
        if self._joins == self._state.joins:
            return
        self._joins = self._state.joins
        for episode_id in self._fragments.episode_ids():
            try:
                self._state.check_open(episode_id)
            except EpisodeLostError as lost:
                self._fragments.fail(episode_id, lost)
                self._done.pop(episode_id, None)
                self._policy.end(episode_id)

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
        request = GetModel(
            policy_id=self._policy_id, have_version=self._version, have_digest=self._digest
        )
        try:
            model: Model = yield SendRequest(request, self._patience)
        except RefusedError as exc:
            raise ConfigError(
                f'inference="client": {exc}; the bridge\'s owner publishes models by '
                "bridge.publish, or by RunnerConfig(publish=True)"
            ) from exc
        return model

    def _send(self, fragment: LogFragment) -> Work[None]:
        try:
            self._state.check_open(fragment.episode_id)
            reply = yield SendRequest(fragment, self._patience)
        except (RefusedError, ProtocolError, RemoteError) as exc:
            self._fragments.fail(fragment.episode_id, exc)
            self.changed()
            return
        except Exception as exc:
            self._fragments.trouble = _told(exc)
            raise
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
            self._version, self._digest = model.version, model.digest
            self._fresh.append(model)


def _told(error: Exception) -> str:
    """Return what is said of an error; of those of Python, some say nothing by themselves."""
    return str(error) if isinstance(error, EnvbusError) else f"{type(error).__name__}: {error}"


def _clip_of(space: Space | None) -> Callable[[Element], Element] | None:
    return agent_clip(space) if isinstance(space, AgentSpaces) else clip_of(space)


def _num_bytes(step: FragmentStep) -> int:
    """Return what a step takes of a request, or somewhat more."""
    size, found = _STEP_BYTES, list(msgspec.structs.astuple(step))
    while found:
        item = opened(found.pop())
        if isinstance(item, np.ndarray):
            size += _ARRAY_BYTES + item.nbytes
        elif isinstance(item, Mapping):
            size += _CONTAINER_BYTES
            found += item.keys()
            found += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            size += _CONTAINER_BYTES
            found += item
        else:
            size += _VALUE_BYTES
            if isinstance(item, str):
                size += len(item.encode(errors="surrogatepass"))
            elif isinstance(item, bytes):
                size += len(item)
    return size


def _number(episode_id: str, value: Value) -> float:
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return float(value)
    raise EpisodeError(f"Episode {episode_id}: a reward is a number, not {value!r:.80}.")


def _or(before: dict[Any, bool] | None, flags: Mapping[Any, bool] | None) -> dict[Any, bool] | None:
    if not flags:
        return before
    after = dict(before or {})
    for agent, flag in flags.items():
        after[agent] = bool(flag or after.get(agent))
    return after
