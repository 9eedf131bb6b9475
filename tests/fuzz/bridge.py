"""Attacks living bridges with hostile values: `make fuzz`, or `python -m tests.fuzz.bridge`.

The bridges (one of a single agent with every kind of space, one of several agents) run in a process
of their own under RLIMIT_AS, and check every episode of an honest client by value. Strangers
meanwhile send each verb with hostile values. A finding is: the process ends, a message makes it
raise what is no refusal, an honest episode is not whole, or nobody is answered in time. Exit code 1
then; `--seed` sends the same messages again.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import zmq
from gymnasium import spaces

from envbus.actors import ClientTimeouts, ExternalEnvClient
from envbus.bus.wire.messages import Kind
from envbus.runner import ExternalEnvBridge
from envbus.runner.bridge import EpisodeLimits
from tests.sources import ROOT

__all__ = ["attack", "main"]

REAL = spaces.Box(-np.inf, np.inf, (2,))
RICH = spaces.Dict(
    number=spaces.Box(-1000.0, 1000.0, ()),
    real=REAL,
    picture=spaces.Box(0, 255, (4, 4, 3), np.uint8),
    far=spaces.Box(-(2**62), 2**62, (1,), np.int64),
    choice=spaces.Discrete(3, start=-1),
    choices=spaces.MultiDiscrete([3, 4]),
    bits=spaces.MultiBinary(3),
    text=spaces.Text(8, min_length=0),
    pair=spaces.Tuple([spaces.Discrete(2), REAL]),
    one=spaces.OneOf([spaces.Discrete(2), REAL]),
    many=spaces.Sequence(REAL),
    stacked=spaces.Sequence(REAL, stack=True),
    graph=spaces.Graph(REAL, None),
)
AGENTS = {"a": REAL, "b": REAL, "c": REAL}
ACTION = spaces.Discrete(1000)
#: Bytes that the bridges' process may have beside what it begins with.
MEMORY = 768 << 20
#: Seconds in which an honest client is answered, on a busy machine.
PATIENCE = 60.0
STEPS = 8
LIMITS = EpisodeLimits(lease=5.0)


# --- the bridges' process ----------------------------------------------------------------------


def _rich(number: int) -> dict[str, Any]:
    """An observation that says which it is."""
    pair = np.array([number, -number], np.float32)
    return {
        "number": np.float32(number),
        "real": pair,
        "picture": np.full((4, 4, 3), number % 256, np.uint8),
        "far": np.array([number]),
        "choice": np.int64(number % 3 - 1),
        "choices": np.array([number % 3, number % 4]),
        "bits": np.array([number % 2, 1, 0], np.int8),
        "text": str(number)[:8],
        "pair": (np.int64(number % 2), pair),
        "one": (np.int64(1), pair),
        "many": (pair, pair),
        "stacked": np.stack([pair, pair]),
        "graph": spaces.GraphInstance(np.stack([pair]), None, None),
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is str or type(other) is str:
        return bool(one == other)
    return np.asarray(one).dtype == np.asarray(other).dtype and bool(np.array_equal(one, other))


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, dict) and one.keys() == other.keys():
        return ", ".join(
            f"{key}: {one[key]!r:.80} for {other[key]!r:.80}"
            for key in one
            if not _same(one[key], other[key])
        )
    return f"{one!r:.80} for {other!r:.80}"


class Judge:
    """The owner of one bridge: acts, and compares the honest episodes with what they are."""

    def __init__(self, bridge: ExternalEnvBridge) -> None:
        self.bridge = bridge
        self.whole = 0
        self.findings: list[str] = []
        self._steps: dict[str, int] = {}

    def once(self) -> None:
        bridge = self.bridge
        result = bridge.poll(0.01)
        for episode, agents in result.observations.items():
            if episode.startswith("honest"):
                self._compare(episode, agents, result)
        self.findings += [
            f"{fault}" for fault in result.faults if fault.episode_id.startswith("honest")
        ]
        ended = set(result.ended)
        bridge.send_actions(
            {
                episode: {agent: self._steps.get(episode, 0) % 1000 for agent in agents}
                for episode, agents in result.observations.items()
                if episode not in ended
            }
        )

    def _compare(self, episode: str, agents: dict[Any, Any], result: Any) -> None:
        number = self._steps[episode] = self._steps.get(episode, -1) + 1
        base = int(episode.split("-")[1])
        for agent, seen in agents.items():
            reward = result.rewards[episode][agent]
            if bridge_is_rich := agent == "agent0":
                expected: Any = _rich(base + number)
            else:
                expected = np.array([base + number, ord(agent)], np.float32)
            if not _same(seen, expected):
                self.findings.append(f"{episode} step {number}: saw {_difference(seen, expected)}")
            if reward != (0.0 if number == 0 else float(base + number)):
                self.findings.append(f"{episode} step {number}: reward {reward}")
            info = result.infos[episode].get(agent, {})
            if bridge_is_rich and number and info != {"step": number}:
                self.findings.append(f"{episode} step {number}: info {info!r:.200}")
        if episode in result.ended:
            if number != STEPS:
                self.findings.append(f"{episode} ended after {number} steps")
            self.whole += 1
            del self._steps[episode]


def _serve() -> int:
    """Be the bridges, until a line comes; then tell what was seen."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    with (
        ExternalEnvBridge(RICH, ACTION, limits=LIMITS) as one,
        ExternalEnvBridge(AGENTS, dict.fromkeys(AGENTS, ACTION), limits=LIMITS) as many,
    ):
        judges = [Judge(one), Judge(many)]
        sys.stdout.write(json.dumps([one.address, many.address]) + "\n")
        sys.stdout.flush()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while not over.is_set():
            for judge in judges:
                judge.once()
        findings = [text for judge in judges for text in judge.findings[:20]]
        for judge in judges:
            counts = judge.bridge.statistics()
            if counts.surprises:
                findings.append(f"{counts.surprises} messages raised what is no refusal")
        told = {
            "findings": findings,
            "whole": [judge.whole for judge in judges],
            "refused": sum(judge.bridge.statistics().refused for judge in judges),
            "grown_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun) // 1024,
        }
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


