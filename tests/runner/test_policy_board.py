from __future__ import annotations

from pathlib import Path

from envbus.runner.policy_board import Board, BoardEntry, read_board, write_board


def entry(state: str, reason: str = "") -> BoardEntry:
    return BoardEntry(name=f"w-{state}", incarnation=1, state=state, reason=reason)


def test_a_board_that_was_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    assert read_board(tmp_path / "gone") is None
    for board in (Board(workers=[entry("up")]), Board(workers=[entry("down", "it ended")])):
        write_board(tmp_path, board)
        assert read_board(tmp_path) == board
    assert len(list(tmp_path.iterdir())) == 1


def test_it_says_who_is_missing_and_why() -> None:
    board = Board(workers=[entry("up"), entry("lost", "signal SIGKILL"), entry("starting")])
    assert not board.is_hopeless()
    assert board.describe() == "w-lost: signal SIGKILL; w-starting: starting"
    assert Board(workers=[entry("lost"), entry("lost")]).is_hopeless()
