"""Models with large tables in files, in one process: the same values as in memory, whatever a model does with them."""

import functools
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.conftest import leave_free
from tests.replica.test_finished import leave
from tf2dist.checkpoint.snapshot import in_file
from tf2dist.errors import CheckpointError, ConfigError
from tf2dist.process.tables_in_files import LARGE_BYTES, Tables
from tf2dist.tools.finished import opening
from tf2dist.tools.finished.load_model import load_folder, sizes
from tf2dist.tools.finished.shell import CommandLine
from tf2dist.training import finished_model
from tf2dist.training.finished_model import MODEL_FILE, write_model

ROWS = LARGE_BYTES // 64 + 3
IDS = np.random.default_rng(0).integers(0, ROWS, [50, 1]).astype(np.int32)
IDS[0], IDS[1] = 0, ROWS - 1
WORDS = np.random.default_rng(1).choice(["a", "b", "c"], [50, 1])
Y = np.arange(50, dtype=np.float32)[:, None] % 2


def inputs() -> dict[str, Any]:
    return {"first": IDS, "second": IDS[::-1], "words": keras.ops.convert_to_tensor(WORDS)}


class Averaged(keras.layers.Embedding):  # type: ignore[misc]
    """A subclass, which stays in memory."""

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) - keras.ops.mean(self.embeddings)


class Hidden(keras.layers.Layer):  # type: ignore[misc]
    """A table where Keras neither finds nor saves it; the layer itself may save it."""

    def __init__(self, saves: bool, **options: Any) -> None:
        super().__init__(**options)
        self.saves = saves
        drawn = keras.initializers.RandomNormal(seed=3)
        self.holder = SimpleNamespace(table=keras.layers.Embedding(ROWS, 16, drawn))

    def build(self, input_shape: Any) -> None:
        self.holder.table.build()
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.holder.table(inputs)

    def save_own_variables(self, store: Any) -> None:
        if self.saves:
            store["table"] = self.holder.table.embeddings

    def load_own_variables(self, store: Any) -> None:
        if self.saves:
            self.holder.table.embeddings.assign(store["table"])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "saves": self.saves}


class OwnStep(keras.Model):  # type: ignore[misc]
    """Its evaluation uses the state of its optimizer."""

    def test_step(self, data: Any) -> Any:
        slots = self.optimizer.variables[2:]
        return super().test_step(data) | {"largest": keras.ops.max([keras.ops.max(slot) for slot in slots])}


def branched(kind: type[keras.Model], adapts: bool) -> keras.Model:
    """A table that two inputs share, a small one, a subclass, and a layer with files of its own."""
    layers = keras.layers
    first, second = keras.Input([1], dtype="int32", name="first"), keras.Input([1], dtype="int32", name="second")
    words = keras.Input([1], dtype="string", name="words")
    lookup = layers.StringLookup(vocabulary=None if adapts else ["a", "b"])
    if adapts:  # Keras has the vocabulary in a file of its own then, which a checkpoint lacks
        lookup.adapt(WORDS)
    shared, averaged = layers.Embedding(ROWS, 16), Averaged(ROWS, 16)
    small = layers.Embedding(lookup.vocabulary_size(), 16)(lookup(words))
    outputs = layers.Dense(1)(layers.Add()([shared(first), shared(second), averaged(first), small]))
    model = kind([first, second, words], layers.Flatten()(outputs))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def is_in_file(table: keras.Variable) -> bool:
    address = np.asarray(tf.convert_to_tensor(table)).__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return ".table" in line
    return False


def assert_alike(model: keras.Model, like: keras.Model, x: Any) -> None:
    model.run_eagerly = like.run_eagerly = True  # tracing takes longer than two batches
    np.testing.assert_array_equal(model.predict(x, verbose=0), like.predict(x, verbose=0))
    assert model.evaluate(x, Y, verbose=0) == like.evaluate(x, Y, verbose=0)


CUSTOM = {kind.__name__: kind for kind in (Averaged, Hidden, OwnStep)}


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (keras.Model, None),
        pytest.param(OwnStep, 7, marks=pytest.mark.thorough),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(keras.Model, 7), (OwnStep, None)]),
    ],
)
def test_a_loaded_model_is_that_of_load_model(tmp_path: Path, kind: type[keras.Model], step: int | None) -> None:
    def build() -> keras.Model:
        return branched(kind, adapts=step is None)

    model, x = build(), inputs()
    model.run_eagerly = True
    model.fit(x, Y, verbose=0)
    (tmp_path / "run").mkdir()
    assert leave(tmp_path / "run", model, build) == []
    tables = Tables(tmp_path / "tables")
    loaded = load_folder(tmp_path / "run", step, CUSTOM, tables)
    num_tables = 3 if kind is OwnStep else 1  # with both moments of Adam
    assert [path.stat().st_size for path in tables.folder.iterdir()] == [64 * ROWS] * num_tables
    shutil.rmtree(tables.folder)
    expected = tf2dist.load_model(tmp_path / "run", step, CUSTOM)
    assert_alike(loaded, expected, x)
    in_files = [layer.name for layer in loaded.layers if layer.weights and is_in_file(layer.weights[0])]
    assert in_files == [layer.name for layer in expected.layers if type(layer) is keras.layers.Embedding][:1]
    assert isinstance(loaded.optimizer, keras.optimizers.Adam if kind is OwnStep else keras.optimizers.SGD)
    # It could still be trained, in memory.
    loaded.fit(x, Y, verbose=0)


