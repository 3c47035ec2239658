"""One task's life, from the cluster that it belongs to, to the result."""

from collections.abc import Callable
from pathlib import Path

import keras

from tf2dist import data, devices, peers, serving
from tf2dist.async_loop import AsyncLoop
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.evaluate import Evaluation
from tf2dist.forkserver import Send
from tf2dist.loop import Loop
from tf2dist.report import Reporter
from tf2dist.sources import check_shard
from tf2dist.stopping import end_on_sigterm
from tf2dist.sync_loop import SyncLoop

LOOPS: dict[str, Callable[..., Loop]] = {"async": AsyncLoop, "sync": SyncLoop}
LEAVE_TIMEOUT_SECS = 10.0


def run_task(config: RunConfig, cluster: Cluster, task: Task, run_dir: Path, send: Send, started_at: float) -> None:
    """Does what `task` has to do in `cluster`; the leader writes the result into `run_dir`.

    Args:
        send: takes progress, messages and the result to the launcher.
        started_at: `time.time()` of the user's command.
    """

    def tell(text: str) -> None:
        send({"event": "message", "text": text})

    # Devices, before anything else touches TensorFlow.
    server_config = devices.configure(config.devices, cluster, task, share_host=config.cluster.kind == "local")
    if config.devices.precision == "bfloat16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")

    # A parameter server has no data of its own, and an asynchronous worker serves it.
    if task.job == "ps":
        serving.serve(cluster, task, server_config, tell)
        return
    splits = data.load(config.data)
    check_shard(config.train.batch_size_per_worker, len(splits.train), cluster.num_workers)
    if cluster.mode == "async" and task.job == "worker":
        serving.publish(splits)
        farewell = serving.serve(cluster, task, server_config, tell)
        print(f"worker={task.index}, final accuracy={farewell['final_accuracy']:.4f}", flush=True)
        return

    # The others drive the training: an asynchronous coordinator, or every synchronous worker.
    if cluster.mode == "async":
        servers = [other for other in cluster.tasks if other.job in ("ps", "worker")]
        peers.wait_for_peers(cluster, servers, config.startup_timeout_secs, tell)
    reporter = Reporter(run_dir, task, send, started_at) if task == cluster.leader else None
    loop = LOOPS[config.mode](
        config, cluster, task, splits, reporter.on_progress if reporter else lambda progress: None
    )
    end_on_sigterm()
    target_step = loop.target_step
    if reporter:
        reporter.target_step = target_step

    # Train, with an evaluation wherever one is due.
    every = config.train.eval_every_steps or target_step
    while (step := loop.progress.global_step) < target_step:
        loop.train(min(target_step, (step // every + 1) * every))
        if loop.progress.global_step < target_step and len(splits.validation):
            evaluate(loop, "validation", reporter)

    # The result.
    validation = evaluate(loop, "validation", reporter) if len(splits.validation) else None
    test = evaluate(loop, "test", reporter)
    if reporter:
        reporter.finish(config, cluster, loop, validation, test)
    loop.finish(test.accuracy)
    if cluster.mode == "sync" and task == cluster.leader:
        # The leader hosts the coordination service: who still listens to it must leave first.
        others = [other for other in cluster.training_tasks if other != task]
        peers.wait_until_gone(cluster, others, LEAVE_TIMEOUT_SECS)


def evaluate(loop: Loop, split: str, reporter: Reporter | None) -> Evaluation:
    evaluation = loop.evaluate(split)
    if reporter:
        reporter.on_evaluation(split, loop.progress.global_step, evaluation)
    return evaluation
