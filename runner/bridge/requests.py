"""Clients' requests, and actions of the runner, as events of the rules.

Requests are read, checked against the spaces and sorted by agent. What passes here is whole and
finite: what a runner makes of it cannot fail for its form.

Pure: neither socket nor clock.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np
from msgspec import structs

from envbus.actors.arrays.copies import own
from envbus.actors.arrays.finite import FLOAT32_MAX
from envbus.actors.env.agents import ALL
from envbus.actors.external.agreement import Agreement
from envbus.actors.external.elements import opened
from envbus.actors.external.errors import EpisodeError, RefusedError, SpaceMismatchError
from envbus.actors.external.protocol import (
    BRIDGE,
    EndEpisode,
    FragmentStep,
    GetAction,
    LogAction,
    LogFragment,
    LogReturns,
    StartEpisode,
    Value,
)
from envbus.bus.brief import brief, cut
from envbus.bus.broker.deadlines import NO_DEADLINE
from envbus.bus.errors import DecodeError
from envbus.bus.peer.worker import describe
from envbus.bus.wire.codec import decode
from envbus.bus.wire.ext import Ext, KeyCheck
from envbus.bus.wire.frames import Buffer, Frames
from envbus.bus.wire.framing import lengths_of
from envbus.bus.wire.limits import MAX_DEPTH
from envbus.bus.wire.messages import Failed, FailureCode, Header, Tree
from envbus.runner.bridge.results import ByAgent, ClientChoice
from envbus.runner.bridge.vocabulary import (
    Chosen,
    ClientCall,
    ClientFragment,
    End,
    FragmentPart,
    GiveUp,
    LogReward,
    LogStep,
    Observe,
    StartCall,
)
from envbus.runner.pool.agent_results import DUMMY_AGENT

__all__ = ["VERBS", "check_size", "checked", "read", "told"]

#: Columns that a client may add to a row.
_MAX_EXTRAS = 64
#: Bytes of a request without its buffers.
_MAX_PAYLOAD = 1 << 23
#: Lists and maps in a request: one byte of it can be an empty map, which takes seventy. An image of
#: 512x512 pixels as nested lists is half of it. Below so many bytes nobody counts.
_MAX_CONTAINERS = 1 << 19
#: What else stands in them: one byte can be a number, which takes a microsecond. An image of
#: 640x480 pixels as nested lists has 921,600.
_MAX_VALUES = 1 << 20
_FEW_BYTES = 1 << 18
#: Below so many nobody looks at the keys of maps.
_FEW_KEY_BYTES = 1 << 14
#: Parts of one fragment: each takes some microseconds, and others wait meanwhile.
_MAX_PARTS = 1 << 14
#: Whose info is that of all agents.
_COMMON: Final = "__common__"
#: Rows have versions in int64.
_MAX_VERSION = 2**62

#: Longest frame that counts as a whole for what tells requests apart, in bytes; of a longer one
#: its beginning, middle and end do, as a checksum of pixels would take a fifth of a request's time.
_DIGESTED: Final = 4096

_NUMBERS = (int, np.integer, np.floating)
#: Also kinds of them, such as an element of a Graph, which is a tuple.
_NESTED = (dict, list, tuple, set, frozenset, Tree)

#: What may have a dtype of many fields, and what a field takes in memory.
_STRUCTURED = frozenset({np.ndarray, np.void})
_FIELD_BYTES = 256
#: What an array takes besides its numbers.
_ARRAY_BYTES = 112

#: Peer and id of a request.
Origin: TypeAlias = tuple[bytes, int]
#: Of the parts of a fragment, which is answered as a whole.
_NOBODY: Final[Origin] = (b"", 0)


class _WrongError(Exception):
    """What is wrong with a request about an episode, which `read` names."""


def check_size(header: Header, frames: Frames) -> None:
    """Refuse a request that would be too large as Python's objects; raises `EpisodeError`."""
    size = memoryview(frames[0]).nbytes if frames else 0
    if size > _MAX_PAYLOAD:
        raise EpisodeError(
            f"a request has at most {_MAX_PAYLOAD} bytes beside the arrays that are frames of "
            f"their own, and this {brief(header.payload_type)} has {size}"
        )
    try:
        if size > _FEW_BYTES:
            _check_containers(header, frames[0])
        if size > _FEW_KEY_BYTES:
            _check_keys(frames[0])
    except (EpisodeError, DecodeError):
        raise
    except Exception as exc:  # whatever msgpack makes of bytes that somebody else chose
        raise DecodeError(f"{brief(header.payload_type)}: {brief(exc)}") from exc


