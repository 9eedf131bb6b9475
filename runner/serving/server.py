"""`PolicyServer`: the loop that answers simulators with policies and trains nothing.

Leaves out how it looks to people (`cli/serve_table.py`) and what the command line says
(`cli/serve.py`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from gymnasium import Space

from envbus.actors.external.agreement import element_cost
from envbus.actors.external.errors import SpaceMismatchError
from envbus.bus.complaints import Complaints
from envbus.runner.batches.batch import MultiAgentBatch
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult, acting
from envbus.runner.bridge.vocabulary import BridgeStatistics, ClientIdentity, RequestNote
from envbus.runner.monitoring.figures import PartFigures
from envbus.runner.monitoring.registry import show
from envbus.runner.serving.answering import ObservingAgent, Recording
from envbus.runner.serving.audit import AuditEntry, AuditLog
from envbus.runner.serving.canary import Split
from envbus.runner.serving.loading import Maker, load_policies
from envbus.runner.serving.models import ModelCounts, ServedModels
from envbus.runner.serving.reloading import LoadedModel, ModelLoader

__all__ = ["PolicyServer", "Snapshot"]

logger = logging.getLogger("envbus.runner.serving")

#: Name of a model that has no other beside it.
_SOLE = "policy"
#: Where a word begins in the name of a payload.
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_WHAT = {
    "policy": "the policy raised",
    "action": "the policy's action was not sent",
    "recording": "an episode was not recorded",
}
#: What the actions that are chosen at one time may cost (`element_cost`), so that a client's
#: thousand requests for large ones neither fill memory nor keep all else waiting. 60,000 small
#: ones are within it.
_MAX_COST = 2**24


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a server since its start."""

    seconds: float
    bridge: BridgeStatistics
    #: Episodes with rows in the folder.
    recorded: int
    recorded_rows: int
    #: Calls of policies, and rows in them.
    batches: int
    rows: int
    largest_batch: int
    #: Errors by kind: "policy", "action", "refused", "time-out", "recording", "audit". Those that
    #: occurred.
    errors: dict[str, int]
    #: Of actions, by bucket; for `LatencyHistogram.add_counts`.
    latency: dict[int, int]
    #: By name.
    models: dict[str, ModelCounts] = {}


