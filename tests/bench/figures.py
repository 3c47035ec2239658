"""The measurements of contenders: each function makes one, with real processes."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.bench.contenders import OurRun, fit_run, our_process, our_run, peer
from tests.bench.workload import BATCH_SIZE, DEEP_BATCH_SIZE, EVALUATE_EVERY, HIDDEN_UNITS, NUM_VALIDATION

DEEP_MODELS = str(Path(__file__).with_name("deep_models.py"))
PLUGINS = str(Path(__file__).with_name("plugins.py"))
SLEEP_SECS = 0.05  # the time of a step that does nothing else


def peer_rate(contender: str, mode: str, model: str, num_workers: int, steps: int, arrays: str) -> float:
    """Global steps per second."""
    with peer(contender, mode, model, num_workers, steps, arrays) as (found, _):
        return found["figure"]


def peer_first_step_secs(contender: str, mode: str, model: str, num_workers: int, arrays: str) -> float:
    """From the start of the processes to the end of the first step."""
    start = time.time()
    with peer(contender, mode, model, num_workers, 1, arrays) as (found, _):
        return found["first_step_at"] - start


def our_rate(
    mode: str, model: str, num_workers: int, steps: int, *more: str, optimizer: str = "sgd", plugin: str = ""
) -> float:
    """Our own global steps per second, after as many steps to warm up."""
    overrides = [f"mode={mode}", *model_of(model), f"optimizer={optimizer}", f"train.steps={2 * steps}", *more]
    return run_with(plugin, *cluster_of(num_workers), *overrides).rate(steps)


def examples_rate(mode: str, model: str, num_workers: int, steps: int, *more: str) -> float:
    """Our own examples per second of all workers, in batches of BATCH_SIZE; also of the models of `deep_models`."""
    rate = our_rate(mode, model, num_workers, steps, f"plugins=[{DEEP_MODELS}]", *more)
    return rate * BATCH_SIZE * (num_workers if mode == "sync" else 1)


def keras_examples_rate(model: str, steps: int, arrays: str) -> float:
    """The same of Keras's own `fit`."""
    return peer_rate("keras_fit", "sync", model, 1, steps, arrays) * BATCH_SIZE


def exchanged_mb(mode: str, model: str, num_workers: int, steps: int) -> float:
    """MB per second that workers exchange in their steps: the parameters to another task, and as many from it."""
    # Synchronous workers each exchange them in a step; an asynchronous step is one worker's.
    times = 1 if mode == "async" else num_workers
    return our_rate(mode, model, num_workers, steps) * times * 2 * parameter_bytes(model) / 1e6


def model_of(name: str) -> list[str]:
    """Our options for a model of the benchmark."""
    if not name.endswith("million"):
        return [f"model={name}"]
    return ["model=dnn", f"model.hidden_units={[*HIDDEN_UNITS[name]]}"]


def fit_rate(mode: str, steps: int, epochs: int, arrays: str, callbacks: str) -> float:
    """As `our_rate`, of a call of `fit` with 3 workers and as many epochs over all its steps."""
    return fit_run(mode, 3, 2 * steps, epochs, arrays, callbacks).rate(steps)


def cluster_of(num_workers: int) -> list[str]:
    return ["cluster=local", f"cluster.num_workers={num_workers}"]


def run_with(plugin: str, *overrides: str) -> OurRun:
    """A run of ours, with one of the changes in `plugins`."""
    return our_run(*overrides, *plugin_options(plugin))


def plugin_options(plugin: str) -> list[str]:
    """The options for one of the changes in `plugins`; none for an empty name."""
    if not plugin:
        return []
    os.environ["TF2DIST_BENCH"] = plugin
    return [f"plugins=[{PLUGINS}]"]


def one_step(mode: str, model: str = "dnn", num_workers: int = 3) -> OurRun:
    return our_run(f"mode={mode}", *cluster_of(num_workers), *model_of(model), "optimizer=sgd", "train.steps=1")


def secs_to_first_step(mode: str, model: str = "dnn", num_workers: int = 3) -> float:
    return one_step(mode, model, num_workers).first_step_secs()


def secs_of_one_step(mode: str) -> float:
    """The whole command, from its start to its end."""
    return one_step(mode).wall_secs


def deep_options(mode: str, model: str, *more_plugins: str) -> list[str]:
    """Our options for a model of `deep_models`."""
    plugins = ",".join([DEEP_MODELS, *more_plugins])
    batch = f"train.batch_size_per_worker={DEEP_BATCH_SIZE}"
    return [f"mode={mode}", f"model={model}", f"plugins=[{plugins}]", "optimizer=sgd", batch]


def deep_run(mode: str, model: str, num_workers: int, steps: int) -> OurRun:
    """A run with a model of `deep_models`."""
    return our_run(*cluster_of(num_workers), *deep_options(mode, model), f"train.steps={steps}")


def deep_first_step_secs(mode: str, model: str, num_workers: int) -> float:
    """From the command to the first update."""
    return deep_run(mode, model, num_workers, 1).first_step_secs()


