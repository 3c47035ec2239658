"""Runs one contender once, as real processes, and returns what it did."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.bench.workload import TABLE_ROWS, WARM, Workload
from tf2dist.cluster.reachability import why_unreachable
from tf2dist.linux import unused_ports
from tf2dist.tf_constants import ONEDNN

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_FAIL_FAST": "use_caller", "NO_GCE_CHECK": "true"}
TIMEOUT_SECS = 300.0
START_TIMEOUT_SECS = 60.0
# TensorFlow imports JAX where it is installed, and starts seconds later. So JAX has an environment of its own.
JAX_PYTHON = Path(__file__).parents[2] / "build/jax/bin/python"
# How to install those that not every machine has.
INSTALL = {
    "torch gloo": ".venv/bin/pip install -e '.[torch]'",
    "keras jax": ".venv/bin/python -m venv build/jax && build/jax/bin/pip install keras jax",
}
MODULES = {
    "old": "old_program",
    "old, our threads": "old_program",
    "old, oneDNN": "old_program",
    "plain": "plain_port",
    "torch": "torch_ddp",
    "keras jax": "keras_jax",
    "keras_fit": "one_process",
}


def is_installed(contender: str) -> bool:
    if contender == "torch gloo":
        return find_spec("torch") is not None
    return contender != "keras jax" or JAX_PYTHON.exists()


class ContenderError(Exception):
    """A contender has failed; the message has its output."""


def jobs_of(contender: str, mode: str, num_workers: int, num_ps: int) -> dict[str, list[str]]:
    """The processes of a contender; ours starts its own."""
    if contender in ("keras_fit", "bare"):
        return {"worker": ["localhost:0"]}
    sizes = {"worker": num_workers}
    if contender.startswith("old") or (contender == "plain" and mode == "async"):
        sizes["ps"] = num_ps
    if contender == "plain" and mode == "async":
        sizes["chief"] = 1
    ports = iter(unused_ports(sum(sizes.values())))
    return {job: [f"localhost:{next(ports)}" for _ in range(size)] for job, size in sizes.items()}


@contextmanager
def peer(
    contender: str, mode: str, model: str, num_workers: int, steps: int, arrays: str, accuracy: float = 0.0
) -> Iterator[tuple[dict[str, float], subprocess.Popen[str]]]:
    """Any contender but ours: what it has measured, and its leader, which waits.

    The "figure" is its rate over `steps` global steps, after as many, or the seconds to an accuracy. "cpu_secs" is the
    time of processors in all its processes over its "timed_steps".
    """
    # The tables of embeddings lie on both the ps.
    jobs = jobs_of(contender, mode, num_workers, num_ps=2 if model in TABLE_ROWS else 1)
    leader = ("chief", 0) if "chief" in jobs else ("worker", 0)
    # The coordinator of the plain port comes last: it does not wait for its servers.
    tasks = [(job, index) for job in ("ps", "worker", "chief") for index in range(len(jobs.get(job, [])))]
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        try:
            for job, index in tasks:
                if job == "chief":
                    _wait_for([address for other in ("ps", "worker") for address in jobs[other]])
                workload = Workload(mode, model, jobs, job, index, 2 * steps, steps, arrays, accuracy)
                processes[job, index] = _start(contender, workload, Path(folder))
            yield _result(processes[leader], [process.pid for process in processes.values()]), processes[leader]
        except ContenderError as error:
            what = f"{contender} {mode} {model} with {num_workers} workers"
            raise ContenderError(f"{what}: {error}\n{_tails(Path(folder))}") from None
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def _tails(logs: Path) -> str:
    """The last lines of the output of the tasks."""
    files = sorted(logs.glob("*.log"))
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def _wait_for(addresses: list[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECS
    while missing := [address for address in addresses if why_unreachable(address)]:
        if time.monotonic() > deadline:
            raise ContenderError(f"{', '.join(missing)} did not answer in {START_TIMEOUT_SECS:.0f} s")
        time.sleep(0.1)


def _start(contender: str, workload: Workload, logs: Path) -> subprocess.Popen[str]:
    module = f"tests.bench.{MODULES.get(contender, 'one_process')}"
    more = {ONEDNN: "1"} if contender == "old, oneDNN" else {}
    python = JAX_PYTHON if contender == "keras jax" else sys.executable
    with open(logs / f"{workload.job}-{workload.index}.log", "w") as log:
        return subprocess.Popen(
            [python, "-m", module, workload.to_argument(), contender],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **QUIET, **more},
        )


def cpu_secs(pids: Iterable[int]) -> float:
    """The time of processors that processes have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


