"""The state of a run by name, and the evaluator of its checkpoints."""

import contextlib
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config, source_and_splits, split_of
from tests.replica.test_epochs import regression
from tests.replica.test_streams import VALIDATION, Streamed, X, Y, of_rows
from tests.unit.test_saving import facts, no_more_open_files
from tf2dist import registry
from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import check_same, chosen, differences, named_variables, take_over, values
from tf2dist.checkpoint.store import Checkpoints
from tf2dist.config.load import DEFAULTS
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import CheckpointError, DataError, NotFiniteError, TaskLostError
from tf2dist.model.builtin import build_optimizer
from tf2dist.model.evaluation import Evaluation
from tf2dist.model.shards import row_pieces
from tf2dist.model.source import EpochPlan, build_step
from tf2dist.tf_internals.keras import fresh_names
from tf2dist.training import evaluator as evaluator_module
from tf2dist.training.evaluator import Evaluator, follow


def test_bfloat16_that_is_not_finite_is_not_saved() -> None:
    variable = keras.Variable([1.5, 2.5], dtype="bfloat16")
    assert values({"model/own": [variable]})["model/own"].tolist() == [1.5, 2.5]
    variable.assign([1.5, np.nan])
    with pytest.raises(NotFiniteError, match="model/own is not finite"):
        values({"model/own": [variable]})


def test_weights_that_are_infinite_by_intention_are_saved() -> None:
    mask, kernel = keras.Variable([-np.inf, 0.0], trainable=False), keras.Variable([np.inf, 0.0])
    assert values({"model/mask": [mask]})["model/mask"].tolist() == [-np.inf, 0.0]
    for name, variable in (("model/kernel", kernel), ("optimizer/kernel/velocity", mask)):
        with pytest.raises(NotFiniteError, match=f"{name} is not finite"):
            values({name: [variable]})
    mask.assign([np.nan, 0.0])
    with pytest.raises(NotFiniteError, match="model/mask is not finite"):
        values({"model/mask": [mask]})


