"""Resumed runs: exact in the same mode with the same number of workers, otherwise at the right place in the data.

TensorFlow can use only the newest coordinator of a process: what an earlier loop holds is taken
before the next one is made.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import context_of, run_config, sync_loop
from tests.unit.test_saving import facts
from tf2dist import registry, run
from tf2dist.checkpoint.snapshot import Snapshot, Weights, describe, of_description, pack, unpack
from tf2dist.checkpoint.state import check_keras, check_same
from tf2dist.checkpoint.store import Checkpoints
from tf2dist.config import load
from tf2dist.config.schema import KerasConfig, RunConfig
from tf2dist.errors import CheckpointError, ConfigError, NotFiniteError
from tf2dist.run import first_snapshot
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.driver import Driver
from tf2dist.training.parameter_server.counters import ONES

MakeLoop = Callable[..., Any]


def taken(loop: Any) -> Snapshot:
    """A snapshot of the loop, as it is read back from a file."""
    return arrived(loop.freeze()())


def arrived(snapshot: Snapshot) -> Snapshot:
    found = of_description(*unpack(pack(describe(snapshot), snapshot.arrays)))
    assert isinstance(found, Snapshot)
    return found


def assert_same_arrays(one: Snapshot, other: Snapshot, prefixes: tuple[str, ...]) -> None:
    names = {name for name in one.arrays if name.startswith(prefixes)}
    assert names == {name for name in other.arrays if name.startswith(prefixes)}
    for name in names:
        np.testing.assert_array_equal(one.arrays[name], other.arrays[name], err_msg=name)


SIZES = [(1, 1), *(pytest.param(*size, marks=pytest.mark.slow) for size in [(4, 2), (4, 1), (2, 2)])]


@pytest.mark.parametrize(("num_workers", "num_ps"), SIZES)
def test_async_is_resumed_with_any_number_of_tasks(async_loop: MakeLoop, num_workers: int, num_ps: int) -> None:
    config = run_config("cnn", "adam", steps_per_execution=5, batch_norm=True)
    config.optimizer["learning_rate"] = 0.001
    first = async_loop(config, num_workers=4)
    first.train(12)
    snapshot = taken(first)
    assert snapshot.step == 12
    assert "optimizer/conv1/kernel/velocities" in snapshot.arrays
    assert "model/norm1/moving_mean" in snapshot.arrays

    second = async_loop(config, num_workers=num_workers, num_ps=num_ps, start=snapshot)
    assert second.restored_from == "going on at step 12"
    assert_same_arrays(taken(second), snapshot, ("model/", "optimizer/"))
    assert second.progress.global_step == second.updates_applied() == 12
    assert second.progress.examples == first.progress.examples
    second.train(23)
    assert second.progress.global_step == second.updates_applied() == 23
    assert second.progress.examples > first.progress.examples
    for server in second._graphs.servers:
        assert server.counters.now().applied == 23
    same_size = num_workers == 4
    assert sum(second.progress.local_steps) == (23 if same_size else 11)
    # All examples up to there were seen once, and no others.
    assert taken(second).facts.input.position == second.progress.examples
    assert taken(second).facts.input.unseen == ()


def test_a_request_ends_a_training_at_an_exact_step(async_loop: MakeLoop) -> None:
    """All ps are at this step then, even after a worker that died between its pushes to two of them."""
    from tf2dist.training.loop import PauseRequest

    loop = async_loop(run_config(steps_per_execution=5))
    assert (
        loop.train(100_000, lambda: PauseRequest.SAVE if loop.progress.global_step > 50 else PauseRequest.NOTHING)
        is PauseRequest.SAVE
    )
    step = loop.progress.global_step
    assert 50 < step < 100_000
    assert {server.counters.now().applied for server in loop._graphs.servers} == {step}
    assert loop.train(step + 20) is PauseRequest.NOTHING
    assert loop.progress.global_step == loop.updates_applied() == step + 20

    # Such a worker has updated only one of the ps.
    first = loop._graphs.servers[0]
    first.numbered.assign_add(1)
    zero = tf.constant(0, tf.int64)
    first.counters.add(
        first.counters.indices(zero), zero, tf.concat([ONES, tf.zeros([first.counters.added - len(ONES)])], 0)
    )
    assert loop.train(step + 100, lambda: PauseRequest.SAVE) is PauseRequest.SAVE
    assert {server.counters.now().applied for server in loop._graphs.servers} == {loop.progress.global_step}


def test_the_checkpoint_of_another_model_is_refused(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config())
    snapshot = taken(loop)
    slot = {"optimizer/logits/kernel/momentums": np.zeros([784, 10])}
    for there, told in (
        (replace(snapshot, arrays=snapshot.arrays | slot), "another optimizer; extra"),
        (replace(snapshot, facts=replace(snapshot.facts, data="mnist")), "trained on mnist, and data is digits"),
    ):
        with pytest.raises(CheckpointError, match=told):
            check_same(loop.named, there, "digits", run_config().keras)
    with pytest.raises(CheckpointError, match=r"another model; missing: model/hidden1/bias.*\[784, 10\] there"):
        async_loop(run_config("dnn", hidden_units=[20]), start=snapshot)


NUMBERED = [
    (["dense_2", "dense_3"], ["dense", "dense_1"], "give fit the function that builds the model"),
    (["dense_10", "dense_9"], ["dense", "dense_1"], "name another run_dir"),  # the wide one is the second there
    (["dense_9", "dense_10"], ["dense", "dense_1"], "give fit the function that builds the model"),
    (["dense", "dense_1"], ["dense_1", "dense_2"], "give the layers the names that they have there"),
    (["dense_1", "dense_2"], ["hidden", "logits"], "name another run_dir"),
]


@pytest.mark.parametrize(("here", "there", "way_out"), NUMBERED)
def test_other_numbers_in_the_names_alone_are_told(here: list[str], there: list[str], way_out: str) -> None:
    """A cell of a notebook that builds a model names its layers anew each time."""
    arrays = {f"model/{name}/kernel": np.zeros([4, units]) for name, units in zip(there, (8, 3), strict=True)}
    snapshot = Snapshot(5, arrays, replace(facts(5), data="arrays", keras=load.DEFAULTS))
    named = {
        f"model/{name}/kernel": [keras.Variable(np.zeros([4, units]))] for name, units in zip(here, (8, 3), strict=True)
    }
    with pytest.raises(CheckpointError, match="is of another model; missing: model/") as refused:
        check_same(named, snapshot, "arrays", load.DEFAULTS)
    reason = "only the numbers in the names differ, which Keras counts in each process: "
    assert f"; {'' if 'run_dir' in way_out else reason}{way_out}" in str(refused.value)


def test_a_checkpoint_made_under_other_settings_of_keras_is_refused() -> None:
    now = load.DEFAULTS
    check_keras(KerasConfig(epsilon=1e-7, image_data_format="channels_last"), now, "run_dir")
    with pytest.raises(CheckpointError, match=r"run_dir: was trained with keras\.epsilon=0\.001, and it is 1e-07 now"):
        check_keras(KerasConfig(epsilon=1e-3), now, "run_dir")


def test_weights_of_another_data_format_are_refused(tmp_path: Path) -> None:
    """Kernels would meet the wrong axes of the images; other settings of Keras may differ."""
    source = Checkpoints(tmp_path / "source" / "checkpoints")
    settings = KerasConfig(image_data_format="channels_first", epsilon=0.1)
    source.save(Snapshot(5, {"model/a": np.ones(2)}, replace(facts(5), keras=settings)))
    config = run_config()
    config.init_from = str(tmp_path / "source")
    for ours, told in (
        ("channels_last", r"init_from: was trained with keras\.image_data_format"),
        ("channels_first", ""),
    ):
        config.keras = replace(load.DEFAULTS, image_data_format=ours)
        with pytest.raises(CheckpointError, match=told) if told else contextlib.nullcontext():
            assert isinstance(first_snapshot(config, Checkpoints(tmp_path / "new"), print), Weights)


def test_a_target_step_before_the_checkpoint_is_refused(async_loop: MakeLoop) -> None:
    config = run_config()
    config.train.steps = 20
    with pytest.raises(ConfigError, match=r"train.steps \(20\): the run in run_dir is at step 30 already"):
        async_loop(config, start=Snapshot(30, {}, facts(30)))


@pytest.mark.slow
def test_chosen_layers_come_from_another_run(async_loop: MakeLoop) -> None:
    donor = async_loop(run_config("dnn", hidden_units=[20, 15, 12]))
    donor.train(30)
    trained = taken(donor)
    weights = trained.weights()
    config = run_config("dnn", hidden_units=[20, 15, 12])
    config.seed, config.init_from, config.init_layers = 1, "elsewhere", "hidden[12]"
    fresh = taken(async_loop(replace(config, init_from=None, init_layers=None)))
    loop = async_loop(config, start=weights)
    assert loop.restored_from == "weights of hidden1, hidden2 from elsewhere"
    assert loop.progress.global_step == 0
    begun = taken(loop)
    assert_same_arrays(begun, trained, ("model/hidden1/", "model/hidden2/"))
    assert_same_arrays(begun, fresh, ("model/hidden3/", "model/logits/", "optimizer/"))
    config.init_layers = "hidden9|hidde"
    with pytest.raises(
        CheckpointError, match=r"init_layers \(hidden9\|hidde\): matches no layer there; it has hidden1,"
    ):
        async_loop(config, start=weights)
    other = run_config("dnn", hidden_units=[25])
    other.init_from, other.init_layers = "elsewhere", "hidden1"
    with pytest.raises(CheckpointError, match=r"model/hidden1/kernel is \[784, 20\] there and \[784, 25\] here"):
        async_loop(other, start=weights)


def test_an_optimizer_that_has_begun_with_other_weights(async_loop: MakeLoop, monkeypatch: Any) -> None:
    monkeypatch.setitem(registry.OPTIMIZERS, "mine", keras.optimizers.ScheduleFreeAdamW)
    config = run_config()
    config.optimizer, config.init_from = {"name": "mine"}, "elsewhere"
    with pytest.raises(ConfigError, match=r"optimizer \(ScheduleFreeAdamW\): .*begins with.*init_from"):
        async_loop(config, start=Weights({}))


def test_state_that_is_not_finite_is_not_saved(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config())
    variable = loop.model.trainable_variables[0].value
    variable.assign(variable * np.nan)
    with pytest.raises(NotFiniteError, match="model/logits/kernel is not finite"):
        loop.freeze()()


def sync_run(
    worker: SyncWorker, config: RunConfig, start: Snapshot | None, until: int, stopper: int | None = None
) -> dict[str, Any]:
    """Continues from `start`, which only the first worker has; worker `stopper` soon asks for a stop."""
    from tf2dist.training.loop import PauseRequest

    loop = sync_loop(worker, config, start=start if worker.index == 0 else None)
    request = PauseRequest.STOP if worker.index == stopper else PauseRequest.NOTHING
    requested = loop.train(until, lambda: request if loop.progress.global_step >= 10 else PauseRequest.NOTHING)
    snapshot = loop.freeze()()
    agreed = loop.combine(PauseRequest.SAVE if worker.index == 0 else PauseRequest.NOTHING)
    return {
        "snapshot": snapshot,
        "requested": requested.name,
        "agreed": agreed.name,
        "updates": loop.updates_applied(),
    }


def small_cnn() -> RunConfig:
    config = run_config("cnn", "adam", steps_per_execution=4, dropout=0.3, batch_norm=True)
    config.optimizer["learning_rate"] = 0.001
    return config


def stopped_and_resumed(worker: SyncWorker) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run that is resumed, and one that is not."""
    config = small_cnn()
    stopped = sync_run(worker, config, None, 9)["snapshot"]
    return sync_run(worker, config, arrived(stopped), 17), sync_run(worker, config, None, 17)


