"""What ends a training before its last step."""

import pytest

from tf2dist.config.schema import TrainConfig
from tf2dist.errors import ConfigError
from tf2dist.model.evaluate import Evaluation
from tf2dist.training.driver import Goal


def evaluation(accuracy: float) -> Evaluation:
    return Evaluation({"loss": 0.5, "accuracy": accuracy}, 100)


def same(packed: bytes) -> bytes:
    return packed


def test_an_accuracy() -> None:
    goal = Goal(TrainConfig(until_accuracy=0.9), ["validation"], same)
    told = "train.until_accuracy=0.9"
    assert [goal.reached(evaluation(value), 1e9) for value in (0.1, 0.89, 0.9, 0.95)] == ["", "", told, told]


def test_the_clock_of_the_leader_decides() -> None:
    goal = Goal(TrainConfig(until_secs=30), ["validation"], same)
    told = "train.until_secs=30"
    assert [goal.reached(evaluation(0.5), secs) for secs in (0.0, 29.9, 30.0)] == ["", "", told]
    follower = Goal(TrainConfig(until_secs=30), ["validation"], lambda packed: b"\1")
    assert follower.reached(evaluation(0.5), 0.0) == told


def test_no_goal_and_no_message_between_the_workers() -> None:
    def fail(packed: bytes) -> bytes:
        raise AssertionError("nothing is to be agreed on")

    assert not Goal(TrainConfig(), [], fail).reached(evaluation(1.0), 1e9)


def test_a_goal_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.until_secs \(5\): the data has no validation set"):
        Goal(TrainConfig(until_secs=5), ["test"], same)
    goal = Goal(TrainConfig(until_accuracy=0.9), ["validation"], same)
    with pytest.raises(ConfigError, match=r"train.until_accuracy \(0.9\): the model has no accuracy"):
        goal.reached(Evaluation({"loss": 0.5}, 100), 0.0)
