"""Turns the arguments of `fit` into the parts of a run: its data, its plan, its options."""

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf2dist.cluster.sources import find_place, of_engine
from tf2dist.cluster.spec import Place
from tf2dist.config.checks import LAZY_ROWS
from tf2dist.config.load import load
from tf2dist.config.schema import PS_MODES, DataConfig, KerasConfig, RunConfig
from tf2dist.data.arrays import Arrays, Layout, have_same_structure
from tf2dist.data.splits import OwnSplits, Splits, streamed
from tf2dist.data.stream import Load, Shard, Stream
from tf2dist.errors import FitError, kind_of
from tf2dist.fitting import inputs, refusals
from tf2dist.fitting.job_options import next_run_dir
from tf2dist.launch.launcher import completed
from tf2dist.launch.single_run import check_simulated
from tf2dist.model.source import EpochPlan

Model: TypeAlias = keras.Model | Callable[[], keras.Model]
# Keras's policies as values of devices.precision.
POLICIES = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


@dataclass(frozen=True)
class Local:
    """A cluster of processes on this machine.

    Attributes:
        workers: the number of workers, each a process.
        ps: the number of parameter servers; ignored with mode="sync" and by `tf2dist.predict`.
    """

    workers: int = 3
    ps: int = 1


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `fit`, in their order and with their defaults; `fit` says what they mean."""

    model: Model
    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: str | int = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool | str = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Sequence[int] = 1
    _: KW_ONLY
    data: Load | None = None
    mode: str = "async"
    cluster: Local | None = None
    run_dir: str | os.PathLike[str] | None = None
    seed: int = 0
    options: Mapping[str, Any] | Sequence[str] | None = None

    @property
    def is_validated_on_stream(self) -> bool:
        return refusals.is_function(self.validation_data)


FitArguments.__init__.__qualname__ = "fit"  # as Python's errors about arguments name it
NUMBERS = ("batch_size", "epochs", "steps_per_epoch", "validation_steps", "validation_batch_size")
# What is accepted of others, and as what: a list of callbacks, the number of a level.
CHECKS: dict[str, Callable[[Any], Any]] = {
    "mode": refusals.check_mode,
    "validation_freq": refusals.check_validation_freq,
    "shuffle": refusals.check_shuffle,
    "verbose": refusals.check_verbose,
    "callbacks": refusals.check_callbacks,
}


def checked(arguments: FitArguments) -> FitArguments:
    """The arguments, as far as each can be checked by itself."""
    numbers = refusals.check_numbers(**{name: getattr(arguments, name) for name in NUMBERS})
    if numbers["epochs"] is None:  # of the others None is the default
        raise FitError("epochs (None): must be a whole number of at least 1")
    numbers |= _limits(numbers, arguments.is_validated_on_stream)
    epochs, first, seed = numbers["epochs"], arguments.initial_epoch, arguments.seed
    if not refusals.is_whole(first) or not 0 <= first < epochs:
        raise FitError(f"initial_epoch ({first}): must be a whole number from 0 to {epochs - 1}")
    if not refusals.is_whole(seed):
        raise FitError(f"seed ({seed}): must be a whole number")
    others = {name: check(getattr(arguments, name)) for name, check in CHECKS.items()}
    return replace(arguments, initial_epoch=int(first), seed=int(seed), **numbers, **others)


def limit_of_keras(name: str) -> int | None:
    """The limit "max_epochs" or "max_steps_per_epoch" of Keras, which is meant for trials."""
    limit: int | None = getattr(keras.config, name, lambda: None)()  # which not every version has
    return limit


def _limits(numbers: dict[str, Any], is_validated_on_stream: bool) -> dict[str, int]:
    """Those numbers of `fit` that are beyond a limit of Keras, within it; warns of them as Keras does."""
    steps = limit_of_keras("max_steps_per_epoch")
    if steps and is_validated_on_stream:
        raise FitError(
            f"keras.config.max_steps_per_epoch ({steps}): cannot limit a validation on a function as validation_data; "
            "set it to None, and give steps_per_epoch and use dataset.take"
        )
    limits = {"epochs": limit_of_keras("max_epochs"), "steps_per_epoch": steps, "validation_steps": steps}
    # A number that is not given is as many as the data has.
    limited = {name: limit for name, limit in limits.items() if limit and (numbers[name] or math.inf) > limit}
    for name in limited.keys() - {"validation_steps"}:
        warnings.warn(f"Limiting {name} to {limited[name]}", stacklevel=2)
    return limited


def data_of(arguments: FitArguments, config: RunConfig, num_workers: int) -> tuple[Splits, EpochPlan]:
    """The data to train and to validate on, and the plan of the epochs; sets the batch size of the configuration."""
    plan = EpochPlan(**{field.name: getattr(arguments, field.name) for field in fields(EpochPlan)})
    if arguments.data is None:
        splits = _splits_of_arrays(arguments, config, num_workers)
        # Where it is the limit of Keras, it makes no epoch longer than one pass.
        batch = config.train.batch_size_per_worker * config.batches_per_update(num_workers)
        limit = limit_of_keras("max_steps_per_epoch")
        if limit and limit == plan.steps_per_epoch and limit * batch >= len(splits.train):
            plan = replace(plan, steps_per_epoch=None)
    else:
        refusals.check_stream(arguments)
        batch_size = config.train.batch_size_per_worker = arguments.batch_size or inputs.DEFAULT_BATCH_SIZE
        stream = Stream(name_of(arguments.data), arguments.data, num_workers, arguments.seed, batch_size)
        validation = None if arguments.is_validated_on_stream else arguments.validation_data
        splits = streamed(stream, None if validation is None else validation_arrays(stream.layout, validation))
        plan = replace(plan, steps_per_epoch=plan.steps_per_epoch or steps_of(stream, config))
        stream.repeats = plan.steps_per_epoch is not None
    if arguments.is_validated_on_stream:
        first = Shard(0, num_workers, arguments.seed, config.train.batch_size_per_worker)
        validated_on = validation_stream(splits.layout, arguments.validation_data, plan, first)
        splits = OwnSplits(splits.train, num_classes=None, stream=splits.stream, validation_stream=validated_on)
    if not plan.validation_batch_size and (validation := splits.validation):
        size = inputs.batch_size_of(arguments.batch_size, len(validation), plan.validation_steps, 1)  # Keras's
        # If that is the size of the training, None stays: the cluster then takes whatever size is fast, unless the
        # result depends on it.
        if plan.validation_steps or size != config.train.batch_size_per_worker:
            plan = replace(plan, validation_batch_size=size)
    return splits, plan


def _splits_of_arrays(arguments: FitArguments, config: RunConfig, num_workers: int) -> Splits:
    train = training_set(arguments.x, arguments.y, arguments.sample_weight, arguments.class_weight)
    validation_data, share = arguments.validation_data, arguments.validation_split
    if arguments.is_validated_on_stream:
        validation_data, share = None, 0.0
    train, validation = validation_set(train, validation_data, share, arguments.class_weight is not None)
    # Only now: without a batch size it depends on the number of examples that the validation set leaves.
    config.train.batch_size_per_worker = inputs.batch_size_of(
        arguments.batch_size, len(train), arguments.steps_per_epoch, config.batches_per_update(num_workers)
    )
    return Splits(train, validation, num_classes=None)


def leave_gpus_to_tasks() -> None:
    """Makes this process take only as much of a GPU's memory as it needs; too late if TensorFlow already uses it."""
    for device in tf.config.list_physical_devices("GPU"):
        with suppress(RuntimeError, ValueError):  # the GPU is in use, or has been divided into logical ones
            tf.config.experimental.set_memory_growth(device, True)


