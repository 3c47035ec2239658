"""One task's life, from the cluster that it belongs to, to the result."""

from collections.abc import Callable
from pathlib import Path

import keras

from tf2dist import data, devices, peers, serving
from tf2dist.async_loop import AsyncLoop
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.errors import first_line
from tf2dist.evaluate import Evaluation
from tf2dist.forkserver import Send
from tf2dist.loop import Loop
from tf2dist.report import NoReporter, Reporter
from tf2dist.sources import check_shard
from tf2dist.stopping import end_on_sigterm
from tf2dist.sync_loop import SyncLoop

LOOPS: dict[str, Callable[..., Loop]] = {"async": AsyncLoop, "sync": SyncLoop}


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
        serving.serve(cluster, task, server_config, config.startup_timeout_secs)
        return
    splits = data.load(config.data)
    check_shard(config.train.batch_size_per_worker, len(splits.train), cluster.num_workers)
    if cluster.mode == "async" and task.job == "worker":
        serving.publish(splits)
        farewell = serving.serve(cluster, task, server_config, config.startup_timeout_secs)
        print(f"worker={task.index}, final accuracy={farewell['final_accuracy']:.4f}", flush=True)
        return

    # The others drive the training: an asynchronous coordinator, or every synchronous worker.
    if cluster.mode == "async":
        servers = [other for other in cluster.tasks if other.job in ("ps", "worker")]
        peers.wait_for_peers(cluster, servers, config.startup_timeout_secs, tell)
    with Reporter(run_dir, task, send, started_at) if task == cluster.leader else NoReporter() as reporter:
        loop = LOOPS[config.mode](config, cluster, task, splits, reporter.on_progress)
        reporter.target_step = loop.target_step
        end_on_sigterm()
        try:
            drive(config, cluster, loop, reporter, has_validation=len(splits.validation) > 0)
        except Exception as error:
            if config.cluster.kind != "local":  # there the launcher stops the others, with a better reason
                loop.abandon(first_line(str(error)))
            raise


def drive(config: RunConfig, cluster: Cluster, loop: Loop, reporter: NoReporter, has_validation: bool) -> None:
    """From the first step to the result."""

    def evaluate(split: str) -> Evaluation:
        evaluation = loop.evaluate(split)
        reporter.on_evaluation(split, loop.progress.global_step, evaluation)
        return evaluation

    # Train, with an evaluation wherever one is due.
    every = config.train.eval_every_steps or loop.target_step
    while (step := loop.progress.global_step) < loop.target_step:
        loop.train(min(loop.target_step, (step // every + 1) * every))
        if loop.progress.global_step < loop.target_step and has_validation:
            evaluate("validation")

    # The result.
    validation = evaluate("validation") if has_validation else None
    test = evaluate("test")
    reporter.on_result(config, cluster, loop, validation, test)
    loop.finish(test.accuracy)
