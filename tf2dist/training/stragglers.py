"""Workers that are slowed down on purpose, and when their steps begin and end: the options simulate.* and timeline.

A delay comes between what a step reads and what it computes, as if the worker computed more slowly: with mode=async
its updates become staler, and with mode=sync all others wait for it. The graph of a step calls a function of the
worker's own process, which sleeps: that takes no core, and one of the threads that execute the graphs of this one
process. If nothing is simulated, the graph of a step has nothing of this.

A step begins when all that it needs has come, and ends when its gradient is there; between two steps a worker waits. To
record that, the graph calls another function of the worker's process at both moments.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig, SimulateConfig
from tf2dist.process import heartbeat
from tf2dist.process.inbox import asked_to_stop
from tf2dist.tf_internals.tensorflow import publish_functions
from tf2dist.training.loop import MAX_STEPS, steps_in_call_secs

DELAY_TOKEN, TIMELINE_TOKEN = "tf2dist.straggle", "tf2dist.timeline"
LOOK_SECS = 0.1  # how soon a delay ends when the run is asked to stop
FOLDER = "timeline"
FLUSH_SECS = 0.5  # a worker's process may be killed at the end of the run
RECORDED_STEPS = 20_000  # of each worker: some hundred kilobytes
TAIL = 30  # an exponential delay is more than 30 means longer than expected once in 10^13 steps

Tensors = TypeVar("Tensors")  # tensors in any structure
# TensorFlow holds Python functions by weak references only.
_published_functions: dict[str, Callable[..., int]] = {}


class Sleeper:
    """Delays a step: the graph of a step calls it in the worker's process.

    The delay depends on nothing but the seed, the worker and the step. So a run that is repeated or resumed draws the
    same delays.

    Attributes:
        simulated: the options.
        seed: of the run.
        pausing: the index of the worker that pauses; None for no worker.
    """

    def __init__(self, simulated: SimulateConfig, seed: int, pausing: int | None) -> None:
        self.simulated, self.seed, self.pausing = simulated, seed, pausing
        self._lock = threading.Lock()
        self._has_paused = False

    def __call__(self, worker: np.ndarray, counted: np.ndarray, number: np.ndarray) -> int:
        """Sleeps as long as a step is delayed; see `Stragglers.delayed`."""
        # A call may take many delayed steps, and each of them is progress.
        heartbeat.progress()
        index, step = int(worker), int(counted) + int(number)
        end_at = time.monotonic() + self.secs(index, step) + self.pause_secs(index, step)
        while (left := end_at - time.monotonic()) > 0 and not asked_to_stop():
            time.sleep(min(left, LOOK_SECS))
        return 0

    def secs(self, worker: int, step: int) -> float:
        """The delay of a worker's step, the pause not included; `step`: among its own, from 1."""
        means = self.simulated.delay_secs
        mean = means[worker] if means else 0.0
        if self.simulated.distribution == "constant" or not mean:
            return mean
        return random.Random(f"{self.seed} {worker} {step}").expovariate(1 / mean)

    def pause_secs(self, worker: int, step: int) -> float:
        """How long a worker pauses in a step; 0 if it does not, or has done so."""
        pause = self.simulated.parsed_pause
        if not pause or (worker, step) != (self.pausing, pause.step):
            return 0.0
        # A step comes again if its update was refused at the end of an epoch, and on several GPUs at the same time.
        with self._lock:
            if self._has_paused:
                return 0.0
            self._has_paused = True
        print(f"worker={worker}, local_step={step}: a simulated pause of {pause.secs:g} s", flush=True)
        return pause.secs