@pytest.mark.parametrize("saves", [True, False])
def test_a_table_that_keras_does_not_find(tmp_path: Path, saves: bool) -> None:
    """It has what its layer has saved; or it is drawn, and not left without values."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([1], dtype="int32"), Hidden(saves), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    model = build()
    if saves:
        model.layers[0].holder.table.embeddings.assign(np.arange(16.0 * ROWS).reshape(ROWS, 16) / ROWS)
    model.save(tmp_path / MODEL_FILE)
    assert_alike(load_folder(tmp_path, None, CUSTOM, Tables(tmp_path / "tables")), model, IDS)


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = keras.Sequential([keras.Input([1], dtype="int32"), keras.layers.Embedding(ROWS, 16, name="users")])
    model.compile("adagrad", "mse")
    leave(tmp_path, model, lambda: keras.models.clone_model(model))
    monkeypatch.setattr(finished_model, "free_memory", lambda: 64 * ROWS)
    for step in (None, 7):
        with pytest.raises(ConfigError, match=r"needs 0\.1 GB of memory.*commands predict, evaluate and export read"):
            tf2dist.load_model(tmp_path, step)
        load_folder(tmp_path, step, {}, Tables(tmp_path / "tables"))
        with monkeypatch.context() as small_disk:
            small_disk.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e6))
            with pytest.raises(
                ConfigError, match=r"TMPDIR \(.*\): the model of .* needs 0\.0 GB there, and 0\.0 GB are"
            ):
                load_folder(tmp_path, step, {}, Tables(tmp_path / "tables"))


def one_table() -> keras.Model:
    model = keras.Sequential([keras.Input([1], dtype="int32"), keras.layers.Embedding(ROWS, 16, name="users")])
    model.compile("sgd", "mse")
    return model


def test_a_full_disk(small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    """Wherever it is full, there is no model.keras, and the process lives on."""
    model, warnings = one_table(), list[str]()
    rows = model.layers[0].embeddings.numpy()
    disk = small_disk("size=100m")
    run_dir = disk / "run"

    def read(folder: Path) -> dict[str, np.ndarray]:
        return {"model/users/embeddings": in_file([rows], rows.shape, str(folder))}  # as a loop reads it

    for free_kb in (0, 4, 8, 24 << 10, 40 << 10):  # the last has room for two copies
        leave_free(disk, free_kb << 10)
        run_dir.mkdir(exist_ok=True)
        # Where next to nothing is free, reading would already fail.
        of_run = functools.partial(read, run_dir if free_kb > 8 else tmp_path)
        write_model(run_dir, model, model.optimizer, of_run, 7, one_table, warnings.append)
        assert [path.name for path in run_dir.iterdir()] == [MODEL_FILE] * (free_kb == 40 << 10)
    assert len(warnings) == 4
    assert {warning.partition(";")[0] for warning in warnings} == {
        "model.keras could not be written (No space left on device)"
    }


def test_a_folder_of_temporary_files_without_room_is_named(
    small_disk: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a quota or another program leaves less room than the file system has."""
    in_files, in_memory = tmp_path / "in_files", tmp_path / "in_memory"
    lookup = keras.layers.StringLookup()  # its vocabulary is a file, for which Keras unpacks all others, too
    lookup.adapt(WORDS)
    words = keras.Sequential([keras.Input([1], dtype="string"), lookup, keras.layers.Embedding(5, 5000)])
    words.compile("sgd", "mse")
    for folder, model, build in ((in_files, one_table(), one_table), (in_memory, words, lambda: words)):
        folder.mkdir()
        assert leave(folder, model, build) == []
    disk = small_disk("size=24m")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e12))

    def assert_refused(folder: Path, step: int | None, tables: Tables | None) -> None:
        reason = (
            f"^TMPDIR \\({disk}\\): the model of {folder} cannot be unpacked there \\(No space left on device\\); make"
        )
        with pytest.raises(ConfigError, match=reason):
            load_folder(folder, step, {}, tables)

    tables = Tables(disk / "tables")
    assert_refused(in_files, None, tables)  # what is unpacked has room, and the table beside it has none
    leave_free(disk, 64 << 10)
    for step in (None, 7):
        assert_refused(in_files, step, tables)
    assert_refused(in_memory, None, None)


