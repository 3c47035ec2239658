"""How asynchronous calls are made longer."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.replica.small_runs import assert_exact, make_long_calls_pay, run_config
from tf2dist.training.asynchronous.scheduler import Calls

MakeLoop = Callable[..., Any]


def test_calls_become_longer_once_the_time_of_a_step_is_measured(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(steps_per_execution=None)
    make_long_calls_pay(monkeypatch, config)
    loop = async_loop(config)
    loop.train(3)
    assert loop._scheduler.num_steps == 1, "three steps are too few to measure"
    # On a slow machine the first of these trainings ends before a worker has executed a longer call.
    for steps in (1500, 1501, 1600, 1700, 1800):
        loop.train(steps)
        assert_exact(loop, steps)
        assert loop._scheduler.is_sized
    assert loop._scheduler.num_steps > 1


class Late(threading.Event):
    """One that seems set only when it was looked at five times, as if workers took long to prepare."""

    looks = 0

    def clear(self) -> None:
        self.looks = 0
        super().clear()

    def is_set(self) -> bool:
        self.looks += super().is_set()
        return self.looks > 5


@pytest.mark.slow
def test_most_workers_go_on_while_some_prepare_longer_calls(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(steps_per_execution=None)
    make_long_calls_pay(monkeypatch, config)
    loop = async_loop(config, num_workers=4)
    scheduler, scheduled = loop._scheduler, []
    scheduler._are_done, scheduler._share_cores = Late(), False
    original = scheduler._schedule

    def schedule(calls: Calls) -> Any:
        scheduled.append((calls.num_steps > 1, scheduler.calls is calls))
        return original(calls)

    monkeypatch.setattr(scheduler, "_schedule", schedule)
    loop.train(3_000)
    assert_exact(loop, 3_000)
    tried = [number for number, (is_long, is_usual) in enumerate(scheduled) if is_long and not is_usual]
    first, second, third = tried
    assert third == second + 1, "then two workers at once"
    assert (False, True) in scheduled[first:second], "short calls in the meantime"
    assert scheduled[-1] == (True, True)
