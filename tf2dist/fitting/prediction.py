"""`tf2dist.predict`: `keras.Model.predict` on a cluster."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.cluster.spec import Place, Task
from tf2dist.cluster.validation import read_tf_config
from tf2dist.config.compose import name_of
from tf2dist.config.schema import OPTIONS, RunConfig
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import FitError, TaskFailure, kind_of, reason_of, users_location
from tf2dist.files import write_whole
from tf2dist.fitting import inputs, refusals, request, shipping
from tf2dist.fitting.consoles import console_of, opening_line
from tf2dist.fitting.exit_code import give_to_script
from tf2dist.fitting.fit import with_value_errors
from tf2dist.fitting.fit_run import as_public_error, private_folder, run_tasks
from tf2dist.fitting.ranges import DESCRIPTION, Ranges, range_size
from tf2dist.fitting.request import Local
from tf2dist.fitting.session import FitSession
from tf2dist.launch.console import rate_text
from tf2dist.launch.run_dir import locked, make_run_dir
from tf2dist.process.tables_in_files import Tables
from tf2dist.registry import ARRAYS_OF_FIT
from tf2dist.tools.finished.load_model import load_folder

SAMPLE = 1024  # examples by which other data are noticed; reading gigabytes would delay every start
# What differs, for messages.
NAMES = {"model": "another model, or other weights", "x": "other examples", "batch_size": "another batch_size"}


@with_value_errors
def predict(
    model: keras.Model | Callable[[], keras.Model] | str | os.PathLike[str],
    x: Any,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    *,
    cluster: Local | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | Sequence[str] | None = None,
) -> Any:
    """The predictions of a model for all examples, in their order, computed by all workers of a cluster.

    They are those of `keras.Model.predict` with the same batches, apart from rounding. Whole ranges of batches go to
    the workers, and a worker that has no more takes those of others. What a range gives is written to a file in
    `run_dir`: after a stop, a kill or a loss the same call goes on, also with another number of workers.

    Args:
        model: with its weights, compiled or not; or a function without arguments that returns one, which runs in this
            process and in each worker; or the directory of a run, as for `tf2dist.load_model`. The model's own
            `predict_step` is used.
        x: as for `tf2dist.fit`: arrays [n, ...], or dicts, lists and tuples of them. The workers map them from files;
            an array that was mapped with ``numpy.load(file, mmap_mode="r")`` is not copied.
        batch_size: the examples in a batch; None for Keras's 32.
        verbose: 0: warnings only; 1 or "auto": progress on the standard error, in a notebook as a bar;
            2: the lines at the beginning and the end, without progress in between.
        cluster: as for `tf2dist.fit`. A prediction has workers alone, so `Local.ps` means nothing.
        run_dir: the directory of this prediction, and not that of the run; a prediction that it already holds goes on,
            or is returned. On many hosts all must see the same directory. None for a new one in ``outputs``.
        options: options of the command line about the cluster: ``cluster.*``, ``task.*``, ``max_restarts``,
            ``watchdog_secs``, ``startup_timeout_secs``, ``grace_secs``, ``devices.gpu_memory_fraction`` and
            ``devices.onednn``.

    Returns:
        What `keras.Model.predict` returns, in arrays that are mapped from ``run_dir/predictions``; what is written
        into them stays in memory. On many hosts None where worker 0 is not.

    Raises:
        ConfigError: an argument is wrong or not supported; the message says what to do. It is a ValueError too.
        ClusterError: TF_CONFIG, or what another engine has set, is wrong.
        CheckpointError: the directory holds no model.
        TaskFailure: your code raised an error in a task, as in a layer. The text has its traceback.
        TaskLostError: tasks were lost more often than the option ``max_restarts`` allows, or did not come.
        TfDistError: the base of all these; anything else that failed.
        KeyboardInterrupt: of Ctrl-C; what is done is kept, and the text says with which `run_dir` it goes on.
        SystemExit: of SIGTERM, likewise, unless the program has a handler of its own.
    """
    started_at = time.time()
    give_to_script()
    shipping.check_caller("predict")
    batch_size = refusals.check_numbers(batch_size=batch_size)["batch_size"]
    config, place = configuration(cluster, run_dir, options)
    level = refusals.check_verbose(verbose)
    console = console_of(level)
    console.note(opening_line("predict", place))
    refusals.check_data(x, "x")
    examples = inputs.training_examples(x, None, None, None)
    limit = request.limit_of_keras("max_steps_per_epoch")
    batch_size = inputs.batch_size_of(batch_size, len(examples), limit, 1)
    if limit:
        console.warn(f"Limiting steps_per_epoch to {limit}")
        examples = examples[: limit * batch_size]

    request.leave_gpus_to_tasks()
    with private_folder() as job:
        tables = Tables(job / shipping.TABLES)
        sent = load_folder(model, None, {}, tables) if isinstance(model, str | os.PathLike) else model
        local = model_with_weights(sent)
        name = request.name_of(local)
        outputs = outputs_of(local, name, examples)
        request.set_model_options(config, local, name, ARRAYS_OF_FIT)
        shipping.ship(job, sent, name, Splits(examples, num_classes=None), None, tables)
        config.run_dir = str(make_run_dir(config, "predict"))
        identity = {"model": digest_of_model(local), "x": digest_of_examples(examples), "batch_size": batch_size}
        ranges = resume_or_create(Path(config.run_dir), identity, examples, place)
        if not ranges.is_complete():
            session = FitSession(job, identity, None, 0)
            try:
                run_tasks(config, place, console, started_at, session)
            except TaskFailure as failure:
                raise as_public_error(failure) from None
    if not place.leads:
        return None
    with locked(ranges.run_dir):
        arrays = ranges.join()
    secs = time.time() - started_at
    console.note(f"{len(examples):,} examples in {secs:.1f} s ({rate_text(len(examples) / secs)}/s)\n{ranges.run_dir}")
    # Plain arrays; of bfloat16, which numpy's files do not know, they have the bytes.
    typed = [
        np.asarray(array.view(dtype) if array.dtype.kind == "V" else array)
        for array, dtype in zip(arrays, keras.tree.flatten(outputs), strict=True)
    ]
    return keras.tree.pack_sequence_as(outputs, typed)


def configuration(
    cluster: Local | None, run_dir: Any, options: Mapping[str, Any] | Sequence[str] | None
) -> tuple[RunConfig, Place]:
    """The options of the prediction, and the place of this process among the workers."""
    overrides = refusals.overrides_of(options)
    for override in overrides:
        name = name_of(override)
        known = OPTIONS.get(name)
        # Of an unknown one in the section of the cluster the configuration says which was meant.
        if not (known.predicts if known else name.startswith("cluster.")):
            raise FitError(f"options: {name} means nothing in a prediction; leave it out")
    if cluster is None and os.environ.get("TF_CONFIG") and "ps" in read_tf_config(os.environ)[0]:
        raise FitError("TF_CONFIG: job ps: a prediction has workers alone; leave out ps and chief, and start none")
    config, (there, task) = request.configuration("sync", cluster, run_dir, 0, overrides)
    if task not in there.training_tasks:
        raise FitError(f"{task}: takes no part in a prediction; start none")
    if not there.is_managed and run_dir is None:
        raise FitError("run_dir (None): must be given on many hosts; give a directory that all of them see")
    # As asynchronous workers these have no state of their own: one that is lost is started again alone, or the others
    # go on without it, and each uses one device.
    config.mode = "async"
    addresses = tuple(map(there.address, there.training_tasks))
    workers = replace(there, mode="async", jobs={"worker": addresses})
    return config, Place(workers, Task("worker", there.training_tasks.index(task)))


def model_with_weights(model: Any) -> keras.Model:
    """The model to predict with, in this process."""
    if not isinstance(model, keras.Model) and callable(model):
        model = model()
    if not isinstance(model, keras.Model):
        raise FitError(
            f"model: is {kind_of(model)}; give a keras.Model with its weights, a function that returns one, or the "
            "directory of a run"
        )
    if not model.built:
        raise FitError(f"model ({model.name}): has no weights yet; train it, load them, or give the directory of a run")
    return model


def outputs_of(model: keras.Model, name: str, examples: Arrays) -> Any:
    """The dtypes of the model's outputs, in their structure."""
    changed: set[int] = set()
    outputs: list[Any] = []

    def step(x: Any) -> None:
        with keras.StatelessScope() as scope:
            outputs.append(model.predict_step(keras.utils.pack_x_y_sample_weight(x)))
        changed.update(scope.state_mapping)

    try:
        if model.run_eagerly:
            step(keras.tree.map_structure(tf.convert_to_tensor, examples[:1].x))
        else:
            specs, _, _ = examples.layout.pack(examples.layout.batched(None))
            graph = tf.function(step, autograph=False).get_concrete_function(specs).graph
            # Of TensorFlow's own variables, of which the scope does not know.
            changed.update(id(op) for op in graph.get_operations() if op.type.startswith("Assign"))
    except Exception as error:  # Keras raises errors of many types, and user code of any
        raise FitError(
            f"x: does not fit model ({name}), or its predict_step fails ({reason_of(error)}{users_location(error)}); "
            "give what it takes"
        ) from error
    if changed:
        paths = [variable.path for variable in model.variables if id(variable) in changed]
        raise FitError(
            f"model ({name}): its prediction changes {paths[0] if paths else 'the states of a layer'}, so a batch "
            "depends on those before it, which other workers predict; use model.predict, or leave out random and "
            "stateful layers"
        )
    return keras.tree.map_structure(lambda output: _dtype_of(output, name), outputs[0])


