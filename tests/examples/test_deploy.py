"""The files of `examples/deploy` name what there is."""

from __future__ import annotations

import json
import os
import re

import gymnasium

import envbus
from envbus.runner import ExternalEnvBridge
from envbus.runner.monitoring.exporter import metrics_of
from envbus.runner.monitoring.figures import PartFigures, RunFigures
from envbus.runner.monitoring.observer import Observed, Observer
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
        for metric in metrics_of([*runs, Observed(at_times, 1)])
        for sample in metric.samples
    }
    assert len(asked) > 10
    assert asked <= told