def test_a_missing_folder_of_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"^TMPDIR: no folder for temporary files can be made \(No such file.*; make"):
        opening.model_of(CommandLine(tmp_path, [], {}, [], None, []))


def test_a_table_is_not_written_into_the_file_of_weights_first(tmp_path: Path) -> None:
    """Only into a file of its own, and from there into model.keras."""
    model = one_table()
    rows = model.layers[0].embeddings.numpy()

    def written() -> int:
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    before = written()
    write_model(tmp_path, model, model.optimizer, lambda: {"model/users/embeddings": rows}, 7, one_table, pytest.fail)
    assert 2 * rows.nbytes <= written() - before < 2.5 * rows.nbytes
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / MODEL_FILE).layers[0].embeddings.numpy(), rows)


def test_a_table_that_was_loaded_with_its_model_is_not_kept_beside_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory has room for two copies of the tables."""
    model, kept, make_archive = one_table(), list[Path](), finished_model._zip

    def noting(saved: Path, *rest: Any) -> None:
        kept.extend((saved.parent / "tables").glob("*"))
        make_archive(saved, *rest)

    monkeypatch.setattr(finished_model, "_zip", noting)
    model.save(earlier := tmp_path / "earlier.keras")
    rows = model.layers[0].embeddings.numpy() + 1.0
    arrays = {"model/users/embeddings": rows}
    build = functools.partial(keras.saving.load_model, earlier)
    write_model(tmp_path, model, model.optimizer, lambda: arrays, 7, build, pytest.fail)
    assert len(kept) == 1
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / MODEL_FILE).layers[0].embeddings.numpy(), rows)


def test_what_the_run_does_not_have_is_as_a_new_optimizer_makes_it(tmp_path: Path) -> None:
    """As where a step of the model's own has another optimizer for the table."""

    def build(optimizer: Callable[[], keras.Optimizer]) -> keras.Model:
        model = one_table()
        model.compile(optimizer(), "mse")
        return model

    # Adafactor gives the arguments by name with which it makes its variables.
    for optimizer in (
        functools.partial(keras.optimizers.Adagrad, initial_accumulator_value=0.25),
        keras.optimizers.Adafactor,
    ):
        make = functools.partial(build, optimizer)
        model = make()
        arrays = {"model/users/embeddings": model.layers[0].embeddings.numpy()}
        write_model(tmp_path, model, model.optimizer, functools.partial(dict, arrays), 0, make, pytest.fail)
        loaded = keras.saving.load_model(tmp_path / MODEL_FILE)
        model.optimizer.build(model.trainable_variables)
        for found, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_only_large_tables_are_left_out_of_the_memory(tmp_path: Path) -> None:
    def build() -> keras.Model:
        layers = keras.layers
        ids = keras.Input([1], dtype="int32")
        wide = layers.Dense(LARGE_BYTES // 64, use_bias=True)(layers.Flatten()(layers.Embedding(ROWS, 16)(ids)))
        model = keras.Model(ids, layers.Add()([wide, layers.Flatten()(Averaged(LARGE_BYTES // 64, 16)(ids))[:, :1]]))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model = build()
    named = {name: copies[0].numpy() for name, copies in finished_model.saved_variables(model).items()}
    slots = {f"optimizer/{name.removeprefix('model/')}/momentums": array for name, array in named.items()}
    table = f"{model.layers[1].name}/embeddings"
    assert finished_model.names_in_files(model, named | slots) == {f"model/{table}", f"optimizer/{table}/momentums"}
    keras.saving.save_model(model, tmp_path / "saved", zipped=False)
    in_files, others = sizes(tmp_path / "saved")
    # A file has no names, so that a table of a subclass, and the slots of both, are taken for one in a file.
    assert sorted(in_files) == [LARGE_BYTES] * 3 + [64 * ROWS] * 3
    assert sum(size >= LARGE_BYTES for size in others) == 3, "a Dense and its moments"


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input([1], dtype="int32"), keras.layers.Embedding(ROWS, 16)])
    with Tables(tmp_path / "tables").in_use():
        model.save(tmp_path / MODEL_FILE)
    with open(tmp_path / MODEL_FILE, "ab") as file:
        file.truncate(LARGE_BYTES)
    with pytest.raises(CheckpointError, match=r"model\.keras: cannot be loaded"):
        load_folder(tmp_path, None, {}, Tables(tmp_path / "other"))


def test_other_threads_make_their_models_in_memory(tmp_path: Path) -> None:
    layers: list[Any] = [keras.layers.Embedding(ROWS, 16) for _ in range(2)]
    with Tables(tmp_path / "tables").in_use():
        thread = threading.Thread(target=layers[0].build)
        thread.start()
        thread.join()
    layers[1].build()
    for layer in layers:
        assert np.isfinite(layer.embeddings.numpy()).all()
        assert not is_in_file(layer.embeddings)