def _result(process: subprocess.Popen[str], pids: Sequence[int]) -> dict[str, float]:
    """The JSON that the leader prints within TIMEOUT_SECS, with the time of processors in all processes since WARM."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    deadline, before = time.monotonic() + TIMEOUT_SECS, 0.0
    try:
        while line := lines.get(timeout=max(0.0, deadline - time.monotonic())):
            if line.strip() == WARM:
                before = cpu_secs(pids)
            if line.startswith("{"):
                return {"cpu_secs": cpu_secs(pids) - before, **json.loads(line)}
    except queue.Empty:
        raise ContenderError(f"not done in {TIMEOUT_SECS:.0f} s") from None
    raise ContenderError(f"ended with code {process.wait()}")


class OurRun:
    """One run of the command.

    Attributes:
        started_at: `time.time()` before its start.
        records: the lines of metrics.jsonl.
    """

    def __init__(self, run_dir: Path, started_at: float, wall_secs: float) -> None:
        self.started_at, self.wall_secs = started_at, wall_secs
        self.records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        self.summary = json.loads((run_dir / "summary.json").read_text())

    def rate(self, warmup_steps: int) -> float:
        """Steps per second of training from the first record at or after `warmup_steps` to the last."""
        timed = [
            (r["training_secs"], r["step"]) for r in self.records if "steps_per_sec" in r and r["step"] >= warmup_steps
        ]
        if len(timed) < 2:
            raise ContenderError(f"{self.summary['target_step']} steps are too few: one look after the warm-up")
        (first_time, first_step), (last_time, last_step) = timed[0], timed[-1]
        return float((last_step - first_step) / (last_time - first_time))

    def first_step_secs(self) -> float:
        """From the command to the first update that the coordinator has seen."""
        return float(self.records[0]["time"] - self.started_at)


@contextmanager
def our_process(*overrides: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The command in a temporary run directory, which is removed at the end of the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        process = subprocess.Popen(
            [sys.executable, "-m", "tf2dist", f"run_dir={run_dir}", "data.offline=fail", *overrides],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, run_dir
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)


def our_run(*overrides: str) -> OurRun:
    started_at, start = time.time(), time.monotonic()
    with our_process(*overrides) as (process, run_dir):
        output, _ = process.communicate(timeout=TIMEOUT_SECS)
        wall_secs = time.monotonic() - start
        if process.returncode:
            logs = _tails(run_dir / "logs")
            raise ContenderError(f"tf2dist {' '.join(overrides)} ended with code {process.returncode}\n{output}{logs}")
        return OurRun(run_dir, started_at, wall_secs)


def fit_run(mode: str, num_workers: int, steps: int, epochs: int, arrays: str, callbacks: str) -> OurRun:
    """A call of `tf2dist.fit` in a separate process."""
    started_at, start = time.time(), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        arguments = [mode, str(num_workers), str(steps), str(epochs), arrays, str(run_dir), callbacks]
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.fit_run", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECS,
        )
        if done.returncode:
            raise ContenderError(f"fit {' '.join(arguments)} ended with code {done.returncode}\n{done.stderr[-3000:]}")
        return OurRun(run_dir, started_at, time.monotonic() - start)
