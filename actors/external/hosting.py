"""Running an `ExternalEnv`: connect it, call its `run`; and the entry of a process that does so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import cloudpickle

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.external.verbs import ClientTimeouts
from envbus.bus.errors import ConfigError, RequestTimeoutError
from envbus.bus.process.pipe import HANDOVER_TIMEOUT, Pipe
from envbus.bus.transport.curve_keys import Entrance

__all__ = ["ENTRY", "main", "run_env"]

#: What the fork server runs in the child.
ENTRY: Final = f"{__name__}:main"
#: A bridge of this host is there: what it does not answer for so long it is training. Seconds.
_PATIENCE: Final = 3600.0
#: Seconds between looks at whether the env is still wanted, while the bridge does not answer.
_CONNECT_SLICE: Final = 1.0


def run_env(
    env: ExternalEnv,
    entrance: Entrance,
    name: str,
    *,
    is_wanted: Callable[[], bool] = lambda: True,
    on_connected: Callable[[ExternalEnvClient], object] = lambda _: None,
) -> None:
    """Connect an env to a bridge, and run it to its end.

    Args:
        env: What to run.
        entrance: The bridge's.
        name: For people.
        is_wanted: Asked while the bridge does not answer.
        on_connected: Told of the client, which may be closed to end the env.

    Raises:
        Exception: What `run` raised, or why the bridge refuses the env.
    """
    timeouts = ClientTimeouts(connect=_CONNECT_SLICE, action=_PATIENCE, other=_PATIENCE)
    while is_wanted():
        try:
            client = ExternalEnvClient(
                entrance.endpoint,
                keys=entrance.keys,
                observation_space=env.observation_space,
                action_space=env.action_space,
                name=name,
                timeouts=timeouts,
            )
        except RequestTimeoutError:
            continue  # its owner does not poll yet
        with client:
            on_connected(client)
            env.bind(client)
            env.run()
        return


def main(pipe: Pipe) -> None:
    """Make and run the env that comes over the pipe; what it raises ends the process.

    Once it has connected, the identity of its client goes back.
    """
    entrance, name, make = cloudpickle.loads(pipe.receive(HANDOVER_TIMEOUT))
    env = make()
    if not isinstance(env, ExternalEnv):
        raise ConfigError(f"expected an ExternalEnv, got {env!r}")
    run_env(env, entrance, name, on_connected=lambda client: pipe.send(client.identity))