class PolicyServer:
    """Answers the episodes of a bridge, many in one call of a policy.

    A policy that raises is no end: it is asked row by row, and the clients for whose observations
    it raises again are told, and ask again or not. Where it was raised stands in the log only.

    Args:
        bridge: It stays its owner's. With `writer`, made with `confirm_ends=True`: clients are
            told that an episode has ended when it stands in the folder.
        make: Makes the policies, as soon as the spaces are known, and each time that they are
            loaded anew; by name, where there are several models.
        split: Which episode has which of them; None: there is one.
        writer: An `EpisodeWriter`, or nothing is recorded.
        audit: Is told who asks what; None: nobody is.
        explore: Whether actions are sampled, instead of the best ones.

    Raises:
        ConfigError: The policies do not fit the bridge's spaces. Where a client tells them, it is
            refused if they do not, and others may come.
    """

    def __init__(
        self,
        bridge: ExternalEnvBridge,
        make: Maker | Mapping[str, Maker],
        *,
        split: Split | None = None,
        writer: Any = None,
        audit: AuditLog | None = None,
        explore: bool = False,
    ) -> None:
        self._bridge = bridge
        split = split or Split(_SOLE)
        self._makers = dict(make) if isinstance(make, Mapping) else {split.names[0]: make}
        assert self._makers.keys() == set(split.names), "a model and its share have one name"
        self._writer = writer
        self._audit = audit
        if audit is not None:
            bridge.watch_requests(self._note)
        self._models = ServedModels(split, explore=explore)
        self._loader = ModelLoader()
        #: For which the models were made.
        self._spaces: tuple[Space[Any], Space[Any]] | None = None
        self._max_episodes: int | None = None
        self._recording: Recording | None = None
        self._began = time.monotonic()
        self._counts = {"batches": 0, "rows": 0, "largest_batch": 0}
        self._complaints = Complaints(logger)
        self._draining = False
        observation_space, action_space = bridge.observation_space, bridge.action_space
        if observation_space is not None and action_space is not None:
            self._load(observation_space, action_space)
        else:
            bridge.use_spaces(self._load)
        show(self, type(self).__name__)

    def serve(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for episodes to have something, and answer those.

        Raises:
            RestartLimitError: The bridge's gateway died too often.
        """
        result = self._bridge.poll(timeout, max_envs=self._max_episodes)
        while (loaded := self._loader.take()) is not None:
            self._take_over(loaded)
        if not result.observations and not result.ended:
            return
        if self._recording is not None:
            ended = self._recording.take(result)
            if result.ended:
                self._write(ended)
        self._act(result)

    def reload(self, *names: str) -> None:
        """Load models anew, as their makers make them, while those that are there answer.

        Those of these names; all, if none is given.

        Each is tried, and takes over between two batches. One that cannot be loaded, or cannot
        answer, is logged, and the one before goes on.
        """
        if self._spaces is None:
            logger.info("models are loaded when the first client tells its spaces")
            return
        for name in names or self._makers:
            self._loader.ask(name, self._makers[name], self._spaces)

    def drain(self) -> None:
        """Let no more episodes begin; those that run are answered while `serve` is called."""
        self._draining = True
        self._bridge.drain()

    @property
    def is_drained(self) -> bool:
        """Whether nothing runs any more after `drain`."""
        if not self._draining:
            return False
        now = self._bridge.statistics()
        return not (now.episodes_now or now.ready_now or now.unconfirmed_now)

    def snapshot(self) -> Snapshot:
        """Return the counts so far."""
        bridge = self._bridge.statistics()
        errors = {
            **self._complaints.counts,
            "refused": bridge.refused + bridge.surprises,
            "time-out": bridge.timeouts,
            "audit": 0 if self._audit is None else self._audit.lost,
        }
        return Snapshot(
            seconds=time.monotonic() - self._began,
            bridge=bridge,
            recorded=0 if self._writer is None else self._writer.num_episodes,
            recorded_rows=0 if self._writer is None else self._writer.num_rows,
            errors={kind: count for kind, count in errors.items() if count},
            latency=self._bridge.latency.counts(),
            models=self._models.counts(),
            **self._counts,
        )

    def figures(self, name: str) -> PartFigures:
        """Return what a window shows; called by another thread than serves."""
        now = self.snapshot()
        counts: dict[str, float] = {
            "batches": now.batches,
            "rows": now.rows,
            "recorded": now.recorded,
            "recorded_rows": now.recorded_rows,
            **{f"errors.{kind}": count for kind, count in now.errors.items()},
        }
        levels: dict[str, float] = {"largest_batch": now.largest_batch}
        for model, told in now.models.items():
            counts[f"answers.{model}"] = told.answers
            counts[f"model_loads.{model}"] = told.loads
            counts[f"model_load_failures.{model}"] = told.failed_loads
            levels[f"model_version.{model}"] = told.version
        return PartFigures(name=name, kind=type(self).__name__, counts=counts, levels=levels)

    # --- private ------------------------------------------------------------------------------

    def _load(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        loaded = {
            name: load_policies(make, observation_space, action_space)
            for name, make in self._makers.items()
        }
        self._models.install(loaded)
        self._spaces = observation_space, action_space
        if self._writer is not None:
            self._recording = Recording(loaded[self._models.names[0]])
        self._bridge.policy_ids = self._models.policy_ids
        self._max_episodes = max(_MAX_COST // element_cost(action_space), 1)

    def _take_over(self, loaded: LoadedModel) -> None:
        name, error = loaded.name, loaded.error
        if error is not None:
            self._models.failed(name)
            text = f"{type(error).__name__}: {error}"
            logger.warning("%s was not loaded, and the one before goes on: %s", name, text)
        elif loaded.policies is not None and loaded.spaces is self._spaces:  # else: too late
            self._models.install({name: loaded.policies})
            logger.info("%s was loaded: version %d", name, self._models.counts()[name].version)

    def _act(self, result: BridgeResult) -> None:
        models, bridge = self._models, self._bridge
        ended, off_policy = set(result.ended), result.off_policy_actions
        asked: list[ObservingAgent] = []
        actions: dict[str, dict[Any, Any]] = {}
        for episode_id, observations in result.observations.items():
            if episode_id in ended:
                continue
            if episode_id in off_policy:
                if not models.has_state(episode_id):
                    continue  # else it is asked for the sake of its state
            else:
                actions[episode_id] = {}
            agents = acting(
                observations, result.terminateds[episode_id], result.truncateds[episode_id]
            )
            asked += [ObservingAgent(episode_id, agent, observations[agent]) for agent in agents]
        failed: dict[str, Exception] = {}
        versions: dict[str, int] = {}
        names: dict[str, str] = {}
        for batch in models.choose(asked):
            counts, rows = self._counts, len(batch.rows)
            counts["batches"] += 1
            counts["rows"] += rows
            counts["largest_batch"] = max(counts["largest_batch"], rows)
            if batch.error is not None:
                failed.update((one.episode_id, batch.error) for one in batch.rows)
                self._complain("policy", batch.error)
                continue
            for index, one in enumerate(batch.rows):
                names[one.episode_id] = batch.model
                version = versions.get(one.episode_id, batch.version)
                versions[one.episode_id] = max(version, batch.version)
                if one.episode_id in actions:
                    actions[one.episode_id][one.agent] = batch.action(index)
            if self._recording is not None:
                self._recording.acted(batch, off_policy)
        for episode_id in failed:
            actions.pop(episode_id, None)
        if self._audit is not None:
            self._audit.write(
                self._chosen(i, names.get(i, ""), versions.get(i), failed.get(i))
                for i in (*actions, *failed)
            )
        by_version: dict[int, dict[str, dict[Any, Any]]] = {}
        for episode_id, own in actions.items():  # of some no agent is to act
            by_version.setdefault(versions.get(episode_id, 0), {})[episode_id] = own
        for version, of_version in by_version.items():
            try:
                bridge.send_actions(of_version, policy_version=version)
            except SpaceMismatchError as exc:
                self._complain("action", exc)
        for episode_id, error in failed.items():
            bridge.fail([episode_id], error, traceback=False)
        for episode_id in result.ended:
            models.forget(episode_id)

    def _write(self, ended: dict[str, MultiAgentBatch | Exception | None]) -> None:
        """Have episodes in the folder, then tell their clients that they have ended."""
        for episode_id, batch in ended.items():
            error = batch if isinstance(batch, Exception) else None
            if isinstance(batch, MultiAgentBatch):
                try:
                    self._writer.write(batch)
                except Exception as exc:  # a full disk, for example
                    error = exc
            if error is not None:
                self._complain("recording", error)
            self._bridge.confirm([episode_id], error, traceback=False)

    def _note(self, note: RequestNote) -> None:
        """A client has asked for something. Of actions is told when they are chosen."""
        assert self._audit is not None
        verb = _WORD.sub("_", note.verb).lower()
        if note.error or verb != "get_action":
            entry = AuditEntry(
                client=note.client, verb=verb, episode=note.episode_id, error=note.error
            )
            self._audit.write([entry])

    def _chosen(
        self, episode_id: str, model: str, version: int | None, error: Exception | None
    ) -> AuditEntry:
        return AuditEntry(
            client=self._bridge.client_of(episode_id) or ClientIdentity(""),
            verb="get_action",
            episode=episode_id,
            policy=model,
            version=version,
            error="" if error is None else type(error).__name__,
        )

    def _complain(self, kind: str, error: Exception) -> None:
        text = f"{_WHAT[kind]}: {type(error).__name__}: {error}"
        self._complaints.add(kind, text, error if kind == "policy" else None)
