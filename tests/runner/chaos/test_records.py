from __future__ import annotations

from pathlib import Path

import numpy as np

from envbus.runner.chaos.audit import Delivered, EnvRecord, Faulty, Sent
from envbus.runner.chaos.records import DriverJournal, Ledger, read_journal, read_ledger


def test_a_ledger_goes_on_over_all_lives_of_its_env(tmp_path: Path) -> None:
    for life in (2**60 - 1, 7):
        ledger = Ledger(str(tmp_path), 4)
        ledger.write(life, 1, 0)
        ledger.close()
    assert read_ledger(tmp_path, 4) == [EnvRecord(2**60 - 1, 1, 0), EnvRecord(7, 1, 0)]
    assert read_ledger(tmp_path, 5) == []


def test_a_journal_gives_each_env_its_events_in_order(tmp_path: Path) -> None:
    journal = DriverJournal(tmp_path)
    ids = np.array([1, 0])
    journal.sent(ids, np.array([10, 11]))
    journal.faulty(1, 2)
    journal.delivered(
        ids,
        np.array([[1, 5, 6, 10, 99], [0, 7, 8, 11, 99]]),
        np.array([3, 0]),
        np.array([4.0, 9.0]),
        np.array([True, False]),
        np.array([-1, 11]),
    )
    journal.close()
    assert read_journal(tmp_path, 3) == [
        [Sent(11), Delivered(0, 7, 8, 11, 0, 9, False, 11)],
        [Sent(10), Faulty(2), Delivered(1, 5, 6, 10, 3, 4, True, -1)],
        [],
    ]


def test_a_long_journal_is_complete(tmp_path: Path) -> None:
    journal = DriverJournal(tmp_path)
    for nonce in range(10_000):
        journal.sent(np.array([0]), np.array([nonce]))
    journal.close()
    assert read_journal(tmp_path, 1) == [[Sent(nonce) for nonce in range(10_000)]]
