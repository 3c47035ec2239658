"""Loads the model of a run, as an ordinary compiled Keras model, in any process."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras

from tf2dist.checkpoint.snapshot import Snapshot, is_damage, read, unreadable
from tf2dist.checkpoint.store import Checkpoints, step_of
from tf2dist.errors import CheckpointError, ConfigError, brief_reason, reason_of
from tf2dist.files import open_to_read, path_of
from tf2dist.linux import without_warnings
from tf2dist.model.own_step import optimizers_of
from tf2dist.model.saved import ROLES, WEIGHTS, config_in, lambdas_in, leave_out_optimizer, without_optimizer
from tf2dist.process.tables_in_files import LARGE_BYTES, Tables
from tf2dist.tf_internals import error_texts
from tf2dist.training.finished_model import (
    DESCRIPTION,
    MODEL,
    MODEL_FILE,
    OPTIMIZER,
    NamedGroup,
    fill,
    lack_of_memory,
    may_be_in_file,
)

MAX_STEPS = 10  # in a message
READ_BYTES = 1 << 20  # at once
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # never of a file that is read
MAKE_ROOM = "make room there, or set TMPDIR to another folder"


class UnknownCode(ConfigError):
    """The model needs a class or function of the user's that is not known in this process.

    Attributes:
        what: the class or function, such as "the class Mine".
    """

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        self.what = f"the {kind} {name}"
        super().__init__(
            f"custom_objects: {folder} needs {self.what}, which is your own code; give custom_objects="
            f"{{{name.rpartition('>')[2]!r}: ...}}, or first import the module that registers it with "
            "keras.saving.register_keras_serializable"
        )


def load_model(
    run_dir: str | os.PathLike[str], step: int | None = None, custom_objects: Mapping[str, Any] | None = None
) -> keras.Model:
    """Loads the model of a run, compiled with its loss, metrics and optimizer, ready for predict, evaluate and fit.

    It takes inputs as the run's data has them; images as raw pixels from 0 to 255. No code in the run's files is
    executed, so you give your own classes and functions.

    Args:
        run_dir: the directory of a run that has ended, or has saved a checkpoint.
        step: the step of a checkpoint, for the weights from which the training would be resumed. None: the final
            weights, which the run has evaluated, or those of the newest checkpoint if the run has not ended.
        custom_objects: your layers, losses, metrics and functions by name; those that are registered with
            `keras.saving.register_keras_serializable` need not be given.

    Returns:
        A compiled Keras model with the state of its optimizer, so that `fit` goes on where the run has ended.

    Raises:
        ConfigError: there is no such folder, or the model needs a class that is not known here, or more memory, or
            more room in the folder of temporary files.
        CheckpointError: there is no checkpoint of that step, or a file is damaged, of another model or of another
            user.
        TaskLostError: a file cannot be read now, as with too many open files; a retry may help.
    """
    return load_folder(run_dir, step, dict(custom_objects or {}), None)


def load_folder(
    run_dir: str | os.PathLike[str], step: int | None, objects: dict[str, Any], tables: Tables | None
) -> keras.Model:
    """Loads a model as `load_model` does; with `tables` one that is not trained.

    That model has another optimizer, without slots, unless it has methods of its own that may use it.

    Args:
        tables: makes files of the large tables of embeddings; its folder may be removed when the model is there.
    """
    folder = path_of("run_dir", run_dir)
    try:
        if not folder.is_dir():
            raise ConfigError(f"run_dir ({run_dir}): there is no such folder; name the directory of a run")
        # It differs from the last checkpoint if the optimizer averages weights: the averages are evaluated, but a run
        # is resumed from the weights before averaging.
        if step is None and (folder / MODEL_FILE).exists():
            return _from_archive(folder / MODEL_FILE, objects, tables)
        return _from_checkpoint(folder, step, objects, tables)
    except OSError as error:  # damage has other errors
        if error.errno in NO_ROOM:
            raise ConfigError(
                f"TMPDIR ({tempfile.gettempdir()}): the model of {folder} cannot be unpacked there "
                f"({brief_reason(error)}); {MAKE_ROOM}"
            ) from None
        path = Path(os.fsdecode(error.filename)) if error.filename else folder
        raise unreadable(path, error, "try again when it can be") from None


def _from_checkpoint(folder: Path, step: int | None, objects: dict[str, Any], tables: Tables | None) -> keras.Model:
    snapshot = _snapshot(folder, step)
    arrays = {name: array for name, array in snapshot.arrays.items() if name.startswith((MODEL, OPTIMIZER))}
    names, groups, config = _description(folder / DESCRIPTION)
    has_large_tables = any(may_be_in_file(name, array) for name, array in arrays.items())
    if tables and has_large_tables and (without := without_optimizer(config, objects)):
        config, groups = without, []
        arrays = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    in_files = {name: array.nbytes for name, array in arrays.items() if tables and may_be_in_file(name, array)}
    _check_memory(folder, [array.nbytes for name, array in arrays.items() if name not in in_files], tables)
    with contextlib.ExitStack() as stack:
        if tables and in_files:
            _check_room(folder, tables, sum(in_files.values()))
            stack.enter_context(tables.in_use())
        model = _built(folder / DESCRIPTION, config, objects)
        try:
            fill(model, names, arrays, snapshot.num_updates, groups)
        except CheckpointError as error:
            raise CheckpointError(f"run_dir ({folder}): {error}; name another directory") from None
    missing = [owners[0] for owners, _ in groups if optimizers_of(model).keys().isdisjoint(owners)]
    if missing and not tables:  # with tables in files it is not trained
        text = f"its class gives a loaded model no {', '.join(missing)}; the state of its optimizers is left out"
        warnings.warn(f"run_dir ({folder}): {text}", stacklevel=3)
    return model


def _from_archive(path: Path, objects: dict[str, Any], tables: Tables | None) -> keras.Model:
    """The model in a model.keras."""
    size = path.stat().st_size
    if not tables or size < LARGE_BYTES:
        return _whole(path, objects, tables)
    _check_room(path.parent, tables, size)
    with tempfile.TemporaryDirectory(dir=tables.folder) as temporary:
        unpacked = Path(temporary)
        if not _loaded(path, lambda: unpack(path, unpacked, objects)):
            return _whole(path, objects, tables)
        in_files, others = _loaded(path, lambda: sizes(unpacked))
        _check_room(path.parent, tables, sum(in_files))
        _check_memory(path.parent, others, tables)
        with tables.in_use(), without_warnings("Skipping variable loading for optimizer"):
            model: keras.Model = _loaded(path, lambda: keras.saving.load_model(unpacked, custom_objects=objects))
    return model


def _whole(path: Path, objects: dict[str, Any], tables: Tables | None) -> keras.Model:
    _check_memory(path.parent, [path.stat().st_size], tables)
    model: keras.Model = _loaded(path, lambda: keras.saving.load_model(path, custom_objects=objects))
    return model


def _check_room(run_dir: Path, tables: Tables, needed: int) -> None:
    """Raises ConfigError if there is less room for the files of tables than so many bytes."""
    if needed > (free := shutil.disk_usage(tables.folder).free):
        raise ConfigError(
            f"TMPDIR ({tempfile.gettempdir()}): the model of {run_dir} needs {needed / 1e9:.1f} GB there, and "
            f"{free / 1e9:.1f} GB are free; {MAKE_ROOM}"
        )


def _check_memory(folder: Path, sizes: list[int], tables: Tables | None) -> None:
    """Raises ConfigError if a model of these sizes does not fit into the memory."""
    if lack := lack_of_memory(sizes):
        way_out = "" if tables else "; tf2dist.predict and the commands predict, evaluate and export read tables by row"
        raise ConfigError(f"run_dir ({folder}): its model {lack}; load it on another machine{way_out}")


def _snapshot(folder: Path, step: int | None) -> Snapshot:
    """The checkpoint of a step; for None the newest one that is not damaged."""
    checkpoints = Checkpoints(folder / "checkpoints")
    steps = [step_of(path) for path in checkpoints.paths()]
    if not steps:
        raise CheckpointError(
            f"run_dir ({folder}): holds neither {MODEL_FILE} nor a checkpoint; name another directory"
        )
    if step is None:
        snapshot = checkpoints.newest(lambda _: None)
        assert snapshot is not None, "there are checkpoints, and `newest` refuses if all are damaged"
        return snapshot
    if step not in steps:
        ellipsis = "..., " if len(steps) > MAX_STEPS else ""
        listed = ellipsis + ", ".join(map(str, steps[-MAX_STEPS:]))
        raise CheckpointError(f"step ({step}): there is no such checkpoint; choose one of {listed}")
    path = checkpoints.paths()[steps.index(step)]
    try:
        return read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        raise CheckpointError(f"step ({step}): {path} is damaged ({error}); choose another one") from None


def _description(path: Path) -> tuple[list[str], list[NamedGroup], dict[str, Any]]:
    """The names of the variables, what updates train, and the configuration of the model that model.json describes."""
    try:
        with open_to_read(path) as file:
            content = json.load(file)
        # Earlier versions wrote no groups.
        groups = [(list(map(str, owners)), list(map(str, trained))) for owners, trained in content.get("updates", [])]
        return list(map(str, content["variables"])), groups, dict(content["model"])
    except FileNotFoundError:
        raise CheckpointError(
            f"run_dir ({path.parent}): has no {path.name}, which a run writes when it starts; the same command with "
            "run_dir resumes the run from its checkpoint and writes it"
        ) from None
    # Of JSON of any content.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from None


def _built(path: Path, config: dict[str, Any], custom_objects: dict[str, Any]) -> keras.Model:
    """The model of a configuration, with initial weights.

    Args:
        path: of model.json.
    """
    model = _loaded(path, lambda: keras.saving.deserialize_keras_object(config, custom_objects=custom_objects))
    # One without a `call`, as of a GAN, is never built; its networks are.
    is_built = isinstance(model, keras.Model) and (model.built or model.weights)
    if not is_built or not getattr(model, "optimizer", None):
        raise CheckpointError(f"{path}: describes no compiled model; name another directory")
    return model


def _loaded(path: Path, load: Callable[[], Any]) -> Any:
    """The object that Keras loads from a file."""
    try:
        return load()
    except Exception as error:  # damaged files and classes of the user raise errors of many types
        text = error_texts.whole_text(error)
        # Keras gathers the errors of layers, and raises one that has only their texts.
        for number in NO_ROOM:
            if f"[Errno {number}]" in text:
                raise OSError(number, os.strerror(number)) from None
        if unknown := error_texts.unknown_code(text):
            raise UnknownCode(path.parent, *unknown) from None
        # Never loaded without safe mode: a model file may come from somebody else, and a lambda in it is code.
        if error_texts.is_unsafe_code(text):
            raise ConfigError(
                f"run_dir ({path.parent}): its model has {_lambda_in(path)}, which is code in the file; if you trust "
                "the file, call keras.config.enable_unsafe_deserialization() first"
            ) from None
        raise _damaged(path, error) from error


def _lambda_in(path: Path) -> str:
    roles = [found.role for found in lambdas_in(config_in(path))]
    return f"a lambda as its {roles[0]}" if roles and roles[0] != ROLES["function"] else "a Lambda layer"


def _damaged(path: Path, error: Exception) -> CheckpointError:
    """The error for the user; raises an OSError in its place if the system cannot read the file now."""
    if isinstance(error, OSError) and not is_damage(error):
        raise error
    if path.is_file():
        # Keras takes a file that it cannot open or read for one of another format.
        with open_to_read(path) as file:
            while file.read(READ_BYTES):
                pass
    return CheckpointError(f"{path}: cannot be loaded ({type(error).__name__}: {reason_of(error)})")


def unpack(path: Path, folder: Path, custom_objects: Mapping[str, Any]) -> bool:
    """Unpacks a model.keras, without the state of the optimizer if the model does not need it to evaluate or predict.

    Returns:
        False, and nothing is unpacked, if it is compressed, and so was not written by a run.
    """
    with zipfile.ZipFile(path) as archive:
        # One that comes from somebody else could fill the disk.
        if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:
            return False
        archive.extractall(folder)
    leave_out_optimizer(folder, custom_objects)
    return True


def sizes(folder: Path) -> tuple[list[int], list[int]]:
    """The bytes of each array that lies in a file when the model is loaded into `Tables`, and of each other array."""
    datasets: list[h5py.Dataset] = []
    with h5py.File(folder / WEIGHTS) as file:
        file.visititems(lambda _, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
        # Keras saves no names of variables. A Dense without a bias is taken for a table, too.
        large = {each for each in datasets if each.ndim == 2 and each.dtype == "float32" and each.nbytes >= LARGE_BYTES}
        tables = {each for each in large if len(each.parent) == 1}
        shapes = {each.shape for each in tables}
        in_files = tables | {each for each in large if each.shape in shapes and each.name.startswith("/optimizer/")}
        return [each.nbytes for each in in_files], [each.nbytes for each in datasets if each not in in_files]
