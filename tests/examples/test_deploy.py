"""The files of `examples/deploy` name what there is."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
from typing import Any

import gymnasium
import pytest
from typer.main import get_command

import envbus
from envbus.runner import ExternalEnvBridge
from envbus.runner.cli.main import app
from envbus.runner.monitoring.exporter import metrics_of
from envbus.runner.monitoring.figures import PartFigures, RunFigures
from envbus.runner.monitoring.observer import ObservedRun, Observer
from envbus.runner.serving.loading import policy_maker
from envbus.runner.serving.server import PolicyServer
from tests.sources import ROOT

DEPLOY = ROOT / "examples" / "deploy"
#: What is counted when it occurs only.
AT_TIMES = PartFigures(name="s", kind="s", counts={"errors.policy": 1.0})


def test_the_dashboard_draws_figures_that_there_are() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"envbus_\w+", " ".join(drawn)))
    spaces = gymnasium.spaces.Box(-1.0, 1.0, (2,)), gymnasium.spaces.Discrete(2)
    with envbus.make_vec("CartPole-v1", 2, num_actors=1), ExternalEnvBridge(*spaces) as bridge:
        server = PolicyServer(bridge, policy_maker("random"))
        observer = Observer(os.getpid())
        observer.look()
        runs = observer.look()
        del server
    at_times = RunFigures(pid=1, at=0.0, began=0.0, command="", version="", parts=[AT_TIMES])
    told = {
        sample.name
        for metric in metrics_of([*runs, ObservedRun(at_times, 1)])
        for sample in metric.samples
    }
    assert len(asked) > 10
    assert asked <= told


def served_with(name: str) -> list[str]:
    """Return the words behind `envbus serve` in a file."""
    text = (DEPLOY / name).read_text("utf-8").replace("\\\n", " ")
    if name == "Containerfile":
        (entry,), (rest,) = (
            re.findall(rf"^{at} (\[.*\])$", text, re.M) for at in ("ENTRYPOINT", "CMD")
        )
        words = json.loads(entry) + json.loads(rest)
    else:
        words = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.M)[0])
    assert [os.path.basename(words[0]), words[1]] == ["envbus", "serve"]
    return list(words[2:])


@pytest.mark.parametrize("name", ["Containerfile", "envbus-serve.service"])
def test_a_server_is_started_with_options_that_there_are(name: str) -> None:
    program: Any = get_command(app)
    serve = program.commands["serve"]
    words = served_with(name)
    params = serve.make_context("serve", list(words), resilient_parsing=False).params
    assert params["policy"].endswith(".onnx")
    assert params["reload"]
    assert all(params[name] for name in ("token_file", "tls_cert", "tls_key"))
    text = (DEPLOY / name).read_text("utf-8")
    if name == "Containerfile":
        ports = {place.rpartition(":")[2] for place in words if re.fullmatch(r".*:\d+", place)}
        assert set(re.findall(r"^EXPOSE (.*)$", text, re.M)[0].split()) == ports
        assert f"http://127.0.0.1:{params['metrics'].rpartition(':')[2]}/healthz" in text


def test_the_unit_reloads_by_a_signal_and_waits_for_episodes_to_end() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(DEPLOY / "envbus-serve.service")
    service = unit["Service"]
    assert service["execreload"].endswith("kill -HUP $MAINPID")
    assert service["restartforceexitstatus"] == "SIGHUP"  # one that came too early ended it
    words = served_with("envbus-serve.service")
    drain = float(words[words.index("--drain-timeout") + 1])
    assert float(service["timeoutstopsec"]) > drain
