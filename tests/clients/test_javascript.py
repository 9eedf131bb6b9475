"""The JavaScript client in Node, against a live bridge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.clients.serving import CLIENTS, Serving

NODE = shutil.which("node")
FOLDER = CLIENTS / "javascript"
CHECKS = Path(__file__).parent / "javascript" / "checks.mjs"

pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed (apt install nodejs)")


def check(serving: Serving, what: str, url: str, token: str = "", **options: object) -> str:
    command = (str(NODE), CHECKS, FOLDER.as_uri(), url, what, token)
    return serving.run(*command, **options)  # type: ignore[arg-type]


def test_the_verbs_and_errors_of_one_agent() -> None:
    with Serving() as serving:
        check(serving, "single", serving.tcp)
        assert serving.rewards["own"] == pytest.approx(3.25)
        assert serving.ended["own"] == "terminated"
        assert serving.ended["cut"] == "truncated"
        assert serving.untrained == {"cut"}
        assert serving.off_policy["own"] == [{"agent0": 1}]
        assert serving.infos["own"] == [
            {"agent0": {"level": "é", "lives": [3, -70000, 2**40, None, True]}}
        ]
        assert len(serving.ended) == 22


def test_several_agents_are_objects_by_agent() -> None:
    with Serving(agents=["left", "right"]) as serving:
        check(serving, "agents", serving.tcp)
        assert serving.rewards["team"] == 7.0
        assert serving.infos["team"] == [{"left": {"hit": True}}]


def test_an_episode_survives_the_death_of_the_gateway() -> None:
    with Serving() as serving:

        def kill(line: str) -> None:
            if line == "ready":
                os.kill(serving.gateway.pid, signal.SIGKILL)

        check(serving, "reconnect", serving.tcp, on_line=kill)
        assert serving.rewards["survivor"] == 3.0
        assert serving.ended["survivor"] == "terminated"


def test_a_token_lets_in_and_nothing_else_does() -> None:
    with Serving(token="secret") as serving:
        check(serving, "refused", serving.tcp)
        check(
            serving, "agents" if serving.bridge.is_multi_agent else "single", serving.tcp, "secret"
        )


def test_its_messagepack_reads_what_it_writes() -> None:
    command = [str(NODE), str(CHECKS), FOLDER.as_uri(), "", "messagePack"]
    subprocess.run(command, timeout=60, check=True)


def test_the_cartpole_in_node_is_played_by_the_policy() -> None:
    with Serving() as serving:
        text = serving.run(str(NODE), FOLDER / "cartpole_node.mjs", serving.tcp, "3")
        steps = [int(n) for n in re.findall(r"episode \d: (\d+) steps", text)]
        assert len(steps) == 3
        assert min(steps) > 100
        assert sorted(serving.rewards.values()) == sorted(map(float, steps))
