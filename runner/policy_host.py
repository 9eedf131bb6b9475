"""Entry of a policy worker's process: build the policies, open the door, serve.

Policies come as factories, by cloudpickle over the inherited pipe, never over a socket.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import cloudpickle
import msgspec

from envbus.bus.errors import ConfigError, EnvbusError
from envbus.bus.pipe import Pipe
from envbus.bus.serve import describe
from envbus.runner.policies import FunctionPolicy, Policy, check_is_no_module
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_door import Door
from envbus.runner.policy_weights import HostedPolicies, HostedPolicy, Pushed
from envbus.runner.policy_worker import PolicyWorker

__all__ = ["BOOTSTRAP_PARCEL", "ENTRY", "PolicyBootstrap", "WorkerReport", "main", "read_report"]

#: What the fork server runs in the child.
ENTRY: Final = f"{__name__}:main"
#: Number of the first parcel on the pipe.
BOOTSTRAP_PARCEL: Final = 1
#: Seconds to wait for the owner's side of a hand-over that it has begun.
_HANDOVER_TIMEOUT: Final = 30.0


class PolicyBootstrap(NamedTuple):
    """All that a worker must know; it is pickled."""

    name: str
    worker_index: int
    incarnation: int
    door: str
    spin: bool
    batching: BatchingConfig
    #: By policy id, each pickled by cloudpickle.
    factories: Mapping[str, bytes]
    #: The latest `Pushed` of those policies that were given weights, each pickled.
    weights: list[bytes]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker to its owner: up, not come up, has looked at weights, or just alive."""

    up: bool = False
    #: Why it did not come up, or did not take over the weights; for people.
    problem: str = ""
    policy_id: str = ""
    push: int = 0


def main(pipe: Pipe) -> None:
    """Serve until the owner at the other end of `pipe` says to leave."""
    # Nobody else can reach the pipe.
    bootstrap = PolicyBootstrap(
        *pickle.loads(pipe.receive_bytes(BOOTSTRAP_PARCEL, _HANDOVER_TIMEOUT))  # noqa: S301
    )
    try:
        policies = _build(bootstrap)
    except Exception as exc:  # the border: factories are the user's
        failed = describe(exc)
        _report(pipe, WorkerReport(problem=f"{failed.remote_traceback}"))
        raise SystemExit(1) from exc
    door = Door(Path(bootstrap.door))
    hosted_policies = HostedPolicies(
        policies,
        pipe,
        BOOTSTRAP_PARCEL + 1,
        lambda policy_id, push, problem: _report(
            pipe, WorkerReport(policy_id=policy_id, push=push, problem=problem)
        ),
    )
    worker = PolicyWorker(
        bootstrap.name,
        bootstrap.incarnation,
        hosted_policies,
        bootstrap.batching,
        door,
        spin=bootstrap.spin,
    )
    _report(pipe, WorkerReport(up=True))
    try:
        worker.run()
    finally:
        for hosted in policies.values():
            close = getattr(hosted.policy, "close", None)
            if close is not None:
                close()


def read_report(data: bytes) -> WorkerReport:
    """Return what a worker has reported."""
    return msgspec.msgpack.decode(data, type=WorkerReport)


def _report(pipe: Pipe, report: WorkerReport) -> None:
    with contextlib.suppress(EnvbusError):  # the owner is gone, as this process is soon
        pipe.send_bytes(pipe.next_number(), msgspec.msgpack.encode(report))


def _build(bootstrap: PolicyBootstrap) -> dict[str, HostedPolicy]:
    policies: dict[str, HostedPolicy] = {}
    for policy_id, pickled in bootstrap.factories.items():
        factory = cloudpickle.loads(pickled)
        policies[policy_id] = HostedPolicy(_made_by(factory, policy_id, bootstrap.worker_index))
    for pickled in bootstrap.weights:
        pushed = Pushed(*pickle.loads(pickled))  # noqa: S301 (our own pipe)
        hosted = policies[pushed.policy_id]
        hosted.policy.set_weights(pushed.weights, pushed.version)
        hosted.push = pushed.push
    return policies


def _made_by(factory: Any, policy_id: str, index: int) -> Policy:
    if isinstance(factory, str):
        factory = _import(factory, policy_id)
    made = factory if _is_policy(factory) else _call(factory, index)
    if _is_policy(made):
        return cast("Policy", made)
    check_is_no_module(made, f"what the factory of policy {policy_id!r} returned")
    if callable(made):
        return FunctionPolicy(made)
    raise ConfigError(
        f"the factory of policy {policy_id!r} returned a {type(made).__name__}, which has no "
        "compute_actions and is no function"
    )


def _is_policy(thing: Any) -> bool:
    return not isinstance(thing, type) and hasattr(thing, "compute_actions")


def _call(factory: Any, index: int) -> Any:
    """Call a factory, with the worker's number if it takes an argument."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of a C function
        return factory()
    wanted = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return factory(index) if wanted else factory()


def _import(path: str, policy_id: str) -> Any:
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"policy {policy_id!r}: {path!r} is not 'module:factory'")
    target: Any = importlib.import_module(module_name)
    for part in name.split("."):
        target = getattr(target, part)
    return target
