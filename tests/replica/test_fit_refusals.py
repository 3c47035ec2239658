"""What `fit` refuses, by name and with the way out, before anything is started."""

import inspect
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tf2dist.errors import FitError
from tf2dist.fitting import refusals, request, shipping
from tf2dist.fitting.fit_run import alone_with
from tf2dist.launch import single_run
from tf2dist.tf_constants import ONEDNN

X = np.arange(120.0).reshape(40, 3)
Y = X.sum(1)


def model(**compiled: Any) -> keras.Model:
    made = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    made.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return made


def two_outputs() -> keras.Model:
    x = keras.Input([3], name="x")
    model = keras.Model(x, {"a": keras.layers.Dense(1, name="a")(x), "b": keras.layers.Dense(1, name="b")(x)})
    model.compile("sgd", {"a": "mse", "b": "mae"})
    return model


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


def constrained() -> keras.Model:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_constraint="non_neg")])
    model.compile("sgd", "mse")
    return model


def scaled() -> keras.Model:
    made = uncompiled()
    made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    return made


def frozen() -> keras.Model:
    made = model()
    made.trainable = False
    return made


class Unbuildable(keras.optimizers.SGD):
    def build(self, variables: Any) -> None:
        raise RuntimeError("no slots")


def with_optimizer_of_another() -> keras.Model:
    other = model()
    other.optimizer.build(other.trainable_variables)
    return model(optimizer=other.optimizer)


class WithoutConfig(keras.layers.Layer):
    def __init__(self, made_of: Any) -> None:
        super().__init__()

    def call(self, inputs: Any) -> Any:
        return inputs