def read(header: Header, frames: Frames, peer: bytes, agreement: Agreement) -> ClientCall:
    """Return the event that a request for an episode stands for.

    Its size is that of the frames, and of what is kept of them as Python's objects.

    Raises:
        DecodeError: The frames do not hold what the header says.
        SpaceMismatchError: An observation or action is outside its space.
        EpisodeError: Rewards, infos or flags are not what they have to be.
    """
    payload_type, convert = VERBS[header.payload_type]
    payload = decode(payload_type, frames, writable=True)
    try:
        event = convert(payload, (peer, header.request_id), agreement)
    except _WrongError as wrong:
        raise EpisodeError(f"Episode {payload.episode_id}: {wrong}") from None
    size = sum(lengths_of(frames))
    return structs.replace(
        event,
        size=max(size, _elements_bytes(event)) + event.size,
        timeout=min(header.ttl, NO_DEADLINE),  # a larger one leaves a clock no digits
        digest=_digest(header.payload_type, frames, size),
        not_taken=getattr(payload, "not_taken", None),
        given_up=getattr(payload, "given_up", None),
    )


def checked(
    actions: Mapping[str, Mapping[Any, Any]],
    awaited: Callable[[str], Sequence[Any] | None],
    agreement: Agreement | None,
    policy_version: int,
) -> tuple[list[Chosen | GiveUp], SpaceMismatchError | None]:
    """Return what to do with `actions`, in their order, and the last that was wrong with one.

    Args:
        actions: By episode and agent.
        awaited: Of an episode, the agents whose actions somebody waits for; None: nobody does.
        agreement: The spaces; None only if nobody waits for anything.
        policy_version: Who waits is told that.

    Raises:
        ValueError: The action of an agent is missing.
    """
    events: list[Chosen | GiveUp] = []
    error: SpaceMismatchError | None = None
    for episode_id, by_agent in actions.items():
        agents = awaited(episode_id)
        if agents is None:
            events.append(Chosen(episode_id, {}, policy_version))
            continue
        for agent in agents:
            if agent not in by_agent:
                missing = [str(agent) for agent in agents if agent not in by_agent]
                raise ValueError(f"episode {episode_id}: no action for {', '.join(missing)}")
        assert agreement is not None
        place = f"action for episode {episode_id}"
        try:
            if agreement.multi_agent:
                given = {agent: by_agent[agent] for agent in agents}
                action = agreement.take_action(given, place)
            else:
                (agent,) = agents
                action = {agent: agreement.take_action(by_agent[agent], place)}
        except SpaceMismatchError as mismatch:
            error = mismatch
            events.append(GiveUp(episode_id, told(mismatch)))
        else:
            # Sent without a copy, and remembered: a policy may write its next actions where these
            # are, and one row of a batch would keep all of it.
            events.append(Chosen(episode_id, own(action), policy_version))
    return events, error


def told(error: BaseException, *, traceback: bool = True) -> Failed:
    """Return what a client is told of an exception here: its type, text and, if so, traceback."""
    if isinstance(error, RefusedError):
        return error.failed()
    failed = describe(error)
    failed = structs.replace(failed, code=FailureCode.REMOTE, peer=BRIDGE)
    return failed if traceback else structs.replace(failed, remote_traceback="")