@pytest.mark.thorough
def test_a_resumed_sync_run_equals_an_uninterrupted_one(sync_workers: SyncWorkers) -> None:
    """Bit for bit, with dropout, moving averages, Adam and the smaller last step of an epoch."""
    for resumed, straight in sync_workers(stopped_and_resumed, 2):
        assert resumed["snapshot"].step == resumed["updates"] == 17
        assert_same_arrays(resumed["snapshot"], straight["snapshot"], ("model/", "optimizer/"))
        assert resumed["snapshot"].facts == straight["snapshot"].facts


def test_a_run_changes_its_mode_and_changes_back(sync_workers: SyncWorkers, async_loop: MakeLoop) -> None:
    """Back in mode=sync, the request of one worker stops all at the same step."""
    config = run_config("dnn", "adam", steps_per_execution=5, hidden_units=[20])
    config.train.epochs = 20
    begun = sync_workers(sync_run, 2, (config, None, 26))[0]["snapshot"]  # two epochs of 13 steps
    loop = async_loop(replace(config, mode="async"), num_workers=3, start=begun)
    assert_same_arrays(taken(loop), begun, ("model/", "optimizer/"))
    assert loop.progress.examples == 2 * 1257
    updates_per_pass = loop.sharding.updates_per_pass
    assert loop.target_step == 26 + 18 * updates_per_pass, "the remaining epochs, in updates of the new size"
    assert taken(loop).facts.input.position == 2 * 1257
    changed_at = 26 + updates_per_pass
    loop.train(changed_at)
    assert loop.updates_applied() == changed_at
    both = sync_workers(sync_run, 2, (config, taken(loop), 1000, 1))  # the second alone asks for a stop
    assert {(one["requested"], one["agreed"]) for one in both} == {("STOP", "SAVE")}
    first, back = both
    assert changed_at < first["snapshot"].step == back["snapshot"].step == back["updates"] < changed_at + 30
    assert back["snapshot"].facts.input.position == back["snapshot"].facts.examples
    counters = loop._graphs.servers[0].counters
    counters.restore(counters.now()._replace(totals=counters.now().totals * [1, np.nan, 1]))
    with pytest.raises(NotFiniteError, match=f"by global step {changed_at};"):
        loop.train(1000)