def without_config() -> keras.Model:
    model = keras.Sequential([keras.Input([3]), WithoutConfig(print), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Unloadable(keras.layers.Layer):
    def __init__(self, made_of: Any) -> None:
        super().__init__()
        self.made_of = made_of

    def call(self, inputs: Any) -> Any:
        return inputs

    def get_config(self) -> dict[str, Any]:
        return {}


def unloadable() -> keras.Model:
    model = keras.Sequential([keras.Input([3]), Unloadable(1), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


SCALE = 2.0


def scaled_by_lambda(**arguments: Any) -> keras.layers.Layer:
    return keras.layers.Lambda(lambda x: sum(x * SCALE for _ in range(2)), **arguments)


def lambda_of_a_function() -> keras.layers.Layer:
    def twice(x: Any) -> Any:
        return 2 * x

    return keras.layers.Lambda(lambda x: twice(x))


# By its role and what it uses; None if Keras cannot load it at all.
LAMBDAS: dict[str, tuple[str | None, Callable[[], keras.Model]]] = {
    "Lambda layer": ("SCALE", lambda: compiled_with(scaled_by_lambda())),
    "Lambda layer ": ("SCALE", lambda: compiled_with(scaled_by_lambda(output_shape=(3,)))),
    "Lambda layer  ": ("twice", lambda: compiled_with(lambda_of_a_function())),
    "Lambda layer   ": (None, lambda: compiled_with(keras.layers.Lambda(lambda x, by=SCALE: x * by))),
    "mask": ("SCALE", lambda: compiled_with(keras.layers.Lambda(lambda x: x, mask=lambda inputs, mask: SCALE))),
    "loss": ("SCALE", lambda: compiled_with(loss=lambda y, p: SCALE * (y - p) ** 2)),
    "loss ": ("SCALE", lambda: compiled_with(loss={"last": lambda y, p: SCALE * (y - p) ** 2})),
    "metric": ("SCALE", lambda: compiled_with(metrics=["mae", lambda y, p: SCALE * (y - p)])),
    "metric ": ("SCALE", lambda: compiled_with(weighted_metrics=[lambda y, p: SCALE * (y - p)])),
    "activation": (None, lambda: compiled_with(keras.layers.Dense(3, activation=lambda x: 2 * x))),
    "activation ": (None, lambda: compiled_with(keras.layers.Activation(lambda x: 2 * x))),
    "kernel_regularizer": (None, lambda: compiled_with(keras.layers.Dense(3, kernel_regularizer=lambda w: 2 * w))),
}


def compiled_with(*layers: keras.layers.Layer, loss: Any = "mse", **arguments: Any) -> keras.Model:
    inputs = keras.Input([3])
    inner = keras.Sequential(layers) if layers else keras.layers.Identity()
    model = keras.Model(inputs, {"last": keras.layers.Dense(1)(inner(inputs))})
    model.compile("sgd", loss, **arguments)
    return model


class LooksAtValidationBatches(keras.callbacks.Callback):  # type: ignore[misc]
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@dataclass
class Now:
    """Makes its model within the test: a process that has joined a cluster cannot read variables made before."""

    make: Callable[[], keras.Model]


calls = keras.callbacks
LOGS = calls.LambdaCallback(on_train_batch_end=lambda batch, logs: print(logs))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "fast"}, "mode (fast): must be 'async', 'sync' or 'sync_replicas'"),
    "batch_size": ({"batch_size": 0}, "batch_size (0): must be a whole number"),
    "one example": ({"x": X[:1], "y": Y[:1]}, "x: has 1 example to train on, for 3 workers; use fewer workers"),
    "epochs": ({"epochs": 2.0}, "epochs (2.0): must be a whole number"),
    "no epochs": ({"epochs": None}, "epochs (None): must be a whole number"),
    "initial_epoch": ({"initial_epoch": 1}, "initial_epoch (1): must be a whole number from 0 to 0"),
    "steps_per_epoch": ({"steps_per_epoch": -1}, "steps_per_epoch (-1)"),
    "validation_steps": ({"validation_steps": 0}, "validation_steps (0)"),
    "validation_batch_size": ({"validation_batch_size": True}, "validation_batch_size (True)"),
    "validation_freq": ({"validation_freq": 0}, "validation_freq (0)"),
    "no validation_freq": ({"validation_freq": None}, "validation_freq (None)"),
    "shuffle": ({"shuffle": "never"}, "shuffle (never): must be True or False"),
    "verbose": ({"verbose": 3}, "verbose (3): must be 'auto', 0"),
    "seed": ({"seed": 1.5}, "seed (1.5): must be a whole number"),
    "cluster": ({"cluster": "local"}, "cluster: is a str; give tf2dist.Local"),
    "workers": ({"cluster": tf2dist.Local(workers=0)}, "workers (0): must be a whole number of"),
    "an option of fit": ({"options": {"train.epochs": 3}}, "train.epochs is the argument epochs of fit"),
    "an option of the command": ({"options": ["model=cnn"]}, "model belongs to the command line"),
    "Hydra's name of run_dir": ({"options": ["hydra.run.dir=x"]}, "options: hydra.run.dir belongs to the command line"),
    "a launcher of Hydra": ({"options": {"hydra/launcher": "joblib"}}, "hydra/launcher belongs to the command line"),
    "no such option": ({"options": {"checkpoint.often": 1}}, "checkpoint.often"),
    "a wrong value of an option": ({"options": {"checkpoint.keep": 0}}, "checkpoint.keep (0)"),
    "a text of options": ({"options": "seed=1"}, "options (seed=1): must be a list or a dict"),
    "a number of options": ({"options": 5}, "options (5): must be a list or a dict"),
    "run_dir": ({"run_dir": 5}, "run_dir: is an int; give the path of a directory"),
    "callbacks": ({"callbacks": [print]}, "callbacks: has a builtin_function_or_method"),
    "a hook of validation batches": (
        {"callbacks": [LooksAtValidationBatches()]},
        "on_test_batch_end, which would not be called, since all workers validate at once; use on_test_begin and",
    ),
    "a backup": ({"callbacks": [calls.BackupAndRestore("b")]}, "BackupAndRestore is not needed; give run_dir"),
    "a profile": (
        {"callbacks": [calls.TensorBoard("board", profile_batch=(2, 3))]},
        "TensorBoard has a profile_batch, which would profile this process, but others train; leave it out, and give",
    ),
    "swapping": ({"callbacks": [calls.SwapEMAWeights()]}, "leave it out: with use_ema=True"),
    "swapping in sync": ({"callbacks": [calls.SwapEMAWeights()], "mode": "sync"}, "leave it out"),
    "no model": ({"model": 5}, "model: is an int; give a compiled keras.Model, or a function"),
    "a function of nothing": ({"model": lambda: None}, "its function returns None, but must return a keras.Model"),
    "not compiled": ({"model": uncompiled}, "is not compiled; call model.compile"),
    "not compiled itself": ({"model": Now(uncompiled)}, "is not compiled; call model.compile"),
    "eager": ({"model": lambda: model(run_eagerly=True)}, "run_eagerly=True, but the tasks compile"),
    "a LossScaleOptimizer": (
        {"model": scaled},
        "a LossScaleOptimizer leaves out the updates whose gradients overflow, of which with mode=async nobody",
    ),
    "nothing to train": ({"model": frozen}, "has no trainable variables"),
    "an optimizer without slots": (
        {"model": lambda: model(optimizer=Unbuildable())},
        f"its optimizer Unbuildable cannot be built (no slots ({__file__}:",
    ),
    "the optimizer of another": (
        {"model": with_optimizer_of_another},
        "its optimizer SGD was built for other variables",
    ),
    "no get_config": (
        {"model": Now(without_config)},
        "`__init__()`, and therefore the object must override `get_config()` in order to be serializable.",
    ),
    "constraints": (
        {"model": constrained},
        "has a constraint, which concurrent updates of several workers would break",
    ),
    "cannot be loaded": ({"model": Now(unloadable)}, "give its classes a get_config, or give a function"),
    "a dataset": ({"x": iter([])}, "x: has a list_iterator in place of an array"),
    "class and sample weights": ({"sample_weight": np.ones(40), "class_weight": {0: 1.0}}, "class_weight: cannot be"),
    "no y": ({"y": None}, "y: is None, and model (model) has losses or metrics that compare with it"),
    "y of too many outputs": (
        {"y": [Y, Y]},
        "y ([*, *]): must be built like the outputs of the model, *; give an array",
    ),
    "y of too few outputs": (
        {"model": two_outputs},
        "y (*): must be built like the outputs of the model, {'a': *, 'b'",
    ),
    "y of other outputs": (
        {"model": two_outputs, "y": {"a": Y, "c": Y}},
        "y ({'a': *, 'c': *}): must be built like the outputs of the model, {'a': *, 'b': *}; give an array for each",
    ),
    "x of another shape": ({"x": X[:, :2]}, "model (model): takes inputs of [3], and the data has [2]"),
    "x of two arrays": ({"x": [X, X]}, "model (model): has 1 inputs, and x of the data has 2"),
    "validation without labels": ({"validation_data": [X]}, "validation_data: has no y, and the training data has"),
    "a split": ({"validation_split": 1.5}, "validation_split (1.5)"),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(single_run, "run_host", lambda *args: pytest.fail("a wrong call is run"))
    return tmp_path


@pytest.mark.parametrize("role", LAMBDAS)
def test_a_lambda_that_would_fail_in_the_tasks_is_refused(role: str, nothing_starts: Path) -> None:
    used, make = LAMBDAS[role]
    with pytest.raises(FitError) as error:
        tf2dist.fit(make(), X, {"last": Y}, epochs=1)
    what = f"the lambda of its {role.strip()} uses {used}, which Keras does not save with it"
    if used is None:
        what = f"has a lambda as its {role.strip()}, which Keras saves but cannot load again"
    assert f"{what}; give a function with a name in its place, or a function that builds the model" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_lambda_without_its_source_is_refused(nothing_starts: Path) -> None:
    loss = eval("lambda y, p: (y - p) ** 2")
    with pytest.raises(
        FitError, match=r"Keras cannot save it \(could not get source code\); give a function that builds"
    ):
        tf2dist.fit(compiled_with(loss=loss), X, {"last": Y}, epochs=1)


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_call_is_refused(what: str, nothing_starts: Path) -> None:
    arguments, words = REFUSED[what]
    given = {"model": model, "x": X, "y": Y, "batch_size": 4, **arguments}
    if isinstance(given["model"], Now):
        given["model"] = given["model"].make()
    with pytest.raises(tf2dist.ConfigError) as told:
        tf2dist.fit(**given)
    assert words in str(told.value)
    assert isinstance(told.value, ValueError), "Keras raises one for a wrong argument"
    assert len(str(told.value).splitlines()) == 1
    assert list(nothing_starts.iterdir()) == []


def test_sync_accepts_what_only_async_refuses(nothing_starts: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="a wrong call is run"):
        tf2dist.fit(constrained, X, Y, batch_size=4, mode="sync")


def test_settings_of_keras_that_tasks_cannot_use_are_refused(nothing_starts: Path) -> None:
    keras.config.set_floatx("float16")
    try:
        with pytest.raises(tf2dist.ConfigError, match=r"keras.config.floatx \(float16\)"):
            tf2dist.fit(model, X, Y, 4)
    finally:
        keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float16")
    try:
        with pytest.raises(tf2dist.ConfigError, match=r"dtype_policy \(float16\)"):
            tf2dist.fit(model, X, Y, 4)
    finally:
        keras.config.set_dtype_policy("float32")


def test_with_float16_the_loss_is_scaled_in_sync_only(nothing_starts: Path) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for mode in ("async", "sync_replicas"):
            with pytest.raises(tf2dist.ConfigError, match=rf"a LossScaleOptimizer .* mode={mode} .*auto_scale_loss"):
                tf2dist.fit(model, X, Y, 4, mode=mode)
        with pytest.raises(pytest.fail.Exception, match="a wrong call is run"):
            tf2dist.fit(model, X, Y, 4, mode="sync")
    finally:
        keras.config.set_dtype_policy("float32")


def test_fit_has_the_arguments_of_keras_and_then_its_own() -> None:
    """The list of arguments is a dataclass, and people, editors and pages see a function of its fields."""
    own = inspect.signature(tf2dist.fit).parameters
    of_keras = list(inspect.signature(keras.Model.fit).parameters.values())[1:]
    model, *shared = list(own.values())[: len(of_keras) + 1]
    assert (model.name, model.default) == ("model", inspect.Parameter.empty)
    assert [(part.name, part.default, part.kind) for part in shared] == [
        (part.name, part.default, part.kind) for part in of_keras
    ]
    assert {part.kind for part in list(own.values())[len(of_keras) + 1 :]} == {inspect.Parameter.KEYWORD_ONLY}
    assert {*request.NUMBERS, *request.CHECKS, *refusals.ALTERNATIVES} <= {*own}
    with pytest.raises(TypeError, match=r"^fit\(\) got an .* argument 'epoch'; did you mean epochs\?$"):
        tf2dist.fit(model, epoch=1)  # type: ignore[call-arg]


def test_a_call_in_a_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "is_task", True)
    with pytest.raises(tf2dist.ConfigError, match="was called in a task of a run"):
        tf2dist.fit(model, X, Y)


def test_a_local_cluster_is_refused_if_tf_config_is_set(monkeypatch: pytest.MonkeyPatch, nothing_starts: Path) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(tf2dist.ConfigError, match="TF_CONFIG is set"):
        tf2dist.fit(model, X, Y, 4, cluster=tf2dist.Local())


def test_an_evaluator_without_a_validation_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, nothing_starts: Path
) -> None:
    task = '"task": {"type": "evaluator", "index": 0}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {{"worker": ["a:1"]}}, {task}}}')
    with pytest.raises(FitError, match=r"^validation_data: must be given for evaluator-0, which evaluates it; or"):
        tf2dist.fit(model, X, Y, 4, mode="sync", run_dir="run")