def _check_containers(header: Header, payload: Buffer) -> None:
    """Count a request's lists and maps, of which nothing is kept meanwhile, and what is in them."""
    count = values = 0

    def counted(content: list[object] | dict[object, object]) -> None:
        nonlocal count, values
        count += 1
        values += len(content)
        if count > _MAX_CONTAINERS or values - count > _MAX_VALUES:
            raise EpisodeError(
                f"a request has at most {_MAX_CONTAINERS} lists and maps and {_MAX_VALUES} values "
                f"in them, and this {brief(header.payload_type)} has more; send arrays as such"
            )

    def look_through(data: Buffer, ext_hook: Callable[[int, bytes], object]) -> None:
        msgpack.unpackb(
            data,
            object_hook=counted,
            list_hook=counted,
            ext_hook=ext_hook,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def open_tree(code: int, data: bytes) -> None:
        if code == Ext.TREE:  # in which there are no others
            look_through(data, lambda _code, _data: None)

    look_through(payload, open_tree)


def _check_keys(payload: Buffer) -> None:
    """Refuse maps of the payload that would take minutes; those of trees are looked at there."""
    msgpack.unpackb(
        payload,
        object_pairs_hook=KeyCheck().check_map,
        ext_hook=lambda _code, _data: None,
        use_list=False,  # an array may be a key
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )


def _held_bytes(value: Value, what: str) -> int:
    """Return what a map takes as Python's objects; refuse one that is nested too deep."""
    held, level = sys.getsizeof(value), [value]
    for _ in range(MAX_DEPTH):
        found: list[Value] = []
        for item in level:
            if isinstance(item, dict):
                found += item.keys()
                found += item.values()
            elif type(item) is Tree:
                found.append(item.value)
            else:
                found += item
        held += sum(map(sys.getsizeof, found))
        held += sum(_dtype_bytes(item.dtype) for item in found if type(item) in _STRUCTURED)
        level = [item for item in found if isinstance(item, _NESTED)]
        if not level:
            return held
    raise _WrongError(f"{what} is nested deeper than {MAX_DEPTH} levels.")


def _elements_bytes(event: ClientCall) -> int:
    """Return what observations and actions of a request take, where it may be more than it is.

    A number of a Sequence or a Tuple is one byte of it, and forty in memory.
    """
    if isinstance(event, Observe | End):
        return _element_bytes(event.observation)
    if isinstance(event, LogStep):
        return _element_bytes(event.observation) + _element_bytes(event.action)
    if isinstance(event, ClientFragment):
        return sum(_elements_bytes(part.step) for part in event.parts if part.step is not None)
    return 0


def _element_bytes(by_agent: ByAgent) -> int:
    held, found = 0, list(by_agent.values())
    while found:
        item = found.pop()
        if type(item) is np.ndarray:
            held += _ARRAY_BYTES + item.nbytes
        elif isinstance(item, dict):
            held += sys.getsizeof(item)
            found += item.values()
        elif isinstance(item, list | tuple):
            held += sys.getsizeof(item)
            found += item
        else:
            held += sys.getsizeof(item)
    return held


def _dtype_bytes(dtype: np.dtype[Any]) -> int:
    """Return what the fields of a dtype take, and those within them; a plain one has none."""
    found, held = [dtype], 0
    while found:
        item = found.pop()
        if item.subdtype is not None:
            held += _FIELD_BYTES
            found.append(item.subdtype[0])
        elif item.fields:
            held += _FIELD_BYTES * len(item.fields)
            found += [field[0] for field in item.fields.values()]
    return held


def _opened_within(value: Value) -> Value:
    """Return lists and maps with what trees in them hold in their places."""
    if type(value) is dict:
        return {key: _opened_within(item) for key, item in value.items()}
    if type(value) is list:
        return [_opened_within(item) for item in value]
    return opened(value)


def _digest(payload_type: str, frames: Frames, size: int) -> int:
    """Return what a request that is sent again has, and hardly another one."""
    digest = hash(payload_type)
    for frame in frames:
        view = memoryview(frame)
        if view.nbytes <= _DIGESTED:
            digest = zlib.crc32(view, digest)
            continue
        middle = view.nbytes // 2
        for begin in (0, middle, view.nbytes - _DIGESTED // 4):
            digest = zlib.crc32(view[begin : begin + _DIGESTED // 4], digest)
    return digest ^ (size << 32)


def _start(payload: StartEpisode, origin: Origin, _agreement: Agreement) -> StartCall:
    return StartCall(*origin, payload.episode_id, payload.training_enabled)


def _ask(payload: GetAction, origin: Origin, agreement: Agreement) -> Observe:
    episode_id = payload.episode_id
    return Observe(*origin, episode_id, _seen(payload.observation, episode_id, agreement))


def _log_action(payload: LogAction, origin: Origin, agreement: Agreement) -> LogStep:
    episode_id = payload.episode_id
    observation = _seen(payload.observation, episode_id, agreement)
    action = agreement.take_action(payload.action, f"action of episode {episode_id}")
    if not agreement.multi_agent:
        action = {DUMMY_AGENT: action}
    elif not action.keys() <= observation.keys():
        raise _WrongError(
            f"actions of {_names(action)}, but observations of {_names(observation)}."
        )
    return LogStep(*origin, episode_id, observation, action)


def _log_returns(payload: LogReturns, origin: Origin, agreement: Agreement) -> LogReward:
    episode_id = payload.episode_id
    reward, info = opened(payload.reward), opened(payload.info)
    flags = [opened(payload.terminateds), opened(payload.truncateds)]
    if agreement.multi_agent:
        by_agent = _map(reward, "rewards", agreement)
        rewards = {
            agent: _number(value, f"reward of agent {agent!r}") for agent, value in by_agent.items()
        }
        infos = _map(info, "infos", agreement, besides={_COMMON})
        terminateds, truncateds = (_flags(given, agreement) for given in flags)
    else:
        if any(given is not None for given in flags):
            raise EpisodeError(
                f"Episode {episode_id} has one agent: end_episode says whether it is over."
            )
        rewards = {DUMMY_AGENT: _number(reward, "reward")}
        infos = {} if info is None else {DUMMY_AGENT: info}
        terminateds, truncateds = {}, {}
    held = 0
    for agent, value in infos.items():
        infos[agent] = value = {} if value is None else opened(value)
        if not isinstance(value, dict):
            raise _WrongError(f"an info is a map, not a {type(value).__name__}.")
        if value:
            held += _held_bytes(value, "an info")
            infos[agent] = _opened_within(value)
    return LogReward(*origin, episode_id, rewards, infos, terminateds, truncateds, size=held)


def _fragment(payload: LogFragment, origin: Origin, agreement: Agreement) -> ClientFragment:
    episode_id, policy_id = payload.episode_id, payload.policy_id
    if payload.first < 0:
        raise _WrongError(f"a fragment's first step is not {payload.first}.")
    if len(payload.steps) > _MAX_PARTS:
        raise _WrongError(f"a fragment has at most {_MAX_PARTS} steps, not {len(payload.steps)}.")
    parts = [_part(step, policy_id, episode_id, agreement) for step in payload.steps]
    held = sum(part.reward.size for part in parts if part.reward is not None)
    held += sum(
        _held_bytes(part.choice.extras, "an extra") for part in parts if part.choice is not None
    )
    return ClientFragment(*origin, episode_id, policy_id, payload.first, parts, size=held)


def _part(
    step: FragmentStep, policy_id: str, episode_id: str, agreement: Agreement
) -> FragmentPart:
    reward, taken, choice = None, None, None
    if any(x is not None for x in (step.reward, step.info, step.terminateds, step.truncateds)):
        nothing: Value = {} if agreement.multi_agent else 0.0
        logged = LogReturns(
            episode_id=episode_id,
            reward=nothing if step.reward is None else step.reward,
            info=step.info,
            terminateds=step.terminateds,
            truncateds=step.truncateds,
        )
        reward = _log_returns(logged, _NOBODY, agreement)
    if step.observation is not None:
        if isinstance(step.action, dict) and not step.action:  # it got no answer
            seen = _seen(step.observation, episode_id, agreement)
            return FragmentPart(reward, LogStep(*_NOBODY, episode_id, seen, {}))
        acted = LogAction(episode_id=episode_id, observation=step.observation, action=step.action)
        taken = _log_action(acted, _NOBODY, agreement)
        if step.policy_version > _MAX_VERSION:
            raise _WrongError(f"{step.policy_version} is no version of a policy.")
        if step.policy_version >= 0:
            extras = _extras(step.extras, taken.action, agreement)
            choice = ClientChoice(policy_id, step.policy_version, extras)
    return FragmentPart(reward, taken, choice)


def _extras(value: Value, action: ByAgent, agreement: Agreement) -> dict[Any, dict[str, Any]]:
    value = opened(value)
    by_agent = value if agreement.multi_agent else {DUMMY_AGENT: value}
    extras: dict[Any, dict[str, Any]] = {}
    for agent, columns in _map(by_agent, "extras", None).items():
        columns = {} if columns is None else opened(columns)
        if agent not in action or not isinstance(columns, dict) or len(columns) > _MAX_EXTRAS:
            raise _WrongError(
                f"extras of {brief(agent)} are a map by name of at most "
                f"{_MAX_EXTRAS} values, of an agent that has acted."
            )
        for name, column in columns.items():
            _check_column(column, f"extra {brief(name)} of agent {brief(agent)}")
        extras[agent] = columns
    return extras


def _end(payload: EndEpisode, origin: Origin, agreement: Agreement) -> End:
    episode_id = payload.episode_id
    observation = _observation(payload.observation, episode_id, agreement)
    given = [opened(payload.terminateds), opened(payload.truncateds)]
    if not agreement.multi_agent and any(flags is not None for flags in given):
        raise EpisodeError(f"Episode {episode_id} has one agent: say truncated=true or nothing.")
    terminateds, truncateds = (_flags(flags, agreement) for flags in given)
    terminateds[ALL], truncateds[ALL] = not payload.truncated, payload.truncated
    return End(*origin, episode_id, observation, terminateds, truncateds)


VERBS: Final[dict[str, tuple[type[Any], Callable[[Any, Origin, Agreement], ClientCall]]]] = {
    StartEpisode.__name__: (StartEpisode, _start),
    GetAction.__name__: (GetAction, _ask),
    LogAction.__name__: (LogAction, _log_action),
    LogReturns.__name__: (LogReturns, _log_returns),
    LogFragment.__name__: (LogFragment, _fragment),
    EndEpisode.__name__: (EndEpisode, _end),
}


def _observation(value: Value, episode_id: str, agreement: Agreement) -> ByAgent:
    taken = agreement.take_observation(value, f"observation of episode {episode_id}")
    return taken if agreement.multi_agent else {DUMMY_AGENT: taken}


def _seen(value: Value, episode_id: str, agreement: Agreement) -> ByAgent:
    """Return an observation that an action follows upon."""
    observation = _observation(value, episode_id, agreement)
    if not observation:
        raise _WrongError("an observation of nobody; name an agent.")
    return observation


def _number(value: Value, what: str) -> float:
    article = "an" if what.startswith("e") else "a"
    if type(value) is float or (isinstance(value, _NUMBERS) and type(value) is not bool):
        try:
            number = float(value)
        except OverflowError:  # an int of hundreds of digits
            number = math.inf
        if -FLOAT32_MAX <= number <= FLOAT32_MAX:
            return number
        raise _WrongError(f"{article} {what} is a finite number of float32, not {brief(value)}.")
    raise _WrongError(f"{article} {what} is a number, not {brief(value)}.")


def _check_column(value: Value, what: str) -> None:
    """Refuse what cannot become numbers of a row."""
    level = [opened(value)]
    for _ in range(MAX_DEPTH):
        found: list[Value] = []
        for item in level:
            if (type(item) is float or type(item) is int) and -FLOAT32_MAX <= item <= FLOAT32_MAX:
                pass  # most of all
            elif isinstance(item, Mapping):
                found += map(opened, item.values())
            elif isinstance(item, list | tuple):
                found += map(opened, item)
            elif isinstance(item, np.ndarray | np.generic):
                # In float16 the largest float32 is infinite as well.
                is_number = item.dtype.kind in "biuf"
                if not is_number or not (np.abs(item.astype(np.float64)) <= FLOAT32_MAX).all():
                    raise _WrongError(
                        f"{what} has {item.dtype} or what is not finite; it "
                        "consists of finite numbers of float32."
                    )
            else:
                _number(int(item) if type(item) is bool else item, what)
        if not found:
            return
        level = found
    raise _WrongError(f"{what} is nested too deep.")


def _map(
    value: Value, what: str, agreement: Agreement | None, besides: Set[str] = frozenset()
) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _WrongError(f"{what} are a map by agent, not a {type(value).__name__}.")
    for agent in value:
        if type(agent) is not str and type(agent) is not int:
            raise _WrongError(
                f"{what} of {brief(agent)}, which is no agent: their ids are strings or integers."
            )
    if agreement is not None and (strange := value.keys() - set(agreement.agents) - besides):
        raise _WrongError(
            f"{what} of {_names(strange)}; the agents are {_names(agreement.agents)}."
        )
    return dict(value)


def _flags(value: Value, agreement: Agreement) -> dict[Any, bool]:
    flags = _map(value, "flags", agreement)
    for agent, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise _WrongError(f"the flag of agent {agent!r} is true or false, not {brief(flag)}.")
        flags[agent] = bool(flag)
    return flags


def _names(agents: Any) -> str:
    return cut(", ".join(sorted(map(str, agents))), 1000) or "nobody"