def resume(worker: SyncWorker, run_dir: str) -> tuple[int, bool]:
    """Resumes a run as a task does; returns where it goes on, and whether it holds the snapshot while it trains."""
    config = run_config()
    config.mode, config.run_dir, config.train.steps = "sync", run_dir, 10
    first = sync_loop(worker, config)
    first.train(5)
    Checkpoints(Path(run_dir, "checkpoints")).save(first.freeze()())
    found, read = list[tuple[int, bool]](), list["weakref.ref[Snapshot]"]()

    def reading(*args: Any) -> Any:
        snapshot = first_snapshot(*args)
        assert isinstance(snapshot, Snapshot)
        read.append(weakref.ref(snapshot))
        return snapshot

    def drive(driver: Any) -> None:
        gc.collect()
        found.append((driver.loop.progress.global_step, read[0]() is not None))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "first_snapshot", reading)
        patched.setattr(Driver, "drive", drive)
        run.train(context_of(config, worker.cluster, worker.task), worker.strategy)
    return found[0]


def test_a_resumed_run_does_not_hold_what_it_has_read(sync_workers: SyncWorkers, tmp_path: Path) -> None:
    """It would take the memory of one more copy of the model and the optimizer."""
    assert sync_workers(resume, num_workers=1, args=(str(tmp_path),)) == [(5, False)]
