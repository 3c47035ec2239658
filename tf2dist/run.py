"""The life of one task, from joining its cluster to the result."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf2dist import linux, registry
from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import check_keras
from tf2dist.checkpoint.store import Checkpoints, NoSaver, Notify, Saver
from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster
from tf2dist.config.schema import KerasConfig, RunConfig
from tf2dist.data.location import check_shard
from tf2dist.errors import CheckpointError, Interrupted, reason_of
from tf2dist.messages import Began, ToLauncher
from tf2dist.model.source import plain_model
from tf2dist.process import devices, heartbeat, inbox, profiling
from tf2dist.process.inbox import end_on_sigterm, stop_when_asked
from tf2dist.process.strategy import multi_worker_mirrored_strategy
from tf2dist.training import stragglers
from tf2dist.training.driver import Driver, Epochs, Steps
from tf2dist.training.evaluator import Evaluator, follow
from tf2dist.training.finished_model import describe, named_groups, write_model
from tf2dist.training.loop import Loop, Progress
from tf2dist.training.parameter_server import serving
from tf2dist.training.parameter_server.async_loop import AsyncLoop
from tf2dist.training.parameter_server.batches import publish
from tf2dist.training.parameter_server.sync_replicas import SyncReplicasLoop
from tf2dist.training.report import NoReporter, Reporter
from tf2dist.training.setup import TaskContext
from tf2dist.training.synchronous.sync_loop import SyncLoop

LOOPS: dict[str, Callable[..., Loop]] = {
    "async": AsyncLoop.build,
    "sync": SyncLoop.build,
    "sync_replicas": SyncReplicasLoop.build,
}


def run_task(context: TaskContext) -> None:
    """Does what a task has to do in its cluster; the leader writes the result into `run_dir`."""
    config, cluster, task, source = context.config, context.cluster, context.task, context.source
    run_dir, to_launcher = context.run_dir, context.to_launcher
    linux.allow_open_files(cluster.open_files)

    # The devices, and a synchronous cluster: TensorFlow takes both only before its first operation. So they come before
    # the user's code, which may run operations in a plugin or when it makes the data.
    server_config = devices.configure(config.devices, cluster, task)
    if advice := devices.advice_on_gpus(cluster, task):
        to_launcher.note(advice)
    strategy = None
    if cluster.mode == "sync" and task in cluster.training_tasks:
        strategy = multi_worker_mirrored_strategy(cluster, task, config.startup_timeout_secs, config.watchdog_secs)
        end_on_sigterm()  # again: TensorFlow's coordination service has installed its own handler

    # The user's code.
    registry.load_plugins(config.plugins)
    if config.devices.precision != "float32":
        keras.mixed_precision.set_global_policy(f"mixed_{config.devices.precision}")

    if task in cluster.training_tasks:
        stragglers.publish(config, cluster, run_dir)

    # The tasks that only serve or only evaluate. A ps needs no data; an asynchronous worker publishes its own to steps.
    if task.job == "ps":
        linux.keep_freed_memory()
        serving.serve(cluster, task, server_config, run_dir, config.startup_timeout_secs, config.silence_secs)
        return
    splits = context.splits
    if source.plan is None:  # `fit` takes small data, too, as Keras does: then a step is smaller than asked for
        check_shard(config.train.batch_size_per_worker, len(splits.train), cluster.num_workers)
    if task.job == "worker":
        linux.keep_freed_memory()  # what was freed while the data was loaded is back with the kernel
    if task.job == "evaluator":
        evaluator = Evaluator(config, source, splits, to_launcher.warn)
        with Reporter(run_dir, task, to_launcher, context.started_at) as writer:
            # A run that reaches its goal ends before train.steps, and its last checkpoint says so.
            has_goal = config.train.until_accuracy is not None or config.train.until_secs is not None
            asked_steps = None if has_goal else config.train.steps
            follow(
                evaluator,
                run_dir,
                splits.evaluated,
                writer.on_evaluation,
                asked_steps,
                leader_is_done=inbox.leader_is_done,
                notify=to_launcher.status,
            )
        return
    if cluster.has_coordinator and task.job == "worker":
        publish(splits, [task.index])
        limits = config.startup_timeout_secs, config.silence_secs
        message = serving.serve(cluster, task, server_config, run_dir, *limits)
        print(f"worker={task.index}, final {message['final']}", flush=True)
        return

    # The others drive the training: an asynchronous coordinator, or every synchronous worker.
    train(context, strategy)


def train(context: TaskContext, strategy: tf.distribute.Strategy | None) -> None:
    """Trains to the result; `strategy` is that of the cluster if this task has joined it already."""
    config, cluster, task, source = context.config, context.cluster, context.task, context.source
    splits, run_dir, to_launcher = context.splits, context.run_dir, context.to_launcher

    # The run directory, which the leader reads and writes for all tasks.
    start: Snapshot | Weights | None = None
    saver, reporter = NoSaver(), NoReporter()
    if task == cluster.leader:
        checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)
        checkpoints.clean()  # of what a killed run has left; the launcher makes sure that no other run is here
        start = first_snapshot(config, checkpoints, to_launcher.warn)
        saver = Saver(checkpoints, config.checkpoint.every_secs, to_launcher, progress=heartbeat.progress)
        reporter = Reporter(run_dir, task, to_launcher, context.started_at)

    # The servers of a cluster with a coordinator, which must listen before it can use them. A worker does so only after
    # it has loaded its data; its own launcher ends it if that takes too long.
    if cluster.has_coordinator:
        servers = [other for other in cluster.tasks if other.job in ("ps", "worker")]
        still_starting = functools.partial(heartbeat.progress, heartbeat.START_SECS)
        limits = config.startup_timeout_secs, heartbeat.START_SECS
        reachability.wait_for_peers(cluster, servers, *limits, to_launcher.status, still_starting)

    # The loop, which builds and restores the model.
    with reporter:

        def on_progress(progress: Progress) -> None:
            heartbeat.progress()
            reporter.on_progress(progress)

        loop = LOOPS[config.mode](context, start, on_progress, strategy)
        del start  # the memory of its arrays, and the files that large ones are mapped from
        reporter.follow(loop)

        def final_arrays() -> dict[str, np.ndarray]:
            # What was just saved is not fetched again.
            saved = None if loop.is_finalized else saver.saved_arrays(loop.progress.global_step)
            return saved or loop.arrays()

        def write_finished_model() -> None:
            if task == cluster.leader:
                fresh = functools.partial(plain_model, source, splits, config.seed, loop.new_optimizer)
                num_updates = loop.earlier_updates + loop.progress.global_step
                given = loop.model, loop.optimizer, final_arrays, num_updates, fresh, to_launcher.warn
                is_saved = saver.saved_step == loop.progress.global_step
                write_model(run_dir, *given, named_groups(loop.step), is_saved=is_saved)
                heartbeat.progress()

        hooks = context.hooks if task == cluster.leader else None
        length = functools.partial(Epochs, plan=source.plan, hooks=hooks) if source.plan else Steps
        driver = Driver(loop, saver, reporter, splits.evaluated, length, write_finished_model)
        if task == cluster.leader:
            announce(driver, splits.note, run_dir, to_launcher)

        # The training. From now on there is something to save when the task is told to stop.
        stop_when_asked()
        wants_profile = config.profile and task == cluster.leader
        profile = profiling.of_run(cluster, task, run_dir, to_launcher.warn) if wants_profile else None
        with saver, abandoning(loop, cluster), profile or contextlib.nullcontext():
            driver.drive()


def announce(driver: Driver, note: str, run_dir: Path, to_launcher: ToLauncher) -> None:
    """Tells the launcher where the run begins, and the note on its data; describes its model in the run directory."""
    loop, restored_from = driver.loop, driver.loop.restored_from
    # The launcher removes the summary when the training begins. Without one the run was stopped after its last step.
    if loop.start and driver.is_at_end and (run_dir / "summary.json").exists():
        restored_from = (
            f"{run_dir}: this run had ended at step {loop.start.step}; nothing was trained; name another run_dir for a "
            "new run"
        )
    if loop.warning:
        to_launcher.warn(loop.warning)
    for text in (note, loop.note):
        if text and not loop.progress.global_step:  # a resumed run has printed it before
            to_launcher.note(text)
    to_launcher.send(Began(loop.progress.global_step))
    describe(run_dir, loop.model, loop.new_optimizer, to_launcher.warn, named_groups(loop.step))
    if restored_from:
        to_launcher.note(restored_from)


@contextlib.contextmanager
def abandoning(loop: Loop, cluster: Cluster) -> Iterator[None]:
    """Tells the other tasks when an error ends the training in this one."""
    try:
        yield
    except Interrupted:
        raise  # the training has been ended on all tasks
    except Exception as error:
        if not cluster.is_managed:  # or the launcher stops the others, with a better reason
            loop.abandon(reason_of(error))
        raise


def first_snapshot(config: RunConfig, checkpoints: Checkpoints, warn: Notify) -> Snapshot | Weights | None:
    """The snapshot from which the run goes on, or its first weights; None for those of the new model."""
    snapshot = checkpoints.newest(warn)
    if snapshot or not config.init_from:
        return snapshot
    source = Checkpoints(Path(config.init_from) / "checkpoints").newest(warn)
    if source is None:
        raise CheckpointError(f"init_from ({config.init_from}): holds no checkpoint; name the directory of a run")
    # In another data format the same weights would belong to other pixels. Another epsilon does not matter to them.
    check_keras(source.facts.keras, KerasConfig(image_data_format=config.keras.image_data_format), "init_from")
    return source.weights()
