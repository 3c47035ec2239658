"""A ps and the workers of its host exchange large tensors in memory that they share."""

import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.cancellation import CancellationManager

from tests.replica.small_runs import run_config
from tests.replica.test_resume import taken
from tf2dist import registry
from tf2dist.model import packing
from tf2dist.training.asynchronous import carriers, shared_memory
from tf2dist.training.asynchronous.carriers import SPARE_BYTES, ByMemory, ByMessage, Room, exchange
from tf2dist.training.asynchronous.doorbells import Push
from tf2dist.training.asynchronous.shared_memory import Files, works_here

MakeLoop = Callable[..., Any]
PLACES = Room([tf.TensorSpec([2, 3]), tf.TensorSpec([5], tf.bfloat16)], 0, 0).places
SIZE = 128  # both arrays begin at a multiple of 64 bytes
ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5).astype(tf.bfloat16.as_numpy_dtype)]
WORKER = np.array(1), np.array(SIZE), np.array(2)  # its index, and the number of ps


@pytest.fixture(name="worker")
def _worker() -> Files:
    if not works_here():
        pytest.skip("this system has no files in memory that other processes can open")
    return Files()


def assert_holds(found: list[np.ndarray], arrays: list[np.ndarray]) -> None:
    for one, other in zip(found, arrays, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other.reshape(-1))


def test_each_end_reads_what_the_other_has_written(worker: Files) -> None:
    ps = Files()
    ticket = worker.begin(*WORKER)
    ps.put(ticket, PLACES, *ARRAYS)
    assert_holds(worker.take(ticket, PLACES), ARRAYS)
    worker.put(ticket, PLACES, *(2 * array for array in ARRAYS))
    found = ps.take(ticket, PLACES)
    assert_holds(found, [2 * array for array in ARRAYS])
    # TensorFlow copies nothing from such an array, and may write into it.
    assert all(array.ctypes.data % 64 == 0 and array.flags.writeable for array in found)


def test_what_lies_in_the_file_can_be_put_elsewhere_in_it(worker: Files) -> None:
    ticket, places = worker.begin(*WORKER), PLACES[[0, 0]] + [[0, 0, 0], [64, 0, 0]]
    worker.put(ticket, places, ARRAYS[0], ARRAYS[0] + 1)
    worker.put(ticket, places, *reversed(worker.take(ticket, places)))
    assert_holds(worker.take(ticket, places), [ARRAYS[0] + 1, ARRAYS[0]])


def test_a_worker_and_the_ps_wait_for_each_other(worker: Files) -> None:
    ps, ticket, end = Files(), worker.begin(*WORKER), ThreadPoolExecutor()
    more, last, secs = np.array(True), np.array(False), np.array(10.0)

    def serve(number: int) -> list[int]:
        which = np.array(number)
        pushes = [int(ps.await_push(ticket, which, more))]
        while pushes[-1] > Push.LAST:
            ps.answer(ticket, which, more, PLACES[number : number + 1], ARRAYS[number] + len(pushes))
            pushes.append(int(ps.await_push(ticket, which, more)))
        return [*pushes, int(ps.await_push(ticket, which, last))]

    served = [end.submit(serve, number) for number in range(2)]
    for number in range(1, 4):
        answered = worker.exchange(ticket, more if number < 3 else last, secs, PLACES, *(-array for array in ARRAYS))
        while not answered:  # for ten seconds at most
            answered = worker.await_answers(ticket, secs)
        if number < 3:
            assert_holds(worker.take(ticket, PLACES), [array + number for array in ARRAYS])
    assert [each.result() for each in served] == 2 * [[Push.WITH_MORE, Push.WITH_MORE, Push.LAST, Push.NONE]]
    assert_holds(worker.take(ticket, PLACES), [-array for array in ARRAYS])


def test_a_worker_does_not_wait_for_ever(worker: Files) -> None:
    ticket = worker.begin(*WORKER)
    Files().answer(ticket, np.array(0), np.array(True), PLACES, *ARRAYS)
    answered = worker.exchange(ticket, np.array(True), np.array(2.0), PLACES, *ARRAYS)
    assert not answered, "one that waits looks up from time to time"
    with pytest.raises(TimeoutError, match="ps-1 has not answered for 2 s"):
        worker.await_answers(ticket, np.array(2.0))


def test_a_worker_that_waits_learns_that_its_call_is_cancelled() -> None:
    """Else an error of another worker would reach the user after `watchdog_secs` only."""
    shared_memory.publish()
    carrier, begun = ByMemory(), threading.Event()
    room = carrier.way([tf.TensorSpec([8])])

    @tf.function
    def call() -> tf.Tensor:
        ticket = carrier.begin(tf.constant(0))
        with tf.control_dependencies(ticket):
            tf.py_function(begun.set, [], [])
        return exchange([room], [[tf.zeros([8])]], ticket, tf.constant(True), 600.0)

    calls = CancellationManager()
    waiting = ThreadPoolExecutor().submit(calls.get_cancelable_function(call.get_concrete_function()))
    assert begun.wait(60)
    time.sleep(0.1)  # so that it waits already, though nothing depends on that
    calls.start_cancel()
    with pytest.raises(tf.errors.CancelledError):
        waiting.result(timeout=60)


