"""The placement of variables on ps changes neither the results of a run nor its checkpoints."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica import test_optimizers
from tests.replica.in_memory_source import RecordingHooks, weights_of
from tests.replica.small_runs import run_config
from tests.replica.test_epochs import BATCH, config_of, drive
from tests.replica.test_resume import assert_same_arrays, taken
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import ClusterConfig, RunConfig
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError
from tf2dist.model import support
from tf2dist.model.features import ELEMENTWISE
from tf2dist.model.shards import all_parts, joined, parts_of
from tf2dist.model.source import RegisteredSource
from tf2dist.process import placement
from tf2dist.tf_internals.keras import fresh_names
from tf2dist.training.hooks import CallbackEffects

MakeLoop = Callable[..., Any]
STATE = ("model/", "optimizer/")


def placed(kind: str, optimizer: str = "adam") -> RunConfig:
    config = run_config("dnn", optimizer, steps_per_execution=5, hidden_units=[30, 20])
    config.cluster.placement = kind
    if kind == "partitioned":
        config.cluster.min_part_bytes = 1000
    return config


def ps_of(variable: keras.Variable) -> int | None:
    task: int | None = tf.DeviceSpec.from_string(variable.value.device).task
    return task


def tasks_of(loop: Any) -> dict[str, int | None]:
    """The number of the ps on which each variable lies."""
    return {variable.path: ps_of(variable) for variable in loop.model.variables}


def told_bytes(captured: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in captured.readouterr().out.splitlines() if line.startswith("ps-")]


def test_a_variable_goes_to_the_ps_with_the_fewest_bytes(
    async_loop: MakeLoop, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first kernel is larger than all other variables; dealt out in turn, all kernels would be on the same ps."""
    result = tasks_of(async_loop(placed("balanced")))
    assert list(result.values()) == [0, 1, 1, 1, 1, 1], result
    told = told_bytes(capfd)
    for ps, num_bytes in enumerate((94_080, 3_440)):
        assert f"ps-{ps}: {num_bytes:,} bytes of the model, {3 * num_bytes // 1000}," in told[ps], "Adam has two more"


# The ps and the shape of each part of the variables.
CUT = [
    *((0, [392, 30]), (1, [392, 30]), (0, [30])),
    # The part with 16 of 30 rows goes to the ps that has no bias yet.
    *((1, [16, 20]), (0, [14, 20]), (0, [20])),
    *((1, [20, 10]), (0, [10])),
]


def places(loop: Any) -> list[tuple[int | None, list[int]]]:
    return [(ps_of(part), part.shape.as_list()) for part in all_parts(loop.model.variables)]


def test_large_variables_are_cut(async_loop: MakeLoop, capfd: pytest.CaptureFixture[str]) -> None:
    loop = async_loop(placed("partitioned"))
    assert places(loop) == CUT
    told = told_bytes(capfd)
    for ps, num_bytes in enumerate((48_400, 49_120)):
        assert f"ps-{ps}: {num_bytes:,} bytes of the model, {3 * num_bytes // 1000}," in told[ps], "Adam has two more"

    # No two parts of a variable on one ps, even if it would still have the fewest bytes with both.
    options = ClusterConfig(placement="partitioned", min_part_bytes=256)
    with placement.placed(loop._coordinator.strategy, options, 2):
        row, square = tf.Variable(tf.zeros([1, 1000])), tf.Variable(tf.ones([16, 16]))
    assert [tf.DeviceSpec.from_string(part.device).task for part in (row, *square.parts)] == [0, 1, 0]

    config = placed("partitioned")
    config.optimizer["clipnorm"] = 1.0
    with pytest.raises(ConfigError, match=r"optimizer \(Adam\): with cluster.placement=partitioned sequential"):
        async_loop(config)
    assert not any(len(parts_of(variable)) > 1 for variable in async_loop(placed("partitioned"), 1, 1).model.variables)


class Clearing(RegisteredSource):
    """Its builder begins as programs do that build many models."""

    def build(self, splits: Splits) -> keras.Model:
        keras.utils.clear_session()
        return super().build(splits)


@pytest.mark.parametrize("kind", [pytest.param("round_robin", marks=pytest.mark.thorough), "partitioned"])
def test_a_builder_may_clear_the_session(kind: str, async_loop: MakeLoop) -> None:
    expected = CUT if kind == "partitioned" else places(async_loop(placed(kind)))
    loop = async_loop(placed(kind), source=Clearing(placed(kind)))
    assert places(loop) == expected
    loop.train(5)


