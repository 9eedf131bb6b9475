"""One episode of an external simulator: what belongs to which step. Pure.

Rewards, infos and flags add up until the next observation, and belong to the action before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from envbus.actors.arrays.finite import FLOAT32_MAX
from envbus.actors.env.agents import ALL
from envbus.runner.bridge.results import ByAgent, EpisodeFault, Record
from envbus.runner.pool.agent_results import HeldBack

__all__ = ["Episode", "Waiting"]

#: Refused requests of one episode that are remembered until they come again.
_MOST_REFUSED = 256


class _Missed(msgspec.Struct, gc=False):
    """Equal requests in a row for which there was no room: their ids, first and last."""

    first: int
    last: int
    digest: int

    def holds(self, request_id: int, digest: int) -> bool:
        """Whether it is one of them that comes by its own id."""
        return digest == self.digest and self.first <= request_id <= self.last


class Waiting(msgspec.Struct, gc=False):
    """A client waits for the action of an episode."""

    request_id: int
    #: Number among the pending ones.
    number: int
    record: Record
    #: Bytes of its message.
    size: int = 0
    #: Whether the runner was shown the observation.
    shown: bool = False


class Episode:
    """An episode that is open, or of which the runner was not shown all yet.

    Attributes:
        waiting: Who waits for an action, if somebody does.
        came: Id of the last request that was taken, or that is told never to come; 0: none was.
        answered: Id of the request that was told the action for the last observation.
        over: Whether its client, or its lease, has ended it.
        calls: How often each verb was taken, by its event.
        num_parts: Of fragments, that were taken.
        known: Whether the runner was, or will be, shown an observation of it.
        num_bytes: Of the messages by which something was logged since the last record.
        gap_until: Id of the last request that was taken while others were missed; -1: none was.
    """

    __slots__ = (
        "_done",
        "_flags",
        "_held_back",
        "_infos",
        "_missed",
        "_queue",
        "_refused",
        "_rewards",
        "_unacted",
        "_void",
        "answered",
        "calls",
        "came",
        "episode_id",
        "gap_until",
        "known",
        "num_bytes",
        "num_parts",
        "over",
        "session",
        "training_enabled",
        "waiting",
    )

    def __init__(self, episode_id: str, session: str, *, training_enabled: bool) -> None:
        self.episode_id = episode_id
        self.session = session
        self.training_enabled = training_enabled
        self.waiting: Waiting | None = None
        self.came = 0
        self.calls: dict[type, int] = {}
        self.answered: int | None = None
        self.over = False
        self.num_parts = 0
        self.known = False
        #: Of the next record: as its fields of these names.
        self._unacted = self._missed = False
        #: Agents that were observed since anybody has acted last, and got no action.
        self._void: set[Any] = set()
        #: Requests for which there was no room, and that did not come again, in order. Who sends
        #: one again may give it a new id.
        self._refused: deque[_Missed] = deque()
        self.gap_until = -1
        self.num_bytes = 0
        self._queue: deque[Record] = deque()
        self._held_back: HeldBack | None = None
        self._rewards: ByAgent = {}
        self._infos: ByAgent = {}
        self._flags: dict[str, ByAgent] = {}
        #: By name of the flag: agents that were observed with it, and so are done.
        self._done: dict[str, set[Any]] = {"terminateds": set(), "truncateds": set()}

    @property
    def num_queued(self) -> int:
        """Records that the runner was not shown yet."""
        return len(self._queue)

    @property
    def held_bytes(self) -> int:
        """Bytes of all messages that the runner was not shown yet. For tests: takes time."""
        return self.num_bytes + sum(record.size for record in self._queue)

    def log(
        self,
        rewards: ByAgent,
        infos: ByAgent,
        terminateds: ByAgent,
        truncateds: ByAgent,
        *,
        size: int = 0,
    ) -> None:
        """Add what the last action has led to, told by so many bytes."""
        own = self._rewards
        self.num_bytes += size
        for agent, reward in rewards.items():
            total = own[agent] + reward if agent in own else reward
            own[agent] = min(max(total, -FLOAT32_MAX), FLOAT32_MAX)
        for agent, info in infos.items():
            self._infos.setdefault(agent, {}).update(info)
        if terminateds or truncateds:
            for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
                for agent, flag in flags.items():
                    if flag:
                        self._flags.setdefault(name, {})[agent] = True

    def observe(
        self,
        observation: ByAgent,
        *,
        off_policy: ByAgent | None = None,
        held: int = 0,
        size: int = 0,
    ) -> Record:
        """Queue an observation with all that was logged since the one before."""
        self.num_bytes += size
        content = self._content(observation)
        return self._append(content, off_policy=off_policy, held=held)

    def largest_sum(self, parts: Iterable[tuple[ByAgent, ByAgent]]) -> float:
        """Return the largest sum, without its sign, that an agent's rewards would come to.

        Args:
            parts: What would be logged, and observed behind it.
        """
        sums, most = dict(self._rewards), 0.0
        if self._held_back is not None:
            for agent, reward in self._held_back.rewards.items():
                sums[agent] = sums.get(agent, 0.0) + reward
        for rewards, observation in parts:
            for agent, reward in rewards.items():
                sums[agent] = sums.get(agent, 0.0) + reward
                most = max(most, abs(sums[agent]))
            for agent in observation:
                sums.pop(agent, None)
        return most

    def end(
        self,
        observation: ByAgent,
        terminateds: Mapping[Any, bool],
        truncateds: Mapping[Any, bool],
        *,
        size: int = 0,
    ) -> Record:
        """Queue the last observation; `terminateds` and `truncateds` name `"__all__"`."""
        self.over = True
        self.num_bytes += size
        content = self._content(observation, terminateds, truncateds)
        # Who was not told of one by one, now or before, ends as the episode does.
        own = content["terminateds" if terminateds[ALL] else "truncateds"]
        for agent in observation:
            if not (content["terminateds"].get(agent) or content["truncateds"].get(agent)):
                own[agent] = True
        return self._append(content, last=True)

    def break_off(self, fault: EpisodeFault) -> Record:
        """Queue the end without a last observation."""
        self.over = True
        return self._append({}, last=True, fault=fault)

    def withdraw(self) -> int:
        """The action for the last observation will not reach the simulator.

        The next record says so, and the row before ends here. If that is told already of all of its
        agents, and the runner was not shown this record, it is taken back: what was logged before
        it waits for the next one, which is behind the gap as well. So however often a client gives
        up waiting, it leaves at most one record per agent.

        Returns:
            Bytes of the message that nothing is kept of any more.
        """
        waiting, self.waiting = self.waiting, None
        assert waiting is not None, f"nobody waits in episode {self.episode_id}"
        agents = waiting.record.content["observations"].keys()
        is_told = waiting.record.unacted and self._void >= agents
        if waiting.shown or self.over or not is_told:
            self._void |= agents
            self._unacted = True
            return 0
        record = self._queue.pop()
        assert record is waiting.record, f"episode {self.episode_id} waits and goes on"
        self.num_bytes += record.size - waiting.size
        rewards, infos, flags = self._rewards, self._infos, self._flags
        content = record.content
        self._rewards, self._flags = {}, {}
        self._infos = {agent: info for agent, info in content["infos"].items() if info}
        self.log(
            {agent: reward for agent, reward in content["rewards"].items() if reward},
            {},
            content["terminateds"],
            content["truncateds"],
        )
        self.log(rewards, infos, flags.get("terminateds", {}), flags.get("truncateds", {}))
        self._unacted = True
        self._missed |= record.missed
        return waiting.size

    def give_back(self, request_id: int) -> bool:
        """The simulator has taken no action since that request; return whether it was told one.

        The next record says so, and the row before ends here.
        """
        if self.lack(request_id) or self.answered is None or self.answered < request_id:
            return False
        self.answered, self._unacted = None, True
        return True

    def lack(self, request_id: int) -> bool:
        """Nobody waits for that request's answer any more; return whether it never came.

        Then what was seen last is not followed by what is seen next, which is no row.
        """
        if request_id <= self.came:
            return False
        self.came = request_id  # told again, it is no news
        self._leave_gap()
        return True

    @property
    def misses(self) -> bool:
        """Whether there was no room for a request, and none was taken since in its place."""
        return bool(self._refused)

    def miss(self, request_id: int, digest: int) -> None:
        """There is no room for a request; it is to come again before others are taken."""
        refused = self._refused
        if any(missed.holds(request_id, digest) for missed in refused):
            return
        if refused and refused[-1].digest == digest:  # sent again under a new id, or one as it was
            refused[-1].last = max(refused[-1].last, request_id)
        elif len(refused) <= _MOST_REFUSED:
            refused.append(_Missed(request_id, request_id, digest))

    def follow(self, request_id: int, digest: int) -> None:
        """A request is taken. If it is not the one that was missed, there is a gap before it.

        As where an observation never arrived, the next record says so, and the row before is left
        out. Those that were missed behind it still are: who skips them leaves one more gap. Where
        too many were missed, they count as such a gap. What has a lower id comes too late then, as
        an equal request may have been taken for one that was missed.
        """
        refused = self._refused
        if not refused:
            return
        if len(refused) > _MOST_REFUSED:
            refused.clear()
        again = [missed for missed in refused if missed.digest == digest]
        by_id = any(missed.holds(request_id, digest) for missed in again)
        until = request_id if by_id or not again else again[0].last
        is_next = bool(refused) and refused[0].digest == digest and until <= refused[0].last
        if not is_next:
            self._leave_gap()
        while refused and refused[0].last <= until:
            refused.popleft()
        if refused and refused[0].first <= until:
            refused[0].first = until + 1
        self.gap_until = request_id

    def come_too_late(self, request_id: int, digest: int) -> None:
        """A request is told that it comes too late. If it was missed, it is so for good."""
        for missed in list(self._refused):
            if missed.holds(request_id, digest):
                self._refused.remove(missed)
                self._leave_gap()

    def _leave_gap(self) -> None:
        """An observation never arrived: no row leads from what was seen to what is seen next."""
        self._missed, self._unacted = True, self.known

    def begin_anew(self) -> None:
        """The ids of what came so far will stand for other requests."""
        self.came, self.gap_until = 0, -1
        self.answered = None if self.answered is None else 0
        for missed in self._refused:
            missed.first = missed.last = 0

    def take(self) -> Record:
        """Return the oldest record that the runner was not shown; there is one."""
        record = self._queue.popleft()
        waiting = self.waiting
        if waiting is not None and waiting.record is record:
            waiting.shown = True
        return record

    def _content(
        self,
        observation: ByAgent,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
    ) -> dict[str, ByAgent]:
        """Return an observation with what was logged since the one before."""
        content = _blank(observation)
        rewards, flags = self._rewards, self._flags
        if rewards:
            self._rewards = {}
            content["rewards"].update(rewards)
        if self._infos:
            content["infos"].update(self._infos)
            self._infos = {}
        if flags or terminateds is not None:
            self._flags = {}
            for name, given in (("terminateds", terminateds), ("truncateds", truncateds)):
                content[name] |= {**(given or {}), **flags.get(name, {})}
        # A single agent has an observation each time: nothing of it is ever held back.
        if self._held_back is not None or flags or len(content["rewards"]) > len(observation):
            self._held_back = self._held_back or HeldBack()
            content = self._held_back.settle(content)
            for name, done in self._done.items():
                # Who is done stays so, or a runner would be asked to make a row of it.
                content[name].update(dict.fromkeys(done & observation.keys(), True))
                done.update(agent for agent in observation if content[name].get(agent))
        return content

    def _append(
        self,
        content: dict[str, ByAgent],
        *,
        last: bool = False,
        off_policy: ByAgent | None = None,
        fault: EpisodeFault | None = None,
        held: int = 0,
    ) -> Record:
        record = Record(
            self.episode_id,
            content,
            self.training_enabled,
            not self.known,
            self._unacted,
            self._missed,
            last,
            off_policy,
            None,
            fault,
            held,
            self.num_bytes,
        )
        self.num_bytes = 0
        self.known = True
        if not self._unacted:
            self._void.clear()
        self._unacted = self._missed = False
        self.answered = None
        self._queue.append(record)
        return record


def _blank(observation: ByAgent) -> dict[str, ByAgent]:
    """Return the content of a record in which nothing has happened; all dicts are its own."""
    if len(observation) == 1:  # as below, in a third of the time
        (agent,) = observation
        return {
            "observations": observation,
            "rewards": {agent: 0.0},
            "terminateds": {agent: False, ALL: False},
            "truncateds": {agent: False, ALL: False},
            "infos": {agent: {}},
        }
    return {
        "observations": observation,
        "rewards": dict.fromkeys(observation, 0.0),
        "terminateds": {**dict.fromkeys(observation, False), ALL: False},
        "truncateds": {**dict.fromkeys(observation, False), ALL: False},
        "infos": {agent: {} for agent in observation},
    }
