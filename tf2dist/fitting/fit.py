"""`tf2dist.fit`: `keras.Model.fit` on a cluster."""

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from tf2dist.config.schema import MODES
from tf2dist.data.splits import Splits, streamed
from tf2dist.data.stream import Load, Shard, Stream
from tf2dist.errors import ConfigError, FitError
from tf2dist.fitting import inputs, refusals, request, shipping
from tf2dist.fitting.consoles import console_of, opening_line
from tf2dist.fitting.fit_run import Result, Run, leave_gpus_to_tasks
from tf2dist.fitting.request import Local, Model

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def with_value_errors(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Makes every ConfigError a FitError, which is a ValueError too, as Keras raises for wrong arguments."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except FitError:
            raise
        except ConfigError as error:
            raise FitError(*error.args).with_traceback(error.__traceback__) from None

    return call


@with_value_errors
def fit(
    model: Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    data: Load | None = None,
    mode: str = "async",
    cluster: Local | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | Sequence[str] | None = None,
) -> Result:
    """Trains a model on a cluster; the arguments up to `validation_freq` are those of `keras.Model.fit`.

    An epoch is one pass over the data by the whole cluster. With mode="async" a step is one batch of one worker,
    with mode="sync" one batch of each worker, with mode="sync_replicas" as many batches as are aggregated.

    Args:
        model: a compiled model, which is trained in place; or a function without arguments that builds and compiles
            a model, the same one at each call. The function runs in this process and in each task.
        x, y, sample_weight: arrays [n, ...], or dicts, lists and tuples of them. The tasks map them from files; an
            array that was mapped with ``numpy.load(file, mmap_mode="r")`` is not copied, the tasks map its file.
        batch_size: the examples in a batch of one worker; None for Keras's 32.
        epochs: the epoch before which the training ends, counted from 0 like `initial_epoch`.
        verbose: 0: warnings only; 1 or "auto": progress on the standard error, in a notebook in a line that changes;
            2: a line for each epoch, as Keras.
        callbacks: called in this thread, between two steps of the cluster. Batch hooks are not called for every
            step; their `batch` is the global step.
        validation_split: the fraction of the examples, from 0 to 1, that is held out for validation: the last ones.
        validation_data: arrays (x, y) or (x, y, sample_weight) to validate on, instead of `validation_split`; or a
            function like that of `data`, of which each epoch's validation is one pass over all shards.
        shuffle: False: the examples are taken in their order, in every epoch the same.
        class_weight: by class, from 0 on, the weight of its examples in the loss.
        initial_epoch: the epoch to begin with, counted from 0.
        steps_per_epoch: the global steps of an epoch; None for one pass over the data.
        validation_steps: the batches to validate on; None for all.
        validation_batch_size: the examples in a batch of the validation; None for as many as are fast.
        validation_freq: the epochs from one validation to the next, or a list of those with one, counted from 1.
        data: instead of x, y and sample_weight, for data that do not fit into memory: a function that gets the
            `tf2dist.Shard` of a worker and returns a `tf.data.Dataset` of batches (x, y) or (x, y, sample_weight).
            It is called in each worker, and in this process to learn the shapes of the batches. Without
            `steps_per_epoch` an epoch ends with the data: of all workers, or with mode="sync" of the first one. With
            it the dataset is repeated when it ends. A run that is resumed skips the batches that each worker had
            already taken in its current pass, so it trains as if it had not been stopped, provided that every pass
            gives the same batches in the same order; with another number of workers each worker resumes at the same
            fraction of the epoch.
        mode: "async": workers and parameter servers; "sync": all-reduce; "sync_replicas": parameter servers, and each
            step is the mean of as many gradients as the option ``sync_replicas.replicas_to_aggregate`` says, by default
            one of each worker.
        cluster: None for the cluster in the environment variable TF_CONFIG, or, if that is not set, for the
            tasks of one srun of SLURM, or of another engine that numbers them, or else `Local()`.
        run_dir: the directory for all files of the run; a run that it already holds is resumed. None for a new
            directory in ``outputs``.
        seed: of the initial weights, the order of the examples, and the random numbers of layers.
        options: options of the command line, such as ``{"checkpoint.every_secs": 60}``.

    Returns:
        The trained model, its history, and the content of summary.json.

    Raises:
        ConfigError: an argument is wrong or not supported; the message says what to do. Nothing was started. It is a
            ValueError too.
        ClusterError: TF_CONFIG, or what another engine has set, is wrong.
        DataError: `data` raises an error, or its batches have no known shape.
        NotFiniteError: the loss is not finite, and `TerminateOnNaN` is not among the callbacks.
        TfDistError: the training failed, or tasks were lost too often.
        KeyboardInterrupt: of Ctrl-C; the run was saved, and the text says with which `run_dir` it goes on.
        SystemExit: of SIGTERM, likewise, unless the program has a handler of its own.
    """
    started_at = time.time()
    shipping.check_caller("fit")
    if mode not in MODES:
        raise FitError(f"mode ({mode}): must be 'async', 'sync' or 'sync_replicas'")
    refusals.check_numbers(batch_size=batch_size)
    plan = request.plan_of(
        epochs,
        initial_epoch,
        steps_per_epoch,
        validation_freq,
        validation_steps,
        validation_batch_size,
        shuffle,
    )
    config, place = request.configuration(mode, cluster, run_dir, seed, refusals.overrides_of(options))
    level = refusals.check_verbose(verbose)
    console = console_of(level)
    console.note(opening_line("fit", place))
    num_workers = place.cluster.num_workers
    is_validated_on_stream = refusals.is_function(validation_data)
    validation_arrays = None if is_validated_on_stream else validation_data
    if data is None:
        train = request.training_set(x, y, sample_weight, class_weight)
        share = 0.0 if is_validated_on_stream else validation_split
        train, validation = request.validation_set(train, validation_arrays, share, class_weight is not None)
        splits = Splits(train, validation, num_classes=None)
        # Only now: without a batch size it depends on the number of examples that the validation set leaves.
        config.train.batch_size_per_worker = inputs.batch_size_of(
            batch_size, len(train), steps_per_epoch, config.batches_per_update(num_workers)
        )
    else:
        array_arguments = {"x": x, "y": y, "sample_weight": sample_weight, "class_weight": class_weight}
        refusals.check_mode_of_stream(mode)
        refusals.check_stream(
            data, **array_arguments, validation_split=validation_split or None, shuffle=shuffle is not True
        )
        config.train.batch_size_per_worker = batch_size or inputs.DEFAULT_BATCH_SIZE
        # Before the first call of the user's function, which may use a GPU: TensorFlow would take all its memory.
        leave_gpus_to_tasks()
        stream = Stream(request.name_of(data), data, num_workers, seed, config.train.batch_size_per_worker)
        given = None if validation_arrays is None else request.validation_arrays(stream.layout, validation_arrays)
        splits = streamed(stream, given)
        plan = replace(plan, steps_per_epoch=steps_per_epoch or request.steps_of(stream, config))
        stream.repeats = plan.steps_per_epoch is not None
    if is_validated_on_stream:
        leave_gpus_to_tasks()
        first = Shard(0, num_workers, seed, config.train.batch_size_per_worker)
        other = request.validation_stream(splits.layout, validation_data, plan, first)
        splits = replace(splits, validation_stream=other)
    return Run(
        model,
        splits,
        request.with_batch_size(plan, config.train.batch_size_per_worker),
        config,
        place,
        refusals.check_callbacks(callbacks),
        level,
        console,
        started_at,
    ).execute()
