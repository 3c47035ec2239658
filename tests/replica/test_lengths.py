"""The length of a run: where its driver stops, and what ends a training before its last step."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.replica.small_runs import run_config
from tests.unit.test_saver import Disk
from tests.unit.test_saving import snapshot
from tf2dist.checkpoint.snapshot import Frozen
from tf2dist.checkpoint.store import Saver
from tf2dist.config.schema import TrainConfig
from tf2dist.errors import ConfigError
from tf2dist.messages import ToLauncher
from tf2dist.model.evaluation import Evaluation
from tf2dist.training.driver import Driver, Steps, StopCondition
from tf2dist.training.report import NoReporter


def evaluation(accuracy: float) -> Evaluation:
    return Evaluation({"loss": 0.5, "accuracy": accuracy}, 100)


def same(packed: bytes) -> bytes:
    return packed


def test_an_accuracy() -> None:
    condition = StopCondition(TrainConfig(until_accuracy=0.9), ["validation"], same)
    told = "train.until_accuracy=0.9"
    assert [condition.reached(evaluation(value), 1e9) for value in (0.1, 0.89, 0.9, 0.95)] == ["", "", told, told]


def test_the_clock_of_the_leader_decides() -> None:
    condition = StopCondition(TrainConfig(until_secs=30), ["validation"], same)
    told = "train.until_secs=30"
    assert [condition.reached(evaluation(0.5), secs) for secs in (0.0, 29.9, 30.0)] == ["", "", told]
    follower = StopCondition(TrainConfig(until_secs=30), ["validation"], lambda packed: b"\1")
    assert follower.reached(evaluation(0.5), 0.0) == told


def test_no_goal_and_no_message_between_the_workers() -> None:
    def fail(packed: bytes) -> bytes:
        raise AssertionError("nothing is to be agreed on")

    assert not StopCondition(TrainConfig(), [], fail).reached(evaluation(1.0), 1e9)


def test_a_goal_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.until_secs \(5\): the data has no validation set"):
        StopCondition(TrainConfig(until_secs=5), ["test"], same)
    condition = StopCondition(TrainConfig(until_accuracy=0.9), ["validation"], same)
    with pytest.raises(ConfigError, match=r"train.until_accuracy \(0.9\): the model has no accuracy"):
        condition.reached(Evaluation({"loss": 0.5}, 100), 0.0)


def driver_of(target_step: int, eval_every_steps: int | None) -> Any:
    config = run_config()
    config.train.eval_every_steps = eval_every_steps
    loop = SimpleNamespace(config=config, target_step=target_step, broadcast=same)
    return SimpleNamespace(loop=loop, splits=["validation"])


@pytest.mark.parametrize(
    ("every", "stops"),
    [(None, {0: 100, 99: 100, 100: None}), (30, {0: 30, 29: 30, 30: 60, 90: 100, 99: 100, 100: None})],
)
def test_steps_stop_where_an_evaluation_is_due_and_at_the_end(every: int | None, stops: dict[int, int | None]) -> None:
    length = Steps(driver_of(100, every))
    assert {step: length.next_stop(step) for step in stops} == stops


def test_steps_end_where_their_driver_ends_them() -> None:
    driver = driver_of(100, 30)
    length = Steps(driver)
    driver.loop.target_step = 60
    assert [length.next_stop(step) for step in (59, 60)] == [60, None]


def test_the_last_checkpoint_tells_that_a_goal_has_ended_the_run(tmp_path: Path) -> None:
    """It replaces one of the same step, and a full disk delays that: an evaluator waits for the end that is told."""
    config = run_config()
    config.train.eval_every_steps, config.train.until_accuracy = 3, 0.9
    loop: Any = SimpleNamespace(
        config=config, leads=True, target_step=20, broadcast=same, combine=lambda request: request
    )
    loop.progress = SimpleNamespace(global_step=3)
    loop.evaluate = lambda split, pause_request: evaluation(0.95)

    def freeze(others: object) -> Frozen:
        saved = snapshot(3)
        facts = replace(saved.facts, target_step=loop.target_step)
        return lambda: replace(saved, facts=facts)

    loop.freeze = freeze
    disk = Disk(tmp_path)
    disk.full = False
    saver = Saver(disk, None, ToLauncher("chief-0", lambda message: None))
    driver = Driver(loop, saver, NoReporter(), ["validation"], Steps, lambda: None)
    driver.has_changed = True
    driver.save()
    saver.wait()
    assert (driver.saved_at, driver.has_changed) == (3, False), "the same would be saved again at the end"
    disk.full = True
    driver._length.evaluate()
    assert driver.is_at_end
    disk.full = False
    saver.retry(3, driver._freeze)
    last = disk.newest(pytest.fail)
    assert last
    assert last.facts.target_step == 3
