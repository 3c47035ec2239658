"""How many steps a call takes."""

from tf2dist.call_size import MAX_STEPS, Trial, steps_of_a_call


def test_a_call_takes_less_than_a_second_but_never_too_many_steps() -> None:
    assert steps_of_a_call(0.0001) == MAX_STEPS
    assert steps_of_a_call(0.015) == 26
    assert steps_of_a_call(30.0) == 1


def test_a_trial_times_the_steps_of_those_who_take_part() -> None:
    trial = Trial()
    assert trial.size(100.0, (5, 5, 5)) is None  # a run that goes on
    assert trial.size(103.0, (5, 5, 5)) is None
    assert trial.size(104.0, (6, 5, 5)) is None  # the clock starts: before, graphs were prepared
    assert trial.size(104.1, (20, 20, 5)) is None, "too soon"
    assert trial.size(105.0, (56, 55, 5)) == 20, "100 steps of two workers in a second"


def test_a_trial_waits_for_some_steps_of_a_slow_model() -> None:
    trial = Trial()
    assert trial.size(0.0, (0, 0)) is None
    assert trial.size(10.0, (1, 0)) is None
    assert trial.size(30.0, (2, 2)) is None
    assert trial.size(70.0, (4, 4)) == 1