def test_slots_of_what_a_run_does_not_train_are_left_out() -> None:
    """Such as a part of the model that its loss does not reach any more."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2), keras.layers.Dense(1)])
    earlier, own = keras.optimizers.SGD(momentum=0.5), keras.optimizers.SGD(momentum=0.5)
    earlier.build(model.trainable_variables)
    own.build(model.layers[0].trainable_variables)
    earlier.momentums[0].assign([[1.0, 2.0], [3.0, 4.0]])
    take_over(named_variables(model, model.weights, [own]), model, model.weights, earlier)
    assert own.momentums[0].numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_each_piece_of_a_table_that_is_read_is_a_sign_of_life() -> None:
    """A table may be too large to be read within the time that a task may be silent."""
    table, progress = keras.Variable(np.arange(12.0).reshape(6, 2)), []
    with_table = values({"model/table": [table]}, ["model/table"], progress=lambda: progress.append(1))
    np.testing.assert_array_equal(with_table["model/table"], table)
    assert len(progress) == len(list(row_pieces(table))) > 0


def test_the_layers_of_another_run_are_chosen_by_their_whole_names() -> None:
    arrays = {f"model/{name}/kernel": np.ones([2, 3]) for name in ("hidden1", "block/hidden2", "hidden10")}
    named = {name: [keras.Variable(array)] for name, array in arrays.items()} | {"model/new/kernel": []}
    assert chosen(named, Weights(arrays), "hidden[12]").keys() == {"model/hidden1/kernel", "model/block/hidden2/kernel"}
    assert chosen(named, Weights(arrays), "block").keys() == {"model/block/hidden2/kernel"}
    assert chosen(named, Weights(arrays), None) == arrays
    for pattern, says in (
        ("kernel", r"init_layers \(kernel\): matches no layer there; it has hidden1, hidden10, hidden2"),
        ("hidden1", r"model/hidden1/kernel is \[5\] there and \[2, 3\] here"),
    ):
        with pytest.raises(CheckpointError, match=says):
            chosen(named, Weights(arrays | {"model/hidden1/kernel": np.ones(5)}), pattern)


def test_differences_name_what_is_missing_extra_or_of_another_shape() -> None:
    found: dict[str, tuple[int, ...]] = {"a": (1, 2), "b": (3,), "c": ()}
    assert differences(found, found) == []
    assert differences(found, {"a": (1, 3), "b": (3,), "d": ()}) == [
        "missing: d",
        "extra: c",
        "a is [1, 2] there and [1, 3] here",
    ]
    many: dict[str, tuple[int, ...]] = {f"v{i}": (1,) for i in range(9)}
    assert differences(many, {}) == ["extra: v0, v1, v2, v3, v4, v5 and 3 more"]


@pytest.mark.parametrize(("data", "has_init_from"), [("digits", True), ("arrays", False), ("stream", False)])
def test_the_way_out_of_a_different_model_names_an_option_that_the_caller_has(data: str, has_init_from: bool) -> None:
    """`fit` has no option init_from, so its message must not name it."""
    saved = Snapshot(3, {"model/a": np.zeros(3)}, replace(facts(3), data=data))
    with pytest.raises(CheckpointError, match="missing: model/b; extra: model/a; name another run_dir") as told:
        check_same({"model/b": [keras.Variable([1.0])]}, saved, data, DEFAULTS)
    assert ("init_from" in str(told.value)) == has_init_from


def test_a_checkpoint_of_other_settings_of_keras_is_refused() -> None:
    """With another epsilon the same weights give other results."""
    named = {"model/a": [keras.Variable(np.zeros(3))]}
    saved = Snapshot(3, {"model/a": np.zeros(3)}, replace(facts(3), keras=DEFAULTS))
    check_same(named, saved, saved.facts.data, DEFAULTS)
    with pytest.raises(CheckpointError, match="epsilon"):
        check_same(named, saved, saved.facts.data, replace(DEFAULTS, epsilon=1e-3))


def test_an_evaluator_waits_for_the_checkpoint_after_a_damaged_one(tmp_path: Path) -> None:
    checkpoints, warned, config = Checkpoints(tmp_path, 3), list[str](), run_config()
    evaluator = Evaluator(config, *source_and_splits(config), warned.append)
    assert evaluator.newest(checkpoints) is None
    for step in (5, 9):
        checkpoints.save(Snapshot(step, {"model/a": np.zeros(3)}, facts(step)))
        found = evaluator.newest(checkpoints)
        assert found
        assert found.step == step
    assert evaluator.newest(checkpoints) is None, "it was read before"
    Checkpoints(tmp_path, 3).save(Snapshot(9, {"model/a": np.zeros(3)}, facts(9)), replaces=True)
    assert evaluator.newest(checkpoints) is not None, "the run has saved its last step again"
    Checkpoints(tmp_path, 3).save(Snapshot(9, {"model/a": np.zeros(3)}, facts(9)), replaces=True)
    (checkpoints.paths()[-1] / "arrays.npz").write_bytes(b"damaged")
    assert evaluator.newest(checkpoints) is evaluator.newest(checkpoints) is None
    Checkpoints(tmp_path, 3).save(Snapshot(9, {"model/a": np.ones(3)}, facts(9)))  # by another process
    saved_again = evaluator.newest(checkpoints)
    assert saved_again
    assert saved_again.step == 9
    (text,) = warned
    assert "checkpoint step-0000000009 is damaged (arrays.npz has 7 bytes instead of" in text


def test_an_evaluator_does_not_outlive_a_leader_that_saves_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whose last checkpoint is damaged."""
    monkeypatch.setattr(evaluator_module, "LINE_EVERY_SECS", 0.0)
    monkeypatch.setattr(evaluator_module, "LAST_SECS", 0.5)
    config, told = run_config(), list[str]()
    evaluator = Evaluator(config, *source_and_splits(config), told.append)
    for name in ("empty", "damaged"):
        folder = tmp_path / name
        if name == "damaged":
            path = Checkpoints(folder / "checkpoints").save(Snapshot(5, {"model/a": np.zeros(3)}, facts(5)))
            (path / "arrays.npz").write_bytes(b"damaged")
        message = rf"run_dir \({folder}\): the leader has ended, and its last checkpoint is not here, or is damaged"
        with pytest.raises(CheckpointError, match=message):
            follow(evaluator, folder, ["test"], lambda *_: pytest.fail("evaluated"), 5, lambda: True, told.append)
    assert f"waiting for a checkpoint in {tmp_path}/empty/checkpoints, 0 s" in told
    assert any(text.startswith("checkpoint step-0000000005 is damaged") for text in told)


def test_an_evaluator_does_not_wait_for_ever_where_it_cannot_read(tmp_path: Path) -> None:
    checkpoints, config = Checkpoints(tmp_path, 3), run_config()
    evaluator = Evaluator(config, *source_and_splits(config), pytest.fail)
    path = checkpoints.save(Snapshot(5, {"model/a": np.zeros(3)}, facts(5)))
    with no_more_open_files(), pytest.raises(TaskLostError, match=r"cannot be read \(Too many open files\); try again"):
        evaluator.newest(checkpoints)
    (path / "manifest.json").unlink()
    assert evaluator.newest(checkpoints) is None, "the run is removing it"