# --- the honest client ---------------------------------------------------------------------------


def _play(address: str, name: str, over: threading.Event, many: bool) -> None:
    timeouts = ClientTimeouts(connect=PATIENCE, action=PATIENCE, other=PATIENCE)
    # The strangers share this process, which is silent while it makes their messages.
    beat = PATIENCE / 4
    with ExternalEnvClient(address, name=name, timeouts=timeouts, heartbeat=beat) as client:
        base = count = 0
        while not (count and over.is_set()):  # once at least, however late it has come in
            base = base % 800 + 100
            count += 1
            episode = client.start_episode(f"honest-{base}-{name}-{count}")

            def seen(number: int, base: int = base) -> Any:
                if not many:
                    return _rich(base + number)
                return {
                    agent: np.array([base + number, ord(agent)], np.float32) for agent in AGENTS
                }

            for number in range(STEPS):
                action = client.get_action(episode, seen(number))
                chosen = action.values() if many else [action]
                assert all(one == number for one in chosen), f"{episode} {number}: {action}"
                reward = float(base + number + 1)
                if many:
                    client.log_returns(episode, dict.fromkeys(AGENTS, reward))
                else:
                    client.log_returns(episode, reward, {"step": number + 1})
            client.end_episode(episode, seen(STEPS))


# --- the strangers -------------------------------------------------------------------------------

_VERBS = (
    "JoinBridge",
    "StartEpisode",
    "GetAction",
    "LogAction",
    "LogReturns",
    "LogFragment",
    "EndEpisode",
    "GetModel",
    "Hello",
    "NoSuchVerb",
)


