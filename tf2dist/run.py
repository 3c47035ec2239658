"""One task's life, from the cluster it belongs to, to the result."""

import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tf2dist import data, devices, peers, serving
from tf2dist.async_loop import AsyncLoop
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.evaluate import Evaluation
from tf2dist.forkserver import Send
from tf2dist.loop import Loop, Progress
from tf2dist.metrics import JsonlWriter, TensorBoardWriter, Writers
from tf2dist.sources import DEFAULT_EPOCHS, check_shard
from tf2dist.sync_loop import SyncLoop

LOOPS = {"async": AsyncLoop, "sync": SyncLoop}
METRICS_EVERY_SECS = 1.0
LEAVE_TIMEOUT_SECS = 10.0


def run_task(config: RunConfig, cluster: Cluster, task: Task, run_dir: Path, send: Send, started_at: float) -> None:
    """Does what `task` has to do in `cluster`; the leader writes the result into `run_dir`.

    Args:
        send: takes progress and messages to the launcher.
        started_at: `time.time()` of the user's command.
    """

    def tell(text: str) -> None:
        send({"event": "message", "text": text})

    # Devices: before anything else touches TensorFlow.
    server_config = devices.configure(config.devices, cluster, task, share_host=config.cluster.kind == "local")
    if config.devices.precision == "bfloat16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")

    # A parameter server needs no data, and an asynchronous worker only serves.
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

    # The others: an asynchronous coordinator or a synchronous worker.
    if cluster.mode == "async":
        servers = [other for other in cluster.tasks if other.job in ("ps", "worker")]
        peers.wait_for_peers(cluster, servers, config.startup_timeout_secs, tell)
    reporter = Reporter(run_dir, task, send) if task == cluster.leader else None
    loop: Loop = LOOPS[config.mode](config, cluster, task, splits, reporter or (lambda progress: None))
    target_step = choose_target(config, loop)
    if reporter:
        reporter.begin(target_step, loop.updates_per_epoch, time.time() - started_at)

    # Train, with an evaluation wherever one is due.
    every = config.train.eval_every_steps
    while loop.progress.global_step < target_step:
        step = loop.progress.global_step
        loop.train(min(target_step, (step // every + 1) * every) if every else target_step)
        if every and reporter:
            pass
        if every and loop.progress.global_step < target_step:
            record_evaluation(loop, "validation", reporter)

    # The result.
    trained_at = time.time()
    validation = record_evaluation(loop, "validation", reporter) if len(splits.validation) else None
    test = record_evaluation(loop, "test", reporter)
    loop.finish(test.accuracy)
    if reporter:
        summary = reporter.summary(config, cluster, loop, target_step, validation, test)
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        reporter.close()
        send({"event": "result", "summary": summary})
        # The first worker hosts the coordination service: whoever still listens to it must leave first.
        others = [other for other in cluster.training_tasks if other != task] if cluster.mode == "sync" else []
        peers.wait_until_gone(cluster, others, LEAVE_TIMEOUT_SECS)
    del trained_at


def choose_target(config: RunConfig, loop: Loop) -> int:
    if config.train.steps is not None:
        return config.train.steps
    epochs = config.train.epochs or DEFAULT_EPOCHS.get(config.data.name, 5.0)
    return max(1, math.ceil(epochs * loop.updates_per_epoch))
