"""Loads models anew beside those that answer: in a thread, one after the other, and tried.

Leaves out what is loaded (`loading.py`), and what becomes of it (`server.py`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gymnasium import Space

from envbus.actors.external.agreement import Agreement
from envbus.bus.errors import ConfigError
from envbus.runner.serving.answering import Chooser, ObservingAgent
from envbus.runner.serving.loading import Maker, ServedPolicies, load_policies

__all__ = ["LoadedModel", "ModelLoader", "try_out"]

#: Of an episode that there is not.
_TRIAL: Final = ""

Spaces = tuple[Space[Any], Space[Any]]


class LoadedModel(NamedTuple):
    """What has come of a load."""

    name: str
    #: For which it was made.
    spaces: Spaces
    #: None: it failed.
    policies: ServedPolicies | None
    error: BaseException | None


class ModelLoader:
    """Loads while others answer. One thread asks; what is done is taken by it, too.

    The thread lasts as long as the process: what a model starts may end with its thread.

    Args:
        load: Makes the policies, and tries them; called in the thread.
    """

    def __init__(self, load: Callable[[Maker, Spaces], ServedPolicies] | None = None) -> None:
        self._load = load or load_and_try
        self._asked: queue.SimpleQueue[tuple[str, Maker, Spaces]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[LoadedModel] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Those that are being loaded; True: once more after that.
        self._loading: dict[str, tuple[Maker, Spaces] | None] = {}

    def ask(self, name: str, make: Maker, spaces: Spaces) -> None:
        """Load a model; one that is being loaded is loaded once more after that."""
        if name in self._loading:
            self._loading[name] = make, spaces
            return
        self._loading[name] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="envbus models", daemon=True)
            self._thread.start()
        self._asked.put((name, make, spaces))

    def take(self) -> LoadedModel | None:
        """Return what is done, one at a time; None: nothing is."""
        if not self._loading:
            return None
        try:
            done = self._done.get_nowait()
        except queue.Empty:
            return None
        again = self._loading.pop(done.name)
        if again is not None:
            self.ask(done.name, *again)
        return done

    def _run(self) -> None:
        while True:
            name, make, spaces = self._asked.get()
            try:
                done = LoadedModel(name, spaces, self._load(make, spaces), None)
            except BaseException as exc:  # `sys.exit()` too would end the thread, and all loads
                done = LoadedModel(name, spaces, None, exc)
            self._done.put(done)
            del make, done  # a model lives no longer than it is used


def load_and_try(make: Maker, spaces: Spaces) -> ServedPolicies:
    """Return policies that fit the spaces, of which each has answered an observation."""
    policies = load_policies(make, *spaces)
    try_out(policies)
    return policies


def try_out(policies: ServedPolicies) -> None:
    """Ask each policy about an observation, and see whether clients could be sent its action.

    Raises:
        ConfigError: They could not.
    """
    chooser = Chooser(policies, explore=False)
    firsts: dict[str, Any] = {}
    for agent, policy_id in policies.policy_of.items():
        firsts.setdefault(policy_id, agent)
    asked = [
        ObservingAgent(_TRIAL, agent, policies.spaces[agent][0].sample())
        for agent in firsts.values()
    ]
    for batch in chooser.choose(asked):
        if batch.error is not None:
            raise ConfigError(
                f"the policy cannot answer an observation: {type(batch.error).__name__}: "
                f"{batch.error}"
            ) from batch.error
        for index, one in enumerate(batch.rows):
            agreement = Agreement(*policies.spaces[one.agent])
            try:
                agreement.take_action(batch.action(index), "its action")
            except Exception as exc:
                raise ConfigError(f"the policy's action cannot be sent: {exc}") from exc
