from __future__ import annotations

import math
import select
import sys
import threading
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

import pytest

from envbus.bus import client as client_module
from envbus.bus.client import Cancelled, Orders, Telling
from envbus.bus.errors import ClosedError, OverloadedError
from envbus.bus.messages import Heartbeat
from envbus.bus.peer_session import Call


def question(request_id: int) -> Call:
    return Call(Heartbeat(), [b""], None, 0.0, math.inf, lambda _: None, "adder", request_id)


def asked(orders: Orders, request_id: int) -> Future[None]:
    """Submit a request; return the future of who asked."""
    orders.submit(question(request_id))
    future: Future[None] = Future()
    future.add_done_callback(partial(orders.on_done, request_id))
    return future


def rings(orders: Orders) -> bool:
    return bool(select.select([orders], [], [], 0)[0])


def test_orders_come_out_in_order_and_ring_once() -> None:
    orders = Orders(10)
    assert not rings(orders)
    assert not orders.take()
    first, telling, second = question(1), Telling("log", [b""]), question(2)
    for order in (first, telling, second):
        orders.submit(order)
    assert rings(orders)
    assert list(orders.take()) == [first, telling, second]
    assert not rings(orders)
    orders.end(ClosedError("over"))


def test_after_all_was_taken_nothing_rings_wherever_a_submitter_was_interrupted() -> None:
    orders = Orders(10)
    takers: list[threading.Thread] = []

    def take_meanwhile(frame: FrameType, event: str, _: object) -> Any:
        """The client's thread gets its turn before each line; where it may not, it waits."""
        if event == "line" and frame.f_code.co_filename == client_module.__file__:
            takers.append(threading.Thread(target=orders.take))
            takers[-1].start()
            takers[-1].join(0.05)
        return take_meanwhile

    before = sys.gettrace()
    sys.settrace(take_meanwhile)
    try:
        orders.submit(Telling("log", [b""]))
    finally:
        sys.settrace(before)
    for taker in takers:
        taker.join()
    assert len(takers) > 5
    orders.take()
    assert not rings(orders)
    orders.end(ClosedError("over"))


def test_more_than_the_limit_is_refused_until_some_are_settled() -> None:
    orders = Orders(2)
    orders.submit(question(1))
    orders.submit(Telling("log", [b""]))
    with pytest.raises(OverloadedError, match="2 requests of this client are unsettled") as caught:
        orders.submit(question(3))
    assert (caught.value.request_id, caught.value.peer) == (3, "adder")
    orders.take()
    assert orders.unsettled == 2
    orders.release()
    assert orders.unsettled == 1
    orders.submit(question(4))
    orders.end(ClosedError("over"))


def test_a_cancelled_future_is_an_order_and_one_that_is_done_is_none() -> None:
    orders = Orders(10)
    cancelled, answered = asked(orders, 1), asked(orders, 2)
    orders.take()
    answered.set_result(None)
    assert not rings(orders)
    cancelled.cancel()
    assert rings(orders)
    assert list(orders.take()) == [Cancelled(1)]
    orders.end(ClosedError("over"))


def test_the_first_reason_for_the_end_counts() -> None:
    orders = Orders(10)
    left = question(1)
    orders.submit(left)
    orders.take()
    orders.submit(late := question(2))
    future: Future[None] = Future()
    future.add_done_callback(partial(orders.on_done, 2))
    reason = ClosedError("first")
    orders.close(reason)
    orders.close(ClosedError("second"))
    assert rings(orders)
    assert orders.closing is reason
    with pytest.raises(ClosedError, match="first"):
        orders.submit(question(3))
    error, rest = orders.end(ClosedError("third"))
    assert (error, list(rest)) == (reason, [late])
    future.cancel()  # nobody is there to be woken
    with pytest.raises(ClosedError, match="first"):
        orders.submit(question(4))


def test_many_threads_lose_nothing() -> None:
    orders = Orders(4000)
    taken: list[int] = []

    def submit(first: int) -> None:
        for number in range(first, first + 1000):
            orders.submit(question(number))

    threads = [threading.Thread(target=submit, args=(1000 * part + 1,)) for part in range(4)]
    for thread in threads:
        thread.start()
    while len(taken) < 4000:
        assert select.select([orders], [], [], 10.0)[0], "nobody was woken"
        taken += [order.request_id for order in orders.take() if isinstance(order, Call)]
    for thread in threads:
        thread.join(10.0)
    assert sorted(taken) == list(range(1, 4001))
    orders.end(ClosedError("over"))
