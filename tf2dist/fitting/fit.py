"""`tf2dist.fit`: `keras.Model.fit` on a cluster."""

import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tf2dist.errors import ConfigError, FitError, nearest
from tf2dist.fitting import refusals, request, shipping
from tf2dist.fitting.consoles import console_of, opening_line
from tf2dist.fitting.exit_code import give_to_script
from tf2dist.fitting.fit_run import FitRun, Result
from tf2dist.fitting.job_options import of_job
from tf2dist.fitting.request import FitArguments

Arguments = ParamSpec("Arguments")
Gathered = TypeVar("Gathered")
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


def with_arguments(
    gather: Callable[Arguments, Gathered],
) -> Callable[[Callable[[Gathered], Returned]], Callable[Arguments, Returned]]:
    """Makes a function of a dataclass one of its fields, with their order, types and defaults."""

    def decorate(function: Callable[[Gathered], Returned]) -> Callable[Arguments, Returned]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(gather).replace(return_annotation=returned)

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            for name in kwargs:
                if name not in signature.parameters:  # Python names the nearest one since 3.13 only
                    text = f"{function.__name__}() got an unexpected keyword argument '{name}'"
                    raise TypeError(f"{text}{nearest(name, signature.parameters)}")
            return function(gather(*args, **kwargs))

        functools.update_wrapper(call, function)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {name: part.annotation for name, part in signature.parameters.items()}
        call.__annotations__["return"] = returned
        return call

    return decorate


@with_value_errors
@with_arguments(FitArguments)
def fit(arguments: FitArguments) -> Result:
    """Trains a model on a cluster; the arguments up to `validation_freq` are those of `keras.Model.fit`.

    An epoch is one pass over the data by the whole cluster. With mode="async" a step is one batch of one worker,
    with mode="sync" one batch of each worker, with mode="sync_replicas" as many batches as are aggregated.

    For example, with four workers on this machine::

        four = tf2dist.Local(workers=4)
        result = tf2dist.fit(model, x, y, epochs=5, validation_split=0.1, mode="sync", cluster=four)
        print(result.history["val_accuracy"][-1], result.run_dir)
        result.model.evaluate(x_test, y_test)

    Args:
        model: a compiled model, which is trained in place; or a function without arguments that builds and compiles
            a model, the same one at each call. The function runs in this process and in each task.
        x: arrays [n, ...], or dicts, lists and tuples of them. The tasks map them from files; an array that was mapped
            with ``numpy.load(file, mmap_mode="r")`` is not copied, the tasks map its file.
        y: likewise, what the model should give; None if its losses are its own.
        batch_size: the examples in a batch of one worker; None for Keras's 32.
        epochs: how many epochs to train; with `initial_epoch`, the number of the epoch at which to end.
        verbose: 0: warnings only; 1 or "auto": progress on the standard error, in a notebook as a bar with a table;
            2: a line for each epoch, as Keras, and the lines at the beginning and the end, without progress in between.
        callbacks: called in this thread, between two steps of the cluster. Batch hooks are not called for every
            step; their `batch` is the global step.
        validation_split: the fraction of the examples, from 0 to 1, that is held out for validation: the last ones.
        validation_data: arrays (x, y) or (x, y, sample_weight) to validate on, instead of `validation_split`; or a
            function like that of `data`, of which each epoch's validation is one pass over all shards.
        shuffle: False: the examples are taken in their order, in every epoch the same.
        class_weight: by class, from 0 on, the weight of its examples in the loss.
        sample_weight: like `y`, the weight of each example in the loss.
        initial_epoch: the epoch to begin with, counted from 0.
        steps_per_epoch: the global steps of an epoch; None for one pass over the data.
        validation_steps: the batches to validate on; None for all.
        validation_batch_size: the examples in a batch of the validation. None: `batch_size` if the result depends on
            it, and otherwise a number chosen for speed.
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
        run_dir: the directory for all files of the run; a run that it already holds is resumed. None for the one that
            a job of ``tf2dist.render --command`` gives, or else for a new directory in ``outputs``.
        seed: of the order of the examples and the random numbers of layers; of the initial weights, too, if `model` is
            a function.
        options: options of the command line, such as ``{"checkpoint.every_secs": 60}``.

    Returns:
        A `tf2dist.Result` with `model`, `history`, `summary` and `run_dir`.

    A program that does not catch an error ends with its ``exit_code``, by which schedulers start it again, or not.

    Raises:
        ConfigError: an argument is wrong or not supported; the message says what to do. It is a ValueError too.
        ClusterError: TF_CONFIG, or what another engine has set, is wrong.
        DataError: `data` raises an error, or its batches have no known shape.
        CheckpointError: `run_dir` holds the run of another model, or only damaged checkpoints.
        NotFiniteError: the loss is not finite, and `TerminateOnNaN` is not among the callbacks.
        TaskFailure: your code raised an error in a task, as in a layer or a loss. The text has its traceback.
        TaskLostError: tasks were lost more often than the option ``max_restarts`` allows, or did not come. The same
            call with the same `run_dir` goes on from the last checkpoint.
        LeaderLostError: likewise, on a host without the leader: the leader is gone, or did not come.
        TfDistError: the base of all these; anything else that failed.
        KeyboardInterrupt: of Ctrl-C; the run was saved, and the text says with which `run_dir` it goes on.
        SystemExit: of SIGTERM, likewise, unless the program has a handler of its own.
    """
    started_at = time.time()
    give_to_script()
    shipping.check_caller("fit")
    arguments = request.checked(arguments)
    # A cluster on this machine is none of the job's.
    job = [] if arguments.cluster else of_job(os.environ, arguments.mode)
    config, place = request.configuration(
        arguments.mode,
        arguments.cluster,
        arguments.run_dir,
        arguments.seed,
        refusals.overrides_of(arguments.options),
        job,
    )
    console = console_of(int(arguments.verbose))
    console.note(opening_line("fit", place))
    # Before the user's functions are called and the model exists: they may use a GPU, and TensorFlow would take all of
    # its memory.
    request.leave_gpus_to_tasks()
    splits, plan = request.data_of(arguments, config, place.cluster.num_workers)
    return FitRun(arguments, splits, plan, config, place, console, started_at).execute()