def training_set(x: Any, y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Arrays:
    """The training set."""
    refusals.check_data(x, "x", "data=load, a function that makes the dataset of each worker, or arrays")
    return inputs.training_examples(x, y, sample_weight, class_weight)


def validation_set(
    train: Arrays, validation_data: Any, validation_split: float, has_class_weight: bool = False
) -> tuple[Arrays, Arrays | None]:
    """The training set without its validation part, and the validation set or None.

    Args:
        has_class_weight: whether the weights of the training set are those of classes, which Keras leaves out of a
            validation.
    """
    # As in Keras, validation_data takes precedence over validation_split.
    if validation_data is None:
        if not validation_split:
            return train, None
        train, validation = inputs.split_off(train, validation_split)
        return train, replace(validation, sample_weight=None) if has_class_weight else validation
    return train, validation_arrays(train.layout, validation_data)


def validation_arrays(layout: Layout, validation_data: Any) -> Arrays:
    """The validation set that a user gives as arrays.

    Args:
        layout: of the training set.
    """
    ways = "validation_data=load, a function that makes the dataset of each worker, or arrays"
    refusals.check_data(validation_data, "validation_data", ways)
    validation = inputs.validation_examples(validation_data)
    _check_validation(layout, validation.layout)
    return validation


def _check_validation(layout: Layout, validation: Layout) -> None:
    """Raises FitError if a validation set has another layout than the training set."""
    (train_x, train_y, _), (x, y, _) = layout.symbolic(), validation.symbolic()
    if (y is None) != (train_y is None):
        if train_y is None:
            raise FitError("validation_data: has a y, and the training data has none; give x alone")
        raise FitError("validation_data: has no y, and the training data has one; give (x, y) or (x, y, sample_weight)")
    # Sample weights come last, and one of the two sets may have them without the other.
    pairs = zip(validation.specs, layout.specs, strict=False)
    same_trees = have_same_structure((train_x, train_y), (x, y))
    if not same_trees or not all(spec.is_compatible_with(of_train) for spec, of_train in pairs):
        raise FitError(
            f"validation_data: is {validation}, but the training data is {layout}; give arrays of the same types and "
            "shapes, in the same dicts and lists"
        )


def validation_stream(layout: Layout, load: Load, plan: EpochPlan, shard: Shard) -> Stream:
    """The stream to validate on.

    Args:
        layout: of the training set.
        shard: the first one.
    """
    if plan.validation_steps is not None:
        raise FitError(
            "validation_steps: cannot be given together with a function as validation_data; use dataset.take in it"
        )
    batch_size = plan.validation_batch_size or shard.batch_size
    stream = Stream(name_of(load), load, shard.count, shard.seed, batch_size, "validation_data")
    if stream.dataset(0).cardinality() == tf.data.INFINITE_CARDINALITY:
        raise FitError(f"{stream.shown(0)} has no end, and a validation is one pass over it; use dataset.take")
    _check_validation(layout, stream.layout)
    return stream


def steps_of(stream: Stream, config: RunConfig) -> int | None:
    """The global steps of an epoch over streams, which is one pass over all of them; None: the data end it."""
    numbers = stream.num_batches()
    if tf.data.INFINITE_CARDINALITY in numbers:
        shown = stream.shown(numbers.index(tf.data.INFINITE_CARDINALITY))
        raise FitError(f"steps_per_epoch: must be given, since {shown} has no end")
    if 0 in numbers:
        raise FitError(f"{stream.shown(numbers.index(0))} has no batch; give every worker at least one")
    if config.mode == "sync" and len(set(numbers)) == 1 and numbers[0] > 0:
        return numbers[0]
    if config.algorithm.kind == "local_sgd":
        raise FitError(
            "steps_per_epoch: must be given with algorithm=local_sgd, whose workers do not know in each step whether "
            "the data of another one have ended"
        )
    return None


def configuration(
    mode: str, cluster: Local | None, run_dir: Any, seed: int, overrides: list[str], job: Sequence[str] = ()
) -> tuple[RunConfig, Place]:
    """The options of the run, and the place of this process in the cluster.

    Args:
        job: options of the job that runs this script.
    """
    if cluster is not None and not isinstance(cluster, Local):
        raise FitError(f"cluster: is {kind_of(cluster)}; give tf2dist.Local(workers=3, ps=1), or set TF_CONFIG")
    if not isinstance(run_dir, str | os.PathLike | None):
        raise FitError(f"run_dir: is {kind_of(run_dir)}; give the path of a directory")
    tf_config = os.environ.get("TF_CONFIG")
    arguments = [f"mode={mode}", f"seed={seed}", *job]
    is_known = tf_config or any(option.startswith("cluster=") for option in job)
    if not cluster and not is_known and (engine := of_engine(os.environ)):
        arguments.append(f"cluster={engine}")
    elif cluster or not is_known:
        cluster = cluster or Local()
        refusals.check_numbers(workers=cluster.workers)
        arguments += ["cluster=local", f"cluster.num_workers={cluster.workers}"]
        arguments += [f"cluster.num_ps={cluster.ps}"] if mode in PS_MODES else []
    config = load([*arguments, *overrides], tf_config)
    # Not among the options above: a path may have signs in it that Hydra's grammar cannot read.
    if run_dir is not None:
        config.run_dir = os.fspath(run_dir)
    elif config.run_dir:
        config.run_dir = next_run_dir(config.run_dir)
    place = find_place(config, os.environ)
    check_simulated(config, place.cluster)
    return config, place


def name_of(model: Model | Load) -> str:
    """The name of a model or function, in letters that may stand in the name of a folder."""
    name = model.name if isinstance(model, keras.Model) else getattr(model, "__name__", type(model).__name__)
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_")[:64] or "model"


def set_model_options(config: RunConfig, model: keras.Model, name: str, data: str) -> None:
    """Fills in the options that come from the model and from the settings of Keras in this process.

    Args:
        data: "arrays" or "stream".
    """
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy().name
    if floatx != "float32":
        raise FitError(f"keras.config.floatx ({floatx}): must be float32, the type in which updates travel")
    if policy not in POLICIES:
        raise FitError(f"keras.config.dtype_policy ({policy}): must be one of {', '.join(POLICIES)}")
    # Only names: the summary and the checkpoints show them, but the tasks get model and data from the job's folder.
    config.model, config.data = {"name": name}, DataConfig(name=data)
    if optimizer := getattr(model, "optimizer", None):  # a prediction needs none
        lazy_rows = {name: value for name, value in config.optimizer.items() if name == LAZY_ROWS}
        config.optimizer = {"name": re.sub(r"\W+", "_", optimizer.name)} | lazy_rows
    config.keras = KerasConfig(
        floatx=floatx, image_data_format=keras.config.image_data_format(), epsilon=keras.config.epsilon()
    )
    if config.devices.precision == "float32":
        config.devices = replace(config.devices, precision=POLICIES[policy])
    # Of dense and recurrent layers; those of convolutions have more dimensions, tables of embeddings other names.
    kernels = [v for v in model.trainable_variables if v.name.endswith("kernel") and len(v.shape) == 2]
    config.devices = completed(config.devices, [math.prod(kernel.shape) for kernel in kernels])
    # On a machine with a GPU Keras sets jit_compile by itself unless the user has set it, so True says nothing there.
    if model.jit_compile and not tf.config.list_physical_devices("GPU"):
        config.devices = replace(config.devices, xla=True)
    if model.steps_per_execution > 1 and config.train.steps_per_execution is None:
        config.train.steps_per_execution = model.steps_per_execution
