from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.bridge.vocabulary import ClientIdentity
from envbus.runner.serving.audit import AuditEntry, AuditLog

ALICE = ClientIdentity("sim-1", "alice", "10.0.0.1:5000")


def entry(**fields: Any) -> AuditEntry:
    return AuditEntry(**{"client": ALICE, "verb": "get_action", **fields})


def lines(data: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def test_a_line_says_when_who_asked_what_and_which_model_answered(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "log", clock=lambda: 1e9) as log:
        log.write([entry(episode="e", policy="m.onnx", version=3)])
        began = AuditEntry(client=ClientIdentity("sim"), verb="start_episode")
        log.write([began, entry(error="no")])
        log.write([])
        assert lines((tmp_path / "log").read_text()) == [
            {
                "time": "2001-09-09T01:46:40.000+00:00",
                "client": "sim-1",
                "user": "alice",
                "address": "10.0.0.1:5000",
                "verb": "get_action",
                "episode": "e",
                "policy": "m.onnx",
                "version": 3,
            },
            {"time": "2001-09-09T01:46:40.000+00:00", "client": "sim", "verb": "start_episode"},
            {
                "time": "2001-09-09T01:46:40.000+00:00",
                "client": "sim-1",
                "user": "alice",
                "address": "10.0.0.1:5000",
                "verb": "get_action",
                "error": "no",
            },
        ]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_what_clients_chose_can_neither_begin_a_line_nor_fill_the_disk(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "log") as log:
        log.write([entry(episode='e"\n{"verb": "x"}\ud800' + "x" * 10_000)])
    (line,) = lines((tmp_path / "log").read_text("utf-8"))
    assert line["verb"] == "get_action"
    assert len(line["episode"]) < 400


def test_a_log_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with AuditLog(file) as log:
        log.write([entry(episode="a")])
        file.rename(tmp_path / "log.1")
        log.write([entry(episode="b")])
        log.reopen()
        log.write([entry(episode="c")])
        file.unlink()
        file.mkdir()
        with pytest.raises(ConfigError, match="cannot be opened"):
            log.reopen()
        log.write([entry(episode="d")])  # to the former one
        assert log.lost == 0
    assert [line["episode"] for line in lines((tmp_path / "log.1").read_text())] == ["a", "b"]


def test_a_full_disk_is_counted_and_complained_of_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with AuditLog(Path("/dev/full")) as log:
        for _ in range(5):
            log.write([entry(), entry()])
        assert log.lost == 10
    assert caplog.text.count("lacks entries") == 1
    assert "No space left" in caplog.text


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="cannot be opened"):  # nobody reads
        AuditLog(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with AuditLog(pipe) as log:
            log.write(entry(episode=f"{number}") for number in range(10_000))
            assert log.lost > 0
            first = os.read(reading, 1 << 20)
            log.write([entry(episode="last")])
            whole = (first + os.read(reading, 1 << 20)).decode().splitlines()
    finally:
        os.close(reading)
    assert json.loads(whole[-1])["episode"] == "last"
    with pytest.raises(json.JSONDecodeError):
        json.loads(whole[-2])
    assert len(whole) - 2 + log.lost == 10_000


@pytest.mark.parametrize("again", ["reopened", "another log"])
def test_a_line_that_a_full_disk_has_cut_off_spoils_none_of_whoever_writes_on(
    tmp_path: Path, again: str
) -> None:
    file = tmp_path / "log"
    with AuditLog(file) as log:
        log.write([entry(episode="a")])
        with file.open("ab") as whole:
            whole.write(b'{"time":"2026-')  # there was no more room
        if again == "reopened":
            log.reopen()
            log.write([entry(episode="b")])
    if again == "another log":
        with AuditLog(file) as log:
            log.write([entry(episode="b")])
    first, torn, last = file.read_text().splitlines()
    assert [json.loads(line)["episode"] for line in (first, last)] == ["a", "b"]
    assert torn == '{"time":"2026-'
