from __future__ import annotations

import logging
from typing import Any

import pytest

from envbus.actors.env.renewal import RestartRequest
from envbus.actors.protocol import SlotError
from envbus.runner.engine.env_faults import FaultLog
from envbus.runner.errors import EnvError, Fault, FaultCause
from envbus.runner.workers.config import Hooks


def error_of(error: BaseException, env_id: int = 3) -> EnvError:
    kind = type(error)
    told = SlotError(
        slot=0,
        phase="step",
        type_module=kind.__module__,
        type_name=kind.__qualname__,
        message=str(error),
        traceback="Traceback ...",
    )
    return EnvError(told, env_id=env_id, actor="actor-1", incarnation=0)


def fault_of(error: BaseException | None = None, **changes: Any) -> Fault:
    raised = None if error is None else error_of(error)
    fields: dict[str, Any] = {
        "env_id": 3,
        "cause": FaultCause.CRASH if raised is None else raised.cause,
        "message": "it ended" if raised is None else raised.summary,
        "restarts": 0,
        "error": raised,
    }
    return Fault(**{**fields, **changes})


class Told:
    """All hooks, and what they were told in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.hooks = Hooks(
            on_fault=lambda fault: self.events.append(("fault", fault.env_id)),
            on_restart=lambda env_id, life: self.events.append(("restart", env_id, life)),
            on_give_up=lambda fault: self.events.append(("give up", fault.env_id)),
        )


def test_hooks_are_told_in_order_and_once() -> None:
    told = Told()
    log = FaultLog(told.hooks)
    log.fault(fault_of())
    log.restarted(3, 1)
    log.fault(fault_of(given_up=True))
    assert told.events == []
    assert log.untold
    log.tell()
    assert told.events == [("fault", 3), ("restart", 3, 1), ("fault", 3), ("give up", 3)]
    assert not log.untold
    log.tell()
    assert len(told.events) == 4


def test_without_hooks_there_is_nothing_to_tell() -> None:
    log = FaultLog(None)
    log.fault(fault_of())
    log.restarted(3, 1)
    assert not log.untold
    log.tell()


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_hook_raises_comes_out_and_the_next_hooks_are_told_later(
    error: BaseException,
) -> None:
    def fail(_: Fault) -> None:
        raise error

    restarts: list[int] = []
    log = FaultLog(Hooks(on_fault=fail, on_restart=lambda env_id, _: restarts.append(env_id)))
    log.fault(fault_of())
    log.restarted(3, 1)
    with pytest.raises(type(error)):
        log.tell()
    assert restarts == []
    log.tell()
    assert restarts == [3]


def test_a_hook_that_raises_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(Hooks(on_restart=lambda *_: 1 / 0))
    log.restarted(0, 1)
    with pytest.raises(ZeroDivisionError):
        log.tell()
    assert "the hook on_restart raised" in caplog.text


@pytest.mark.parametrize(
    ("error", "level"),
    [(ValueError("boom"), logging.WARNING), (RestartRequest("please"), logging.INFO)],
)
def test_an_envs_error_is_logged_once_and_a_request_quietly(
    caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    with caplog.at_level(logging.DEBUG):
        FaultLog(None).fault(fault_of(error))
    (record,) = caplog.records
    assert record.levelno == level
    assert str(error) in record.getMessage()
    cause = "error" if level == logging.WARNING else "request"
    assert vars(record).items() >= {"env": 3, "actor": "actor-1", "cause": cause}.items()


def test_an_actors_end_is_logged_where_it_is_noticed_and_not_per_env(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        FaultLog(None).fault(fault_of())
    assert caplog.records == []


def test_giving_up_is_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    FaultLog(None).fault(fault_of(ValueError("boom"), given_up=True))
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "env 3 is given up" in caplog.text


def test_faults_are_counted_by_cause() -> None:
    log = FaultLog(None)
    assert log.counts() == {}
    for cause in (FaultCause.CRASH, FaultCause.ERROR, FaultCause.CRASH):
        log.fault(fault_of(cause=cause))
    assert log.counts() == {"crash": 2, "error": 1}