class OwnRows(keras.initializers.RandomUniform):
    """May draw other numbers than the class that it is derived from."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return super().__call__(shape, dtype) * 2


initializers = keras.initializers
IN_PIECES: list[Callable[[], Any]] = [
    initializers.Zeros,
    initializers.Ones,
    initializers.RandomUniform,
    lambda: initializers.RandomUniform(-3, 1.5, seed=-(2**40)),
    lambda: initializers.RandomNormal(0.25, 0.5, seed=7),
]
AT_ONCE: list[Callable[[], Any]] = [
    lambda: initializers.RandomUniform(seed=keras.random.SeedGenerator(5)),
    lambda: initializers.Constant(0.5),
    initializers.GlorotUniform,
    initializers.TruncatedNormal,
    OwnRows,
]


def test_a_table_begins_with_the_rows_that_keras_draws(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces begin with any of the four numbers that are drawn together; parts have as many rows, or one more."""
    assigned: list[int] = []
    assign_to = placement.InitialRows.assign_to

    def record(self: placement.InitialRows, parts: list[tf.Variable]) -> None:
        assigned.append(len(parts))
        assign_to(self, parts)

    monkeypatch.setattr(placement.InitialRows, "assign_to", record)
    strategy = async_loop(placed("partitioned"), num_ps=3)._coordinator.strategy
    tables = [(401, 33, 3, 256), (2, 2000, 2, 256), (401, 33, 1, 1 << 20)]
    cases = [*itertools.product(IN_PIECES, tables), *itertools.product(AT_ONCE, tables[:1])]
    for make, (rows, columns, num_parts, min_part_bytes) in cases:
        monkeypatch.setattr(placement, "PIECE_BYTES", 4 * 11 * columns * num_parts)  # eleven rows of each part
        options = ClusterConfig(placement="partitioned", min_part_bytes=min_part_bytes)
        made = []
        assigned.clear()
        for scope in (placement.placed(strategy, options, 3), contextlib.nullcontext()):
            keras.utils.set_random_seed(1)
            layer = keras.layers.Embedding(rows, columns, embeddings_initializer=make())
            with scope:
                layer.build()
            made.append(layer.embeddings)
        cut, whole = made
        is_large = rows > 11 * num_parts
        assert assigned == ([num_parts] if make in IN_PIECES and is_large else [])
        assert len(parts_of(cut)) == num_parts
        about = f"{make().get_config()}, {rows} rows in {num_parts} parts"
        np.testing.assert_array_equal(cut.numpy(), whole.numpy(), err_msg=about)
        for number, part in enumerate(parts_of(cut)):  # the ids that are looked up most often are small ones
            np.testing.assert_array_equal(part.numpy(), whole.numpy()[number::num_parts], err_msg=about)


def test_results_and_checkpoints_equal_those_of_one_ps(async_loop: MakeLoop) -> None:
    """A run that is resumed with another placement ends with the results of a run on a single ps."""
    snapshot = None
    for kind, until_step in (("balanced", 15), ("partitioned", 25)):
        loop = async_loop(placed(kind), num_workers=1, start=snapshot)
        loop.train(until_step)
        snapshot = taken(loop)
    evaluated = loop.evaluate("validation")
    whole = async_loop(placed("round_robin"), num_workers=1, num_ps=1)
    whole.train(25)
    assert snapshot is not None
    assert_same_arrays(snapshot, taken(whole), STATE)
    assert evaluated == whole.evaluate("validation")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["plain", "staleness_aware", "delay_compensated"])
def test_algorithms_with_variables_cut_into_three(async_loop: MakeLoop, algorithm: str) -> None:
    ends = {}
    for kind in ("partitioned", "round_robin"):
        config = placed(kind)
        config.algorithm.kind = algorithm
        loop = async_loop(config, num_workers=1, num_ps=3)
        most = max(len(parts_of(variable)) for variable in loop.model.variables)
        assert most == (3 if kind == "partitioned" else 1)
        loop.train(20)
        ends[kind] = taken(loop)
    assert_same_arrays(ends["partitioned"], ends["round_robin"], STATE)