def _dtype_of(output: Any, name: str) -> np.dtype[Any]:
    if not isinstance(output, tf.Tensor) or output.dtype == tf.string:
        kind = "text" if isinstance(output, tf.Tensor) else kind_of(output)
        raise FitError(f"model ({name}): its prediction gives {kind}, and must give dense numbers; use model.predict")
    dtype: np.dtype[Any] = np.dtype(output.dtype.as_numpy_dtype)
    return dtype


def resume_or_create(run_dir: Path, identity: dict[str, Any], examples: Arrays, place: Place) -> Ranges:
    """The ranges of a prediction that the directory holds, or of a new one, which the leader writes down."""
    path = run_dir / DESCRIPTION
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if (run_dir / "config.yaml").exists() or (run_dir / "checkpoints").exists():
            raise FitError(f"run_dir ({run_dir}): is that of a training; name another for the predictions") from None
        size = range_size(len(examples), identity["batch_size"], place.cluster.num_workers)
        found = identity | {"range_size": size}
        if place.leads:
            with locked(run_dir):
                if path.exists():  # another call has come first
                    found = json.loads(path.read_bytes())
                else:
                    write_whole(path, json.dumps(found, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise FitError(f"run_dir ({run_dir}): {DESCRIPTION} cannot be read ({error}); name another one") from None
    for key, what in NAMES.items():
        if found.get(key) != identity[key]:
            raise FitError(f"run_dir ({run_dir}): holds predictions with {what}; name another one, or remove it")
    return Ranges(run_dir, len(examples), found["range_size"])


def digest_of_model(model: keras.Model) -> str:
    """A hash of the model's weights and, unless a class of it has no get_config, of its configuration."""
    text = ""
    with suppress(Exception):  # get_config of the user's layers may raise anything
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        config = json.loads(json.dumps(config), object_hook=_without_seed)
        # Keras numbers layers and objects by what the process has made before.
        text = re.sub(r', "shared_object_id": \d+|_\d+(?=")', "", json.dumps(config, sort_keys=True))
    digest = hashlib.sha256(text.encode())
    for variable in model.weights:
        # Without a copy: a table may be larger than the memory.
        array = np.asarray(tf.convert_to_tensor(variable))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _without_seed(described: dict[str, Any]) -> dict[str, Any]:
    # Without a seed a layer such as RandomFlip draws one of its own, in each process another.
    if described.get("module") == "keras.layers":
        described["config"].pop("seed", None)
    return described


def digest_of_examples(examples: Arrays) -> str:
    """A hash of their number, types and shapes, and of some of them."""
    digest = hashlib.sha256(str(examples).encode())
    chosen = np.linspace(0, len(examples) - 1, min(SAMPLE, len(examples))).astype(np.int64)
    for leaf in examples.take(chosen):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