class Hostile:
    """Makes messages; the same ones for the same seed."""

    def __init__(self, seed: int, *, many: bool) -> None:
        self.chance = random.Random(seed)
        self.many = many
        self.buffers: list[bytes] = []

    def value(self, depth: int = 0) -> Any:
        """Return anything."""
        chance = self.chance
        kind = chance.randrange(14 if depth < 4 else 9)
        if kind == 0:
            return chance.choice([0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1, 300])
        if kind == 1:
            return chance.choice([float("nan"), float("inf"), -float("inf"), 1e300, -1e39, 5e-324])
        if kind == 2:
            texts = ["", "a", "agent0", "__all__", "nan", "1.0", "e\n\x1b[2J\x00", "\u202e", "é"]
            return chance.choice([*texts, "x" * chance.choice([300, 20_000])])
        if kind == 3:
            return chance.choice([None, True, False, b"", b"\x00" * 48, b"x" * 5000])
        if kind == 4:
            return self._array()
        if kind == 5:
            return self._tree(depth)
        if kind == 6:
            codes = [-1, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 127]
            return msgpack.ExtType(chance.choice(codes[1:]), chance.randbytes(chance.randrange(40)))
        if kind == 7:
            return self._deep()
        if kind == 8:
            return chance.choice(
                [[], {}, [[]], [[], []], ["x" * 20_000, *["y"] * 4000], [{}] * 999]
            )
        if kind == 9:
            return [self.value(depth + 1) for _ in range(chance.randrange(5))]
        if kind == 10:
            # Hundreds of hundreds would be gigabytes, which this process cannot make.
            return [self.value(depth + 1)] * chance.choice([2, 3, 4 if depth else 100])
        return {self._key(): self.value(depth + 1) for _ in range(chance.randrange(5))}

    def _key(self) -> Any:
        keys = ["a", "b", "agent0", "space", "dtype", "low", "items", "n", "__all__", "", "v"]
        return self.chance.choice([*keys, 1, -1, 1.5, float("nan"), None, True, b"k", (1, 2), ()])

    def _deep(self) -> Any:
        value: Any = self.chance.choice([1, "x", []])
        wraps = [lambda v: [v], lambda v: {"a": v}, lambda v: {"space": "Tuple", "items": [v]}]
        wrap = self.chance.choice(wraps)
        for _ in range(self.chance.choice([5, 33, 65, 150])):
            value = wrap(value)
        return value

    def _array(self) -> msgpack.ExtType:
        chance = self.chance
        dtype: Any = chance.choice(
            [
                *("<f4", "<f8", "<f2", "|u1", "<i8", "<u8", "|b1", "|S0", "|S5", "<U3", "|V0"),
                *("<c16", "<M8[s]", "O", "<f4,<f4", "|S9999999999"),
                {"base": "<f4", "shape": [2**31]},
                {"names": [], "formats": [], "offsets": [], "itemsize": 0},
            ]
        )
        shape: Any = chance.choice(
            [
                *([2], [2], [4, 4, 3], [], [1], [0], [0, 2**40], [2**31], [2**62], [-1]),
                *([1] * 40, "2", [2**20, 2**20], [0, 2**63], [65536], [1, 2], [2, 2]),
            ]
        )
        order: Any = chance.choice(["C", "C", "C", "F", "K", 0, None])
        data: Any = chance.choice([b"", bytes(8), bytes(48), b"\xff" * 8, b"\xff" * 16, 0, 1, -1])
        if chance.random() < 0.3:
            self.buffers.append(chance.choice([b"", bytes(8), b"\xff" * 8, bytes(5000)]))
        return msgpack.ExtType(2, _packed([dtype, shape, order, data]))

    def _tree(self, depth: int) -> msgpack.ExtType:
        chance = self.chance
        if chance.random() < 0.2:
            return msgpack.ExtType(
                1, chance.choice([b"", b"\xc1", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff"])
            )
        big = msgpack.ExtType(6, chance.randbytes(chance.choice([1, 9, 5000])))
        mark = [msgpack.ExtType(4, b""), 1, 2]
        struct = [msgpack.ExtType(5, chance.choice([b"set", b"OrderedDict", b"no"])), self.value(4)]
        inner = chance.choice([big, mark, struct, [big], self.value(depth + 1), {1: {2: big}}])
        return msgpack.ExtType(1, _packed(inner))

    def space(self) -> Any:
        """Return something like the plain form of a space."""
        chance = self.chance
        plain: Any = chance.choice(
            [
                {"space": "Box", "dtype": "<f4", "low": [-1.0, -1.0], "high": [1.0, 1.0]},
                {"space": "Discrete", "dtype": "<i8", "n": 1000, "start": 0},
                {"space": "MultiDiscrete", "dtype": "<i8", "nvec": [2, 3], "start": [0, 0]},
                {"space": "MultiBinary", "shape": [3], "flat": True},
                {"space": "Text", "max_length": 8, "min_length": 0, "characters": "ab"},
                {"space": "Sequence", "item": {"space": "No"}, "stack": False},
                {"space": "Graph", "node": {"space": "No"}, "edge": None},
                {"space": "Dict", "items": [["a", {"space": "No"}]], "sort_keys": True},
                {"space": "Tuple", "items": [{"space": "No"}]},
                {"space": "AgentSpaces", "distinct": [], "agents": [["a", 0]]},
            ]
        )
        for _ in range(chance.randrange(3)):
            key = chance.choice(list(plain))
            plain[key] = self.space() if chance.random() < 0.3 else self.value()
        return {"a": plain} if chance.random() < 0.2 else plain

    def fields(self, verb: str, episodes: list[str]) -> Any:
        """Return the content of a request that is right but for some of it."""
        chance = self.chance
        real, episode = [0.5, -0.5], chance.choice(episodes)
        seen: Any = {"a": real} if self.many else _plain(_rich(1))
        step = {"reward": {"a": 1.0} if self.many else 1.0, "observation": seen}
        step |= {"action": {"a": 1} if self.many else 1, "policy_version": 1, "extras": {"v": 1.0}}
        known: dict[str, dict[str, Any]] = {
            "JoinBridge": {"client": "stranger"},
            "StartEpisode": {"episode_id": f"e{chance.randrange(50)}"},
            "GetAction": {"episode_id": episode, "observation": seen},
            "LogAction": {
                "episode_id": episode,
                "observation": seen,
                "action": {"a": 1} if self.many else 1,
            },
            "LogReturns": {"episode_id": episode, "reward": step["reward"], "info": None},
            "LogFragment": {"episode_id": episode, "policy_id": "p", "first": 0, "steps": [step]},
            "EndEpisode": {"episode_id": episode, "observation": seen, "truncated": False},
            "GetModel": {"policy_id": "p", "have_version": -1},
            "Hello": {"name": f"stranger-{chance.randrange(9)}", "heartbeat": 5.0},
        }
        content = known.get(verb, {})
        if verb == "JoinBridge" and chance.random() < 0.8:
            content |= {"observation_space": self.space(), "action_space": self.space()}
        if verb == "LogReturns" and chance.random() < 0.3:
            content |= {"terminateds": self.value(), "truncateds": self.value()}
        if chance.random() < 0.05:
            return self.value()
        for _ in range(chance.choice([0, 1, 1, 1, 2])):
            self._spoil(content)
        if self.many and verb == "GetAction" and content.get("observation") == {}:
            content["observation"] = seen
        return content

    def _spoil(self, content: Any) -> None:
        """Put a hostile value somewhere."""
        chance = self.chance
        while content:
            places = list(content) if isinstance(content, dict) else list(range(len(content)))
            place = chance.choice(places)
            inner = content[place]
            if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
                content = inner
                continue
            if chance.random() < 0.1 and isinstance(content, dict):
                del content[place]
            else:
                content[place] = self.value()
            return

    def message(self, episodes: list[str]) -> list[bytes]:
        """Return header, payload and buffers."""
        chance, self.buffers = self.chance, []
        verb = chance.choice(_VERBS)
        body = _packed(self.fields(verb, episodes))
        if chance.random() < 0.05 and body:
            spot = chance.randrange(len(body))
            body = body[:spot] + chance.randbytes(chance.randrange(4)) + body[spot + 1 :]
        header: list[Any] = [1, 0, chance.randrange(1, 2**40), verb, 30.0, 0, "bridge"]
        if chance.random() < 0.15:
            spoiled: list[list[Any]] = [
                [1, 1, 2, 0, -1, 2**63, "1"],
                [0, 1, 2, 3, 7, -1, None],
                [0, -1, 2**62, 2**63 - 1, 2**64 - 1, 1.5, "x"],
                [verb, "", "x" * 300, None, "Shutdown", "Goodbye", "Token"],
                [float("nan"), float("inf"), 0.0, -1.0, 1e300, 5e-324, None],
                [0, 1, -1, 2**40, None, "x"],
                ["", "bridge", "stranger", "x" * 500, None, 1],
            ]
            place = chance.randrange(len(header))
            header[place] = chance.choice(spoiled[place])
            if header[1] == 3 and header[3] == "Goodbye":
                header[3] = "x"
        return [_packed(header), body, *self.buffers]


def _plain(value: Any) -> Any:
    if isinstance(value, spaces.GraphInstance):
        nodes = [[float(x) for x in row] for row in value.nodes]
        return {"nodes": nodes}
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, strict_types=False, unicode_errors="surrogatepass")
    return packed


class Stranger:
    """A peer that has joined, or not, and sends what is hostile."""

    def __init__(self, context: zmq.Context[Any], address: str, hostile: Hostile) -> None:
        self.hostile = hostile
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, f"s.{secrets.token_hex(8)}".encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
        self.socket.connect(address)
        self.episodes = ["mine", "mine2", "honest-100-honest-1", "none"]
        if hostile.chance.random() < 0.9:
            self._ask("Hello", {"name": f"s-{secrets.token_hex(4)}", "heartbeat": 30.0}, to="")
            self._ask("JoinBridge", {"client": "stranger", "plain": hostile.chance.random() < 0.5})
            for episode in self.episodes[:2]:
                mine = f"{episode}-{secrets.token_hex(4)}"
                self._ask("StartEpisode", {"episode_id": mine})
                self.episodes.append(mine)

    def _ask(self, verb: str, content: dict[str, Any], to: str = "bridge") -> None:
        self.socket.send_multipart([_packed([1, 0, 1, verb, 30.0, 0, to]), _packed(content)])
        self.listen(0)

    def attack(self, messages: int) -> int:
        """Send so many; return how many were answered until now."""
        for _ in range(messages):
            self.socket.send_multipart(self.hostile.message(self.episodes))
        return self.listen(20)

    def leave(self) -> None:
        """Say goodbye, mostly: what is left waits for a lease that is short."""
        if self.hostile.chance.random() < 0.8:
            self.socket.send_multipart([_packed([1, 3, 0, "Goodbye"]), _packed({})])
        self.socket.close(1000)

    def listen(self, patience_ms: int) -> int:
        answers = 0
        while self.socket.poll(patience_ms):
            header = msgspec.msgpack.decode(self.socket.recv_multipart()[0])
            assert header[1] in (Kind.REPLY, Kind.FAILURE, Kind.NOTICE)
            answers += 1
        return answers


def attack(seconds: float, seed: int) -> tuple[dict[str, Any], str]:
    """Return what the bridges' process has told in the end, with `sent` and `answered`; its log."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.bridge", "--be-the-bridges"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    over, failed = threading.Event(), list[str]()
    sent = answered = 0
    try:
        addresses = json.loads(process.stdout.readline())

        def play(address: str, many: bool) -> None:
            try:
                _play(address, "honest", over, many)
            except BaseException as exc:
                failed.append(f"the honest client: {type(exc).__name__}: {exc}")

        honest = [
            threading.Thread(target=play, args=(address, bool(many)), daemon=True)
            for many, address in enumerate(addresses)
        ]
        for thread in honest:
            thread.start()
        deadline, round_ = time.monotonic() + seconds, 0
        with zmq.Context() as context:
            while time.monotonic() < deadline and not failed and process.poll() is None:
                many = round_ % 2
                stranger = Stranger(
                    context, addresses[many], Hostile(seed + round_, many=bool(many))
                )
                for _ in range(10):
                    answered += stranger.attack(20)
                    sent += 20
                stranger.leave()
                round_ += 1
        over.set()
        for thread in honest:
            thread.join(2 * PATIENCE)
            if thread.is_alive():
                failed.append("the honest client is not answered any more")
        told: dict[str, Any] = {"findings": [], "whole": [0, 0]}
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            stdout = process.stdout.readline()
            told = json.loads(stdout)
        except (OSError, ValueError):
            failed.append(f"the bridges' process has ended with {process.wait(PATIENCE)}")
        told["findings"] += failed
        if not all(told["whole"]):
            told["findings"].append("no honest episode has come to its end")
        return told | {"sent": sent, "answered": answered, "rounds": round_}, "".join(log)
    finally:
        process.kill()
        process.wait()
        reader.join(5.0)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def main(argv: list[str] | None = None) -> int:
    """Attack for a time and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.bridge", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="that of a former run, to repeat it")
    parser.add_argument("--be-the-bridges", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.be_the_bridges:
        return _serve()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"bridge: seed {seed}", flush=True)
    told, log = attack(options.seconds, seed)
    findings = told.pop("findings")
    print("bridge:", ", ".join(f"{name} {value}" for name, value in told.items()))
    for finding in findings:
        print(f"bridge: FINDING: {finding}")
    if findings:
        surprise = log.find(" was not taken: ")  # with its traceback
        if surprise >= 0:
            print(log[max(surprise - 500, 0) : surprise + 20_000], "...", file=sys.stderr)
        print(log[-20_000:], file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
