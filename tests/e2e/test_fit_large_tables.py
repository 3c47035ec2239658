"""Models with large tables in `fit`: what of them comes to the process that has called it, and when."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest

import tf2dist
from tf2dist.tf_internals.keras import seeds_of

ROWS, WIDTH = 300_000, 16  # 19 MB, and as much for what Adagrad keeps
TABLE_BYTES = 4 * ROWS * WIDTH
IDS = np.random.default_rng(0).integers(0, ROWS, [400, 2]).astype(np.int32)
LABELS = (IDS.sum(1) % 2).astype(np.float32)


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def build() -> keras.Model:
    ids = keras.Input([2], dtype="int32")
    rows = keras.layers.Embedding(ROWS, WIDTH, name="table")(ids)
    rows = keras.layers.Dropout(0.1, seed=3)(rows)
    model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    return model


def train(model: Any, run_dir: Path, **arguments: Any) -> tf2dist.Result:
    given = {"batch_size": 20, "verbose": 0, "cluster": tf2dist.Local(workers=1), "run_dir": run_dir, **arguments}
    return tf2dist.fit(model, IDS, LABELS, **given)


def arrays_of(model: keras.Model) -> list[np.ndarray]:
    return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def assert_equal(one: keras.Model, other: keras.Model) -> None:
    for here, there in zip(arrays_of(one), arrays_of(other), strict=True):
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.thorough)])
def test_large_tables_of_a_function_are_read_when_the_model_is_asked_for(mode: str, tmp_path: Path) -> None:
    first = train(build, tmp_path / "first", mode=mode)  # imports, and memory that is kept for later
    before, schedule = psutil.Process().memory_full_info(), keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.05)
    result = train(build, tmp_path / "run", mode=mode, epochs=2, callbacks=[schedule])
    grown = psutil.Process().memory_full_info().uss - before.uss
    assert grown < TABLE_BYTES / 2, "a table came to this process"
    saved = tf2dist.load_model(tmp_path / "run")
    assert result.model is result.model
    assert result.model.history.history == result.history
    assert result.model.history.model is result.model
    assert_equal(result.model, saved)
    assert float(result.model.optimizer.learning_rate) == np.float32(0.05)
    assert [np.array(seed).tolist() for seed in seeds_of(result.model)] == [[3, 40]]
    assert int(result.model.optimizer.iterations) == result.summary["global_step"] == 40
    history = result.model.fit(IDS, LABELS, verbose=0).history
    assert history["loss"][0] < result.history["loss"][0], "Keras does not go on with it"
    (tmp_path / "first" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(tf2dist.TfDistError, match="has no checkpoint of step 20"):
        _ = first.model


@pytest.mark.thorough
def test_a_model_that_is_given_has_its_tables_at_the_end(tmp_path: Path) -> None:
    model = build()
    assert train(model, tmp_path / "run").model is model
    assert_equal(model, tf2dist.load_model(tmp_path / "run"))


class Looks(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes a table at the end of each epoch, and clears a row of it after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        table = self.model.get_layer("table").embeddings
        self.seen.append(np.array(table))
        if epoch == 0:
            table.assign(np.zeros([ROWS, WIDTH], np.float32))


def test_a_callback_sees_and_changes_tables(tmp_path: Path) -> None:
    """The tables are cut."""
    looks, best = Looks(), keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    cut: dict[str, Any] = {"cluster": tf2dist.Local(workers=1, ps=2), "options": ["cluster.placement=partitioned"]}
    result = train(build, tmp_path / "run", epochs=2, callbacks=[looks, best], **cut)
    one, two = (keras.saving.load_model(tmp_path / f"{epoch}.keras") for epoch in (1, 2))
    assert not one.get_layer("table").embeddings.numpy().any()
    assert_equal(two, result.model)
    first, last = looks.seen
    used = np.unique(IDS)
    assert first[used].any(axis=1).all()
    assert not np.delete(last, used, axis=0).any(), "the tasks do not have what the callback has assigned"
    np.testing.assert_array_equal(last, result.model.get_layer("table").embeddings.numpy())


def test_a_checkpoint_has_what_the_end_of_the_training_has_changed(tmp_path: Path) -> None:
    """Weights that are better than the last ones are restored then, and are what a later run begins with."""
    best = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    result = train(build, tmp_path / "run", epochs=5, callbacks=[best])
    step = result.summary["global_step"]
    assert step == 40, "the second epoch is worse, and the last one"
    saved = tf2dist.load_model(tmp_path / "run", step=step)
    for here, there in zip(best.best_weights, saved.get_weights(), strict=True):
        np.testing.assert_array_equal(here, there)
    assert_equal(saved, result.model)
