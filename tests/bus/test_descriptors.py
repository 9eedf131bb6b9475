from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from subprocess import PIPE

import pytest
from gymnasium.spaces import Discrete

from envbus.bus.descriptors import descriptors_advice, opening
from envbus.bus.errors import StartError, TransportError
from envbus.runner import ExternalEnvBridge

#: What takes descriptors, by what it is; each is made and ended once before.
MAKERS = {
    "pool": "ActorPool(['CartPole-v1']).close()",
    "group": "EnvRunnerGroup(1, ['CartPole-v1'], RandomPolicy(Discrete(2))).stop()",
    "policy workers": "PolicyWorkers(lambda: RandomPolicy(Discrete(2))).close()",
    "hosting": "host('process')",
    "hosting in threads": "host('thread')",
    "client": "ExternalEnvClient(address).close()",
    "vector env": "BusVectorEnv(['CartPole-v1'] * 2).close()",
    "bridge": "ExternalEnvBridge(Discrete(2), Discrete(2)).stop()",
    "gateway": "bridge_for_all().stop()",
}
PROGRAM = """
import os, resource, sys, threading
from gymnasium.spaces import Discrete
from envbus.actors import ExternalEnv, ExternalEnvClient
from envbus.bus.errors import StartError, TransportError
from envbus.bus.gateway import GatewayConfig
from envbus.runner import ActorPool, BusVectorEnv, EnvRunnerGroup, ExternalEnvBridge, PolicyWorkers
from envbus.runner.policies import RandomPolicy

class Waiting(ExternalEnv):
    def __init__(self):
        super().__init__(Discrete(2), Discrete(2))

    def run(self):
        threading.Event().wait()

def host(where):
    with ExternalEnvBridge() as bridge:
        bridge.host(Waiting, where=where)

def bridge_for_all():
    return ExternalEnvBridge(gateway=GatewayConfig(tcp=('127.0.0.1:0',)))

address = sys.argv[1]
{made}
allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
lowest = os.dup(0)
for free in range(64):
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, most))
    try:
        {made}
        print("made")
        break
    except (StartError, TransportError) as error:
        print("`ulimit -n`" in str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
print(flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", MAKERS)
def test_what_finds_too_few_descriptors_says_what_to_do(what: str) -> None:
    program = PROGRAM.format(made=MAKERS[what])
    with ExternalEnvBridge(Discrete(2), Discrete(2)) as bridge:  # here it has descriptors
        command = [sys.executable, "-c", program, bridge.address]
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
            deadline = time.monotonic() + 200
            while process.poll() is None and time.monotonic() < deadline:
                bridge.poll(0.1)
            process.kill()
            told, errors = process.communicate()
    assert told.split()[-1:] == ["made"], errors
    assert set(told.split()[:-1]) == {"True"}


def test_advice_says_how_many_are_needed_where_that_is_known() -> None:
    assert "Allow 70 at least: `ulimit -n`" in descriptors_advice(70)
    assert "Allow more: `ulimit -n`" in descriptors_advice()


def test_only_who_has_too_many_open_files_is_advised_to_allow_more() -> None:
    with (
        pytest.raises(StartError, match=r"env-3 cannot be started: .*`ulimit -n`"),
        opening("env-3 cannot be started", StartError),
    ):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with pytest.raises(TransportError) as caught, opening("no socket can be made"):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    assert "ulimit" not in str(caught.value)