def deep_rate(mode: str, model: str, num_workers: int, steps: int) -> float:
    """Examples per second over the second half of `steps` batches of each worker."""
    times = num_workers if mode == "async" else 1  # there each worker's batch is a global step
    rate = deep_run(mode, model, num_workers, steps * times).rate(steps * times // 2)
    return rate * DEEP_BATCH_SIZE * num_workers / times


def deep_longest_stall(model: str, num_workers: int, steps: int) -> float:
    """The most seconds that a long asynchronous run loses between two looks, in its first steps.

    In these its calls are made longer. The coordinator does not look while it traces a function, so the steps between
    two looks are subtracted, each with the time that it usually takes.
    """
    options = [*cluster_of(num_workers), *deep_options("async", model, PLUGINS), "train.steps=1000000"]
    os.environ["TF2DIST_BENCH"] = "watched"
    with our_process(*options) as (_, run_dir):
        wait_for_step(run_dir, steps)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    pairs = itertools.pairwise((record["time"], record["step"]) for record in records if "loss" in record)
    gaps = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairs]
    usual = statistics.median(secs / done for secs, done in gaps)
    return float(max(secs - done * usual for secs, done in gaps))


def keras_first_step_secs(model: str, arrays: str) -> float:
    """From the start of a process to the first step of Keras's own `fit` in it."""
    start = time.time()
    command = [sys.executable, "-m", "tests.bench.deep_models", model, arrays]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return float(json.loads(done.stdout)["first_step_at"] - start)


def import_secs() -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import tensorflow, keras"], check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def input_rate(how: str, arrays: str) -> float:
    """Batches per second of one pipeline on one core."""
    command = [sys.executable, "-m", "tests.bench.input_rate", how, arrays]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return float(done.stdout.split()[-1])


def secs_to_accuracy(mode: str, accuracy: float) -> float:
    """Seconds from the first step to the first validation with this accuracy; dnn with Adam."""
    often = [f"data.num_validation={NUM_VALIDATION}", f"train.eval_every_steps={EVALUATE_EVERY[mode]}"]
    run = our_run(f"mode={mode}", "experiment=dnn", "optimizer.schedule=constant", *often)
    good = next(record["time"] for record in run.records if record.get("validation_accuracy", 0) >= accuracy)
    return float(good - run.records[0]["time"])


def peer_secs_to_accuracy(contender: str, mode: str, accuracy: float, arrays: str) -> float:
    """The same of another contender."""
    with peer(contender, mode, "dnn", 3, 1_000_000, arrays, accuracy) as (found, _):
        return found["figure"]


def our_pss_mb(num_workers: int, steps: int, model: str = "dnn") -> float:
    """The memory of the launcher and all tasks, after `steps` steps and before the last."""
    overrides = ["mode=async", *model_of(model), "optimizer=sgd", "train.steps=1000000"]
    with our_process(*cluster_of(num_workers), *overrides) as (process, run_dir):
        wait_for_step(run_dir, steps)
        return pss_mb(process.pid)


def added_worker_mb(model: str, num_workers: int, steps: int) -> float:
    """The memory that one more worker adds, beside what it needs for the parameters and their gradients."""
    added = our_pss_mb(num_workers + 1, steps, model) - our_pss_mb(num_workers, steps, model)
    return added - 2 * parameter_bytes(model) / 2**20


def parameter_bytes(model: str) -> int:
    units = [784, *HIDDEN_UNITS[model], 10]
    return 4 * sum((before + 1) * after for before, after in itertools.pairwise(units))


def one_process_pss_mb(steps: int, arrays: str) -> float:
    with peer("bare", "async", "dnn", 1, steps // 2, arrays) as (_, process):
        return pss_mb(process.pid)


def pss_mb(pid: int) -> float:
    """The memory of a process and all its descendants; shared memory is counted once."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return float(sum(one.memory_full_info().pss for one in family) / 2**20)


def task_of(launcher: int, name: str) -> psutil.Process:
    """The process of a task, such as "worker-0"."""
    family = psutil.Process(launcher).children(recursive=True)
    # A task is a fork, so only the file of its output shows which one it is.
    return next(one for one in family if os.readlink(f"/proc/{one.pid}/fd/1").endswith(f"{name}.log"))


def coordinator_cpu(steps: int) -> float:
    """Seconds of the coordinator's CPU for each 1,000 of `steps`, after as many others."""
    overrides = ["mode=async", "model=softmax", "optimizer=sgd", "train.steps=1000000"]
    with our_process(*cluster_of(16), *overrides) as (process, run_dir):
        first = wait_for_step(run_dir, steps)
        chief = task_of(process.pid, "chief-0")
        before = chief.cpu_times()
        last = wait_for_step(run_dir, first + steps)
        after = chief.cpu_times()
    return float((after.user + after.system - before.user - before.system) / (last - first) * 1_000)


def wait_for_step(run_dir: Path, step: int, timeout_secs: float = 240.0) -> int:
    """Waits until a run has reached `step`; returns the step that it has reached."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + timeout_secs
    while time.monotonic() < deadline:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if whole and whole[-1]["step"] >= step:
            return int(whole[-1]["step"])
        time.sleep(0.1)
    raise TimeoutError(f"step {step} was not reached in {timeout_secs:.0f} s")