class Recorder:
    """Notes when a step begins and ends: the graph of a step calls it in the worker's process.

    Writes a file for each worker, worker-0.csv and so on, with a line for each step: when it began and when it ended,
    in seconds as of `time.time()`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._begun_at: dict[int, float] = {}
        self._files: dict[int, TextIO] = {}
        self._num_steps: dict[int, int] = {}
        self._flushed_at = 0.0

    def __call__(self, worker: np.ndarray, has_ended: np.ndarray) -> int:
        now, index = time.time(), int(worker)
        with self._lock:
            if not has_ended:
                self._begun_at[index] = now
            elif (begun_at := self._begun_at.pop(index, None)) is not None:
                self._write(index, begun_at, now)
        return 0

    def _write(self, worker: int, begun_at: float, ended_at: float) -> None:
        number = self._num_steps[worker] = self._num_steps.get(worker, 0) + 1
        if number > RECORDED_STEPS:
            return
        try:
            file = self._files.get(worker) or self._open(worker)
            file.write(f"{begun_at:.6f},{ended_at:.6f}\n")
            if ended_at - self._flushed_at > FLUSH_SECS:
                file.flush()
                self._flushed_at = ended_at
        except (OSError, ValueError):  # a full disk, after which the file may be closed: the training goes on
            self._num_steps[worker] = RECORDED_STEPS

    def _open(self, worker: int) -> TextIO:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        file = self._files[worker] = open(self._folder / f"worker-{worker}.csv", "a", encoding="ascii")  # noqa: SIM115
        return file


def called(tensors: Tensors, token: str, *arguments: Any) -> Tensors:
    """The tensors, once all of them are on the worker and its function of this token has returned.

    Args:
        arguments: whole numbers.
    """
    with tf.device("CPU:0"):
        # What waits for a tensor of a ps by a control dependency does not wait for the transfer: it only hears that the
        # ps has made the tensor.
        arrived = tf.nest.map_structure(tf.identity, tensors)
        with tf.control_dependencies(tf.nest.flatten(arrived)):
            inputs = [tf.cast(argument, tf.int64) for argument in arguments]
            done = tf.raw_ops.PyFunc(input=inputs, token=token, Tout=[tf.int64])
    with tf.control_dependencies(done):
        copies: Tensors = tf.nest.map_structure(tf.identity, arrived)
        return copies


class Stragglers:
    """Operations around the computation of a step, in its graph: the simulated delays, and the recording of its times.

    Each worker must have called `publish`.

    Attributes:
        max_steps: of a call, so that no worker takes much longer for it than `loop.CALL_SECS`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._is_simulated, self._is_recorded = config.simulate.is_on, config.timeline
        longest_secs = max(config.simulate.delay_secs, default=0.0)
        self.max_steps = steps_in_call_secs(longest_secs) if longest_secs else MAX_STEPS

    def delayed(self, inputs: Tensors, worker: Any, counted: tf.Tensor, number: int) -> Tensors:
        """The inputs of a step's computation, after the delay of this step, which begins when all of them are there.

        Args:
            worker: its index.
            counted: the steps that are counted for it before this call.
            number: of the step among those of this call, from 1.
        """
        if self._is_recorded:
            inputs = called(inputs, TIMELINE_TOKEN, worker, False)
        return called(inputs, DELAY_TOKEN, worker, counted, number) if self._is_simulated else inputs

    def computed(self, outputs: Tensors, worker: Any) -> Tensors:
        """The outputs of a step's computation, before they are sent."""
        return called(outputs, TIMELINE_TOKEN, worker, True) if self._is_recorded else outputs


def publish(config: RunConfig, cluster: Cluster, run_dir: Path) -> None:
    """Makes the delays and the recorder callable by the graphs that run in this process.

    It has one worker or, in tests, several.
    """
    if config.simulate.is_on:
        pause = config.simulate.parsed_pause
        pausing = cluster.training_tasks.index(Task.parse(pause.task)) if pause else None
        _published_functions[DELAY_TOKEN] = Sleeper(config.simulate, config.seed, pausing)
    if config.timeline:
        _published_functions[TIMELINE_TOKEN] = Recorder(run_dir / FOLDER)
    if _published_functions:
        publish_functions(_published_functions)


def longest_secs(config: RunConfig) -> float:
    """The longest time that delays add between two signs of progress; 0 if nothing is simulated.

    This is that of a whole call: an asynchronous coordinator waits for all calls before it saves.
    """
    simulated, num_steps = config.simulate, config.train.steps_per_execution or 1
    mean, pause = max(simulated.delay_secs, default=0.0), simulated.parsed_pause
    steps = num_steps if simulated.distribution == "constant" else 2 * num_steps + TAIL
    return mean * steps + (pause.secs if pause else 0.0)