def test_a_task_of_a_slurm_step_takes_its_place_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"JOB_ID": "9", "STEP_ID": "0", "STEP_NODELIST": "a,b", "STEP_TASKS_PER_NODE": "2(x2)", "PROCID": "2"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for tasks, workers, kind in (("4", 4, "slurm"), ("1", 3, "local")):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        config, place = request.configuration("sync", None, None, 0, [])
        assert (config.cluster.kind, place.cluster.num_workers) == (kind, workers)
    for cluster in (tf2dist.Local(workers=2), tf2dist.Local(workers=2, ps=3)):
        place = request.configuration("sync", cluster, None, 0, [])[1]
        assert (place.cluster.num_workers, place.cluster.num_ps) == (2, 0)


def test_a_call_in_a_pod_takes_its_place_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF2DIST_ADDRESSES", "a,b")
    monkeypatch.setenv("TF2DIST_RANK", "1")
    config, place = request.configuration("sync", None, None, 0, [])
    assert (config.cluster.kind, place.cluster.num_workers, place.task.index) == ("ranks", 2, 1)


# Accepted arguments reach the run unchanged.


def given_to_the_run(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration of the run, and the job that tasks would read."""
    results: list[Any] = []

    def run(host: Any) -> Any:
        results[:] = [host.config, job := shipping.ShippedSource(host.session.job), job.load()]
        return {}

    monkeypatch.setattr(single_run, "run_host", run)
    monkeypatch.setattr(shipping, "is_task", False)
    tf2dist.fit(**{"model": model, "x": X, "y": Y, "batch_size": 4, "verbose": 0, **arguments})
    monkeypatch.setattr(shipping, "is_task", False)
    config, job, splits = results
    return config, {**vars(job), "splits": splits}


HALF = {"validation_split": 0.5}
PARAMETERS: dict[str, tuple[dict[str, Any], Callable[[Any, dict[str, Any]], bool]]] = {
    "batch_size": ({"batch_size": 5}, lambda config, job: config.train.batch_size_per_worker == 5),
    "no batch_size": (
        {"batch_size": None, "steps_per_epoch": 10, "cluster": tf2dist.Local(2), "validation_data": (X, Y)},
        lambda config, job: (config.train.batch_size_per_worker, job["plan"].validation_batch_size) == (4, 32),
    ),
    "epochs": ({"epochs": 7, "initial_epoch": 3}, lambda _, job: job["plan"].epochs == 7),
    "initial_epoch": ({"epochs": 7, "initial_epoch": 3}, lambda _, job: job["plan"].initial_epoch == 3),
    "steps_per_epoch": ({"steps_per_epoch": 2}, lambda _, job: job["plan"].steps_per_epoch == 2),
    "shuffle": ({"shuffle": False}, lambda _, job: job["plan"].shuffle is False),
    "shuffled": ({}, lambda _, job: job["plan"].shuffle is True),
    "shuffled in batches": ({"shuffle": "batch"}, lambda _, job: job["plan"].shuffle is False),
    "validation_data": ({"validation_data": (X + 1, Y)}, lambda _, job: job["splits"].validation.x[0, 0] == 1),
    "validation_split": ({"validation_split": 0.1}, lambda _, job: len(job["splits"].validation) == 4),
    "validation_steps": ({"validation_steps": 2}, lambda _, job: job["plan"].validation_steps == 2),
    "its batches": ({"validation_steps": 2} | HALF, lambda _, job: job["plan"].validation_batch_size == 4),
    "its batches without batch_size": (  # of Keras: 3 of them have all 20 examples
        {"batch_size": None, "validation_steps": 3} | HALF,
        lambda _, job: job["plan"].validation_batch_size == 7,
    ),
    "validation_batch_size": ({"validation_batch_size": 3}, lambda _, job: job["plan"].validation_batch_size == 3),
    "validation_freq": ({"validation_freq": 2}, lambda _, job: job["plan"].validation_freq == 2),
    "validation_freq list": ({"validation_freq": [3, 1]}, lambda _, job: job["plan"].validation_freq == (1, 3)),
    "sample_weight": ({"sample_weight": Y * 2}, lambda _, job: job["splits"].train.sample_weight[1] == Y[1] * 2),
    "class_weight": ({"class_weight": {3: 9.0}}, lambda _, job: job["splits"].train.sample_weight[0] == 9),
    "callbacks": ({"callbacks": [LOGS]}, lambda _, job: job["reads_progress"]),
    "mode": ({"mode": "sync"}, lambda config, _: config.mode == "sync"),
    "cluster": (
        {"cluster": tf2dist.Local(workers=2, ps=4)},
        lambda config, _: (config.cluster.num_workers, config.cluster.num_ps) == (2, 4),
    ),
    "run_dir": ({"run_dir": Path("given")}, lambda config, _: Path(config.run_dir).name == "given"),
    "seed": ({"seed": 5}, lambda config, _: config.seed == 5),
    "numbers of numpy": (
        dict.fromkeys(["batch_size", "seed"], np.int64(3)) | {"epochs": np.int64(7), "initial_epoch": np.int32(3)},
        lambda config, job: (config.seed, config.train.batch_size_per_worker, job["plan"].epochs) == (3, 3, 7),
    ),
    "options": ({"options": {"checkpoint.every_secs": 60}}, lambda config, _: config.checkpoint.every_secs == 60),
    "options list": ({"options": ["checkpoint.keep=1"]}, lambda config, _: config.checkpoint.keep == 1),
    "steps_per_execution": (
        {"model": lambda: model(steps_per_execution=6)},
        lambda config, _: config.train.steps_per_execution == 6,
    ),
    "jit_compile": ({"model": lambda: model(jit_compile=True)}, lambda config, _: config.devices.xla),
    "no jit_compile": ({}, lambda config, _: not config.devices.xla),
    "name": ({"model": lambda: model()}, lambda config, job: job["name"] == config.model["name"] == "lambda"),
}


@pytest.mark.parametrize("what", PARAMETERS)
def test_each_argument_reaches_the_run(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments, holds = PARAMETERS[what]
    monkeypatch.chdir(tmp_path)
    config, job = given_to_the_run(monkeypatch, **arguments)
    assert holds(config, job)
    assert keras.config.floatx() == config.keras.floatx


@pytest.mark.parametrize(("steps", "says"), [(None, False), (5, False), (10, False), (3, True), (20, True)])
def test_steps_with_which_keras_would_end_an_epoch_early_cause_a_warning(
    steps: int | None, says: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """40 examples in batches of 4 are 10 steps."""
    monkeypatch.chdir(tmp_path)
    given_to_the_run(monkeypatch, steps_per_epoch=steps, cluster=tf2dist.Local(workers=1))
    expected = f"steps_per_epoch ({steps}): one pass over the data has 10 steps; keras.Model.fit would end"
    assert (expected in capsys.readouterr().err) == says


def test_a_model_that_another_thread_trains(tmp_path: Path) -> None:
    made = model()
    expected = r"model \(sequential.*\): another call of fit is training it; give"
    with alone_with(made), alone_with(model()), pytest.raises(tf2dist.ConfigError, match=expected):
        tf2dist.fit(made, X, Y, run_dir=tmp_path / "run")
    with alone_with(made):
        pass
    assert not (tmp_path / "run").exists()


ON_X86 = True if platform.machine() == "x86_64" else None


@pytest.mark.parametrize(
    ("units", "options", "expected"),
    [((512, 512), {}, ON_X86), ((512, 511), {}, None), ((512, 512), {"devices.onednn": False}, False)],
)
def test_large_dense_layers_are_computed_with_onednn(
    units: tuple[int, ...],
    options: dict[str, bool],
    expected: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ONEDNN, raising=False)
    model = keras.Sequential([keras.Input([3]), *(keras.layers.Dense(size) for size in (*units, 1))])
    model.compile("sgd", "mse")
    config, _ = given_to_the_run(monkeypatch, model=model, options=options)
    assert config.devices.onednn == expected


def test_a_model_that_does_not_fit_into_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "free_memory", lambda: 10)
    with pytest.raises(
        tf2dist.ConfigError, match=r"model \(sequential.*\): needs 0\.0 GB more memory.* the command and"
    ):
        tf2dist.fit(model(optimizer="adagrad"), X, Y, cluster=tf2dist.Local(1), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