def test_a_ps_is_told_that_a_worker_has_begun_another_call(worker: Files) -> None:
    ps, given_up = Files(), worker.begin(*WORKER)
    ps.answer(given_up, np.array(0), np.array(True), PLACES, *ARRAYS)
    waiting = ThreadPoolExecutor().submit(ps.await_push, given_up, np.array(0), np.array(True))
    worker.begin(*WORKER)
    with pytest.raises(EOFError, match="left"):
        waiting.result(timeout=10)


def test_a_ps_does_not_answer_another_call(worker: Files) -> None:
    ps, given_up = Files(), worker.begin(*WORKER)
    ps.take(given_up, PLACES)
    tickets = [worker.begin(*WORKER) for _ in range(2)]  # the second has the numbers of the pipes that were given up
    with pytest.raises(OSError, match=r"another|No such file"):
        ps.answer(given_up, np.array(0), np.array(True), PLACES, *ARRAYS)
    with pytest.raises(TimeoutError):
        worker.exchange(tickets[-1], np.array(True), np.array(1.0), PLACES, *ARRAYS)


def test_the_next_call_has_the_same_file(worker: Files) -> None:
    ticket = worker.begin(*WORKER)
    worker.end(ticket)
    assert worker.begin(*WORKER).tolist() == ticket.tolist()


def test_a_call_after_one_that_was_given_up_has_another_file(worker: Files) -> None:
    ps, given_up = Files(), worker.begin(*WORKER)
    worker.put(given_up, PLACES, *ARRAYS)
    being_read = ps.take(given_up, PLACES)
    ticket = worker.begin(*WORKER)
    assert ticket.tolist() != given_up.tolist()
    for files in (worker, ps):
        files.put(ticket, PLACES, *(array + 1 for array in ARRAYS))
    assert_holds(being_read, ARRAYS)

    # Whatever still runs of it cannot write, and does not end the other call.
    for touch in (worker.end, lambda it: worker.put(it, PLACES, *ARRAYS), lambda it: worker.take(it, PLACES)):
        with pytest.raises((OSError, ValueError), match=r"another|No such file"):
            touch(given_up)
    assert worker.begin(*WORKER).tolist() != ticket.tolist(), "the other call has not ended"


def test_a_file_of_others_is_not_opened(worker: Files) -> None:
    ticket = worker.begin(*WORKER)
    ticket[-1] += 1
    with pytest.raises(OSError, match="another file"):
        Files().take(ticket, PLACES)


def test_it_is_left_out_where_the_size_of_files_is_limited(worker: Files) -> None:
    before, limits = set(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[1]))
    try:
        assert not works_here()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("algorithm", ["plain", "staleness_aware", "delay_compensated", "bounded"])
@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_training_is_the_same_in_memory_and_in_messages(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, algorithm: str, num_steps: int
) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    ends = []
    for carrier, works in ((ByMemory, True), (ByMessage, False)):
        monkeypatch.setattr(carriers, "works_here", lambda works=works: works)
        config = run_config("dnn", "adam", steps_per_execution=num_steps, hidden_units=[32])
        config.algorithm.kind = algorithm
        if algorithm == "delay_compensated":
            config.optimizer["name"] = "sgd"
        loop = async_loop(config, num_workers=1, num_ps=2)
        assert type(loop._graphs.carrier) is carrier
        loop.train(25)
        ends.append((taken(loop), loop.evaluate("validation")))
    (one, evaluated), (other, as_well) = ends
    assert evaluated == as_well
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name], name)


class MeanOfBatch(keras.layers.Layer):
    """Keeps the mean of the last batch."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(shape=input_shape[1:], initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(keras.ops.mean(x, 0))
        return x


@registry.register_model("mean_of_batch")
def mean_of_batch(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    flat = [layers.Rescaling(1 / 255), layers.Flatten(), MeanOfBatch(name="last")]
    return keras.Sequential([keras.Input(input_shape), *flat, layers.Dense(num_classes, name="logits")])


@registry.register_optimizer("keeping")
class Keeping(keras.optimizers.SGD):  # type: ignore[misc]
    """Keeps the last gradients."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.kept = self.add_optimizer_variables(variables, "kept")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign(self.kept[self._get_variable_index(variable)], gradient)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize(("model", "optimizer"), [("mean_of_batch", "sgd"), ("softmax", "keeping")])
def test_no_variable_lies_in_memory_that_a_worker_writes(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, model: str, optimizer: str
) -> None:
    """The last call has steps that are refused, of which the worker puts everything there all the same."""
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    ends = []
    for works in (True, False):
        monkeypatch.setattr(carriers, "works_here", lambda works=works: works)
        config = run_config(model, steps_per_execution=10)
        config.optimizer = {"name": optimizer, "learning_rate": 0.1}
        loop = async_loop(config, num_workers=1)
        loop.train(25)
        ends.append(loop.arrays())
    of_memory, of_messages = ends
    for name, array in of_messages.items():
        np.testing.assert_array_equal(of_memory[name], array, name)


def test_gradients_lie_where_the_values_were_that_they_were_computed_from(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    loop = async_loop(run_config("softmax", "sgd"), num_workers=1, num_ps=1)
    (server,) = loop._graphs.servers
    assert server.pushes.first == server.pulls.first
    assert server.pushes.end <= loop._graphs.carrier.size < 2 * 4 * 784 * 10 + SPARE_BYTES


def test_small_variables_travel_in_messages(async_loop: MakeLoop) -> None:
    assert type(async_loop(run_config())._graphs.carrier) is ByMessage