@pytest.mark.thorough
def test_sync_replicas_with_cut_variables(replicas_loop: MakeLoop) -> None:
    """With a callback that changes weights, and moving averages that become the weights at the end."""
    ends: dict[str, list[Snapshot]] = {}
    for kind in ("partitioned", "round_robin"):
        config = placed(kind, "momentum")
        config.mode, config.optimizer["use_ema"] = "sync_replicas", True
        loop = replicas_loop(config, num_workers=1, num_ps=3)
        loop.train(5)
        loop.apply(CallbackEffects(arrays={"model/hidden1/kernel": np.full([784, 30], 0.01, np.float32)}))
        changed = taken(loop)
        loop.train(10)
        trained = loop.arrays()
        loop.finalize()
        assert np.any(loop.arrays()["model/hidden1/kernel"] != trained["model/hidden1/kernel"]), "there are averages"
        ends[kind] = [changed, taken(loop), Snapshot(10, loop.arrays(), changed.facts)]
    for one, other in zip(*ends.values(), strict=True):
        assert_same_arrays(one, other, STATE)
    config = placed("partitioned")
    config.mode, config.optimizer["clipnorm"] = "sync_replicas", 1.0
    with pytest.raises(ConfigError, match="clipnorm needs the norm of its whole gradient"):
        replicas_loop(config)


@pytest.mark.slow
def test_sync_replicas_accepts_a_placement(replicas_loop: MakeLoop) -> None:
    ends: dict[str, Snapshot] = {}
    for kind in ("balanced", "round_robin"):
        config = placed(kind)
        config.mode = "sync_replicas"
        loop = replicas_loop(config, num_workers=1, num_ps=2)
        assert sum(task or 0 for task in tasks_of(loop).values()) == {"balanced": 5, "round_robin": 3}[kind]
        loop.train(10)
        ends[kind] = taken(loop)
    assert_same_arrays(ends["balanced"], ends["round_robin"], STATE)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["async_loop", "replicas_loop"])
def test_everything_is_cut(make: str, request: pytest.FixtureRequest) -> None:
    """All variables that can be, also those that are not trained; the initial values stay the same."""
    ends, first = {}, {}
    for kind in ("partitioned", "round_robin"):
        config = run_config("cnn", "adam", batch_norm=True, dropout=0.2, steps_per_execution=5)
        config.cluster.placement, config.mode = (
            kind,
            make.replace("_loop", "").replace("replicas", "sync_replicas"),
        )
        config.cluster.min_part_bytes = 4 if kind == "partitioned" else config.cluster.min_part_bytes
        loop = request.getfixturevalue(make)(config, num_workers=1)
        first[kind] = taken(loop)
        loop.train(10)
        ends[kind] = taken(loop)
    for found in (first, ends):
        assert_same_arrays(found["partitioned"], found["round_robin"], STATE)


def fresh(make: Callable[[], keras.Model]) -> keras.Model:
    with fresh_names():
        return make()


