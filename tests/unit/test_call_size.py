"""The number of steps of a call."""

import pytest

from tf2dist.training.call_size import MAX_STEPS, CallTimer, steps_of_a_call, worthwhile_steps


def test_a_call_takes_less_than_a_second_but_never_too_many_steps() -> None:
    assert steps_of_a_call(0.0001) == MAX_STEPS
    assert steps_of_a_call(0.015) == 26
    assert steps_of_a_call(30.0) == 1


def test_the_timer_counts_the_workers_that_take_part() -> None:
    trial = CallTimer()
    assert trial.secs_per_step(100.0, (5, 5, 5)) is None  # a run that was resumed
    assert trial.secs_per_step(103.0, (5, 5, 5)) is None
    assert trial.secs_per_step(104.0, (6, 5, 5)) is None
    assert trial.first_call_secs == 4
    assert trial.secs_per_step(107.0, (20, 20, 5)) is None, "the third may still be preparing its graph"
    assert trial.secs_per_step(108.0, (21, 21, 5)) is None  # it is late, so the clock starts here
    assert trial.secs_per_step(108.1, (30, 30, 5)) is None, "too early to measure"
    assert trial.secs_per_step(109.0, (71, 71, 5)) == 0.02, "100 steps of two workers in a second"


def test_the_timer_waits_for_some_steps_of_a_slow_model() -> None:
    trial = CallTimer()
    assert trial.secs_per_step(0.0, (0, 0)) is None
    assert trial.secs_per_step(10.0, (1, 0)) is None
    assert trial.secs_per_step(12.0, (1, 1)) is None  # the clock starts here, because graphs were prepared before
    assert trial.secs_per_step(30.0, (3, 2)) is None
    assert trial.secs_per_step(72.0, (4, 4)) == 20.0


def test_small_models_get_long_calls_if_the_run_is_long() -> None:
    softmax, dnn, cnn = (0.015, 3, 0.8), (0.02, 3, 0.9), (0.05, 3, 1.0)
    # Of the measured times, three workers spend 9 ms on each other's calls.
    assert worthwhile_steps(*softmax, 20_000) == MAX_STEPS
    assert worthwhile_steps(*dnn, 2_760) == steps_of_a_call(0.011)
    assert worthwhile_steps(*cnn, 10_000) == steps_of_a_call(0.041)


def test_no_estimate_of_what_calls_cost_makes_a_call_too_long() -> None:
    assert worthwhile_steps(0.08, 32, 1.0, 1_000_000) == steps_of_a_call(0.02)


@pytest.mark.parametrize("secs_per_step", [0.01, 0.025, 0.05])
def test_preparing_longer_calls_costs_less_than_they_save(secs_per_step: float) -> None:
    assert worthwhile_steps(secs_per_step, 2, 15.0, 100) == 1, "a deep model in a short run"
    assert worthwhile_steps(secs_per_step, 2, 1.0, 100) == 1
    sizes = [worthwhile_steps(secs_per_step, 2, 15.0, left) for left in (1_000, 10_000, 100_000, 1_000_000)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert sizes[-1] == steps_of_a_call(secs_per_step - 0.006)


def test_slow_steps_hide_the_cost_of_a_call() -> None:
    assert worthwhile_steps(0.1, 2, 0.5, 10_000_000) == 1
    assert worthwhile_steps(0.1, 1, 15.0, 10_000_000) == 1
    # Sixteen such workers keep the coordinator busy all the time.
    assert worthwhile_steps(0.1, 16, 1.0, 10_000) == steps_of_a_call(0.052)