@registry.register_optimizer("decays to the end")
def decays_to_the_end(total_steps: int) -> keras.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, total_steps - 5))


def test_an_evaluator_knows_the_number_of_updates() -> None:
    config = run_config()
    config.optimizer = {"name": "decays to the end"}
    source, splits = source_and_splits(config)
    evaluator = Evaluator(config, source, splits, lambda text: None)
    step, _ = build_step(source, splits, config, contextlib.nullcontext())
    snapshot = Snapshot(10, values(named_variables(step.model, step.variables, [])), replace(facts(10), target_step=10))
    assert evaluator.evaluate(snapshot, "test", is_last=True) == evaluator.evaluate(snapshot, "test")


def test_an_evaluator_ends_with_the_final_weights_of_the_optimizer() -> None:
    config = run_config()
    config.optimizer |= {"use_ema": True, "ema_momentum": 0.5, "learning_rate": 1.0}
    source, splits = source_and_splits(config)
    step, _ = build_step(source, splits, config, contextlib.nullcontext())
    optimizer = build_optimizer(config.optimizer, 10)
    optimizer.build(step.trainable)
    for number in range(1, 4):
        gradients = [np.sin(number * np.arange(v.numpy().size)).reshape(v.shape) for v in step.trainable]
        optimizer.apply([keras.ops.cast(gradient, "float32") for gradient in gradients])
    named = named_variables(step.model, step.variables, [optimizer])
    snapshot = Snapshot(3, values(named), replace(facts(3), target_step=3))
    evaluator = Evaluator(config, source, splits, lambda text: None)
    found = [evaluator.evaluate(snapshot, "test", is_last).metrics["loss"] for is_last in (False, True)]
    test = split_of(splits, "test")
    step.model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    expected = [step.model.evaluate(test.x, test.y, verbose=0)[0]]
    optimizer.finalize_variable_values(step.trainable)
    expected.append(step.model.evaluate(test.x, test.y, verbose=0)[0])
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(found[0] - found[1]) > 1e-3


def with_fresh_names() -> keras.Model:
    with fresh_names():
        return regression()


def test_an_evaluator_without_anything_to_evaluate_is_refused() -> None:
    config = run_config()
    source, splits = source_and_splits(config)
    with pytest.raises(DataError, match=r"data \(digits\): has no validation or test set to evaluate; start no eval"):
        Evaluator(config, source, replace(splits, validation=None, test=None), pytest.fail)


PLAN = EpochPlan(validation_batch_size=20)
SPLITS = Splits(Arrays(X, Y), VALIDATION, num_classes=None)
# What `fit` gives an evaluator: the source, and how many examples it validates on.
OF_FIT = {
    "arrays": (InMemorySource(with_fresh_names, SPLITS, PLAN), 50),
    "some steps": (InMemorySource(with_fresh_names, SPLITS, replace(PLAN, validation_steps=2)), 40),
    "a stream": (
        Streamed(with_fresh_names, replace(SPLITS, validation=None), PLAN, count=2, validation_loader=of_rows),
        250,
    ),
}


@pytest.mark.parametrize("kind", OF_FIT)
def test_an_evaluator_of_fit_evaluates_the_validation_set_alone(kind: str, tmp_path: Path) -> None:
    source, num_examples = OF_FIT[kind]
    config, splits = run_config("given"), source.load()
    step, _ = build_step(source, splits, config, contextlib.nullcontext())
    last = Snapshot(20, values(named_variables(step.model, step.variables, [])), facts(20))
    Checkpoints(tmp_path / "checkpoints", 3).save(replace(last, facts=replace(last.facts, data=config.data.name)))
    evaluator, told = Evaluator(config, source, splits, pytest.fail), list[tuple[str, int, Evaluation]]()
    follow(
        evaluator,
        tmp_path,
        splits.evaluated,
        lambda *evaluation: told.append(evaluation),
        asked_steps=None,
        leader_is_done=lambda: True,
        notify=pytest.fail,
    )
    ((split, at, evaluation),) = told
    assert (split, at, evaluation.num_examples) == ("validation", 20, num_examples)
    x, y = (X[:250], Y[:250]) if kind == "a stream" else (X[250:][:num_examples], Y[250:][:num_examples])
    expected = step.model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    assert evaluation.metrics == pytest.approx(expected, rel=1e-4)