REFUSED = {"Adafactor", "Lamb", "Muon", "own", "clipnorm"}
CASES = [*test_optimizers.OPTIMIZERS, *test_optimizers.EXCLUSIONS]
FIRST = ("without a layer", "own")  # the first by `make thorough`, and the rest by `make slow`


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(FIRST[0], marks=pytest.mark.thorough),
        FIRST[1],
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FIRST),
    ],
)
def test_optimizers_of_compiled_models(name: str, async_loop: MakeLoop, publishing: Any) -> None:
    """Equal to the last bit, or refused."""
    source, config = test_optimizers.source_of(name), config_of(BATCH)
    source.make = functools.partial(fresh, source.make)
    publishing(source.load())
    config.cluster.placement, config.cluster.min_part_bytes = "partitioned", 100
    if name in REFUSED:
        with pytest.raises(ConfigError, match=r"with cluster.placement=partitioned .* use cluster.placement=balanced"):
            async_loop(config, 1, source=source)
        return
    loop = async_loop(config, 1, source=source)
    assert any(len(parts_of(variable)) > 1 for variable in loop.model.trainable_variables)
    drive(loop, source, RecordingHooks())
    result = weights_of(loop.model), taken(loop)
    config.cluster.placement = "balanced"
    whole = async_loop(config, 1, source=source)
    drive(whole, source, RecordingHooks())
    for one, other in zip(result[0], weights_of(whole.model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_same_arrays(result[1], taken(whole), STATE)


def updated(kind: type[keras.optimizers.Optimizer], shape: list[int], cuts: list[int]) -> np.ndarray:
    """A variable after some updates of it, or of its parts with an optimizer each."""
    draw = np.random.default_rng(0)
    value = draw.standard_normal(shape).astype(np.float32)
    variables = [keras.Variable(part) for part in np.split(value, cuts)]
    made = [kind(0.02) for _ in variables]
    for optimizer, variable in zip(made, variables, strict=True):
        optimizer.build([variable])
    for _ in range(3):
        gradient = draw.standard_normal(shape).astype(np.float32)
        for optimizer, variable, part in zip(made, variables, np.split(gradient, cuts), strict=True):
            optimizer.apply([tf.constant(part)], [variable])
    return np.concatenate([variable.numpy() for variable in variables])


@pytest.mark.parametrize(
    "kind", [*ELEMENTWISE, keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon]
)
def test_which_optimizers_work_element_by_element(kind: type[keras.optimizers.Optimizer]) -> None:
    shape = tf.TensorShape([39, 21])
    *cuts, end = placement.ends_of_parts(shape, 2)
    assert (cuts, end) == ([16], 39)
    found, whole = updated(kind, shape.as_list(), cuts), updated(kind, shape.as_list(), [])
    assert np.array_equal(found, whole) == (kind in ELEMENTWISE)


@pytest.mark.parametrize(
    ("shape", "wanted", "ends"),
    [
        ([], 3, []),
        ([1], 3, [1]),
        ([40], 9, [16, 32, 40]),  # 16 float32 are the most that a kernel takes at once
        ([4, 16], 9, [1, 2, 3, 4]),
        ([10, 8], 3, [2, 6, 10]),
        ([100, 32], 3, [33, 66, 100]),
        ([5, 0], 1, [5]),
    ],
)
def test_where_a_variable_is_cut(shape: list[int], wanted: int, ends: list[int]) -> None:
    assert placement.ends_of_parts(tf.TensorShape(shape), wanted) == ends


def cut_variable() -> keras.Variable:
    return joined([keras.Variable([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]), keras.Variable([[6.0, 7.0]], name="last")])


def test_a_cut_variable_is_used_as_a_whole() -> None:
    variable = cut_variable()
    whole = np.arange(8.0).reshape(4, 2)
    for found in (
        variable,
        variable.numpy(),
        tf.convert_to_tensor(variable),
        variable.value,
        variable + 0,
        np.array(variable),
    ):
        np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(2 * variable.value[1:] - tf.constant(1.0), 2 * whole[1:] - 1)
    first, last = parts_of(variable)
    assert (first.name, first.path, first.shape, last.shape) == (variable.name, variable.path, (3, 2), (1, 2))
    assert [id(part) for part in parts_of(variable)] == [id(first), id(last)]
    for value in (-whole, tf.constant(whole, tf.float32)):
        variable.assign(value)
        np.testing.assert_array_equal(np.concatenate([first, last]), value)


def test_what_needs_a_whole_variable_is_refused() -> None:
    variable = cut_variable()

    def check(optimizer: keras.Optimizer, *variables: keras.Variable) -> None:
        support.check_optimizer(support.PARTITIONED, optimizer, variables)

    check(keras.optimizers.Lamb(), keras.Variable([1.0]))
    check(keras.optimizers.Adam(global_clipnorm=1.0, clipvalue=None), variable)

    class Own(keras.optimizers.SGD):
        """An optimizer of a user's own."""

    for optimizer, told in (
        (keras.optimizers.Lamb(), r"Lamb may need the whole of it in an update; use cluster.placement=balanced"),
        (Own(), "Own may need the whole of it"),
        (keras.optimizers.Adam(clipnorm=1.0), "clipnorm needs the norm of its whole gradient; use"),
    ):
        with pytest.raises(ConfigError, match=rf"^optimizer \(\w+\): .* is cut over several ps, and {told}"):
            check(optimizer, variable)
    constrained = cut_variable()
    constrained.constraint = keras.constraints.MaxNorm(1.0)
    model: Any = SimpleNamespace(trainable_variables=[constrained])
    with pytest.raises(ConfigError, match=r"^model \(it\): .* and its constraint needs the whole of it; use"):
        support.check_model(support.PARTITIONED, "it", model)
