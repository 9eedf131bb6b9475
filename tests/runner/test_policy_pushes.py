from __future__ import annotations

from envbus.runner.policy_pushes import MAX_UNDER_WAY, Pushes


def test_a_worker_that_does_not_look_gets_the_latest_weights_once_it_does() -> None:
    pushes = Pushes()
    assert all(pushes.offer("a") for _ in range(MAX_UNDER_WAY))
    assert not pushes.offer("a")
    assert not pushes.offer("b")
    assert not pushes.offer("a")
    assert pushes.taken() == ["a"]
    assert pushes.taken() == ["b"]
    assert pushes.taken() == []
    assert pushes.offer("a")
