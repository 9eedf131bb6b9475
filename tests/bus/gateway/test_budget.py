from __future__ import annotations

from envbus.bus.codec import encode
from envbus.bus.gateway.budget import Budget
from envbus.bus.headers import decode_header, encode_header
from envbus.bus.messages import Failed, FailureCode, Header, Kind
from envbus.bus.transport import Frames


def answer(mark: Frames) -> Frames:
    header = Header(1, Kind.FAILURE, decode_header(mark[0]).request_id, Failed.__name__)
    return [encode_header(header), *encode(Failed(code=FailureCode.NO_PEER, message=""))]


def test_what_came_before_an_answered_mark_was_taken() -> None:
    budget = Budget(100, 2**62)
    budget.add([b"header", bytes(43)])
    assert not budget.wants_mark(0.0)
    budget.add([b"header"])
    assert budget.wants_mark(0.0)
    budget.mark(0.0)
    budget.unmark()  # there was no room
    assert budget.wants_mark(0.0)
    mark = budget.mark(0.0)
    assert not budget.wants_mark(0.0)
    budget.add([bytes(60)])
    assert budget.is_full
    assert not budget.takes([encode_header(Header(1, Kind.FAILURE, 1, "Failed")), b""])
    assert not budget.takes([b"nonsense"])
    assert budget.takes(answer(mark))
    assert not budget.is_full
    assert budget.wants_mark(0.0)  # for those behind it
    assert not budget.takes(answer(mark))


def test_a_mark_that_is_lost_is_followed_by_another_one() -> None:
    budget = Budget(100, 2**62)
    budget.add([bytes(100)])
    lost = budget.mark(0.0)
    assert not budget.wants_mark(5.0)
    assert budget.wants_mark(5.1)
    found = budget.mark(5.1)
    assert budget.takes(answer(lost))  # late: it is no news
    assert budget.is_full
    assert budget.takes(answer(found))
    assert not budget.is_full
