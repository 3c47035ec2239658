"""Chaos: kills and freezes at random moments of a running job; all the same it ends exactly, and leaves nothing.

``make chaos SEED=n`` runs two minutes of it in each mode and with each algorithm; ``make slow`` runs a shorter one,
with a seed that it prints.
"""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import (
    MAX_SLOWNESS,
    Command,
    fork_servers_of,
    is_warm,
    our_processes,
    slowness,
    task_process,
    wait_until,
)
from tf2dist.checkpoint import snapshot
from tf2dist.config.schema import ALGORITHMS

CHAOS_SECS = float(os.environ.get("TF2DIST_CHAOS_SECS") or 10)
SEED = int(os.environ.get("TF2DIST_CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
# On a machine that does nothing else; see `slowness`.
HEAL_SECS = 90.0  # from the last act to the next checkpoint
GONE_SECS = 5.0  # for the tasks, once their launcher is dead
WATCHDOG_SECS, GRACE_SECS = 8.0, 20.0
COMMON = [
    *("data=digits", "max_restarts=1000", "figure=true", "train.log_every_steps=50"),
]
EVERY_STEPS = {"async": 500, "sync": 50, "sync_replicas": 50}
RUNS = [
    *((entry.mode, algorithm, "") for algorithm, entry in ALGORITHMS.items()),
    ("sync", "plain", ""),
    ("sync_replicas", "plain", ""),
    ("async", "plain", "deep.py"),
    ("async", "staleness_aware", "deep.py"),
]
# Small models count as large and as deep: their tensors travel alone, and a call has one step.
DEEP = """
from tf2dist.model import packing
from tf2dist.training import loop

packing.LARGE_BYTES, loop.UNROLLED_OPERATIONS = 256, 0
"""
LEARNED_AT = {"async": 6_000, "sync": 800, "sync_replicas": 800}  # an accuracy of 0.9
RESULTS = {"summary.json", "model.json", "model.keras", "training.png"}
BELONGS = {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "logs", ".lock", ".hydra", *RESULTS}
CULPRIT = re.compile(r"warning: (\S+) (was killed by SIGKILL|showed no sign of life for \d+ s); starting")
KILLED = "was killed by SIGKILL"


class Chaos:
    """A job, and what is done to it.

    Attributes:
        process: the launcher of this moment.
        told: a line for each thing that was done.
    """

    def __init__(self, command: Command, mode: str, algorithm: str, plugin: str, seed: int) -> None:
        self._command, self._random = command, random.Random(f"{mode} {algorithm} {plugin} {seed}")
        self.run_dir = command.folder / "run"
        self._others = {process.pid for process in our_processes()}  # such as a fixture's fork server
        num_workers, num_ps = self._random.choice([2, 3]), self._random.choice([1, 2])
        self._arguments = [
            *(f"mode={mode}", f"algorithm={algorithm}", *COMMON, f"model={self._random.choice(['softmax', 'dnn'])}"),
            *("cluster=local", f"cluster.num_workers={num_workers}"),
            f"train.steps_per_execution={self._random.choice([10, 'null'])}",
            f"checkpoint.every_steps={EVERY_STEPS[mode]}",
            f"plugins=[{plugin}]",
        ]
        (command.folder / "deep.py").write_text(DEEP)
        self._tasks = [f"worker-{index}" for index in range(num_workers)]
        if mode != "sync":
            self._arguments.append(f"cluster.num_ps={num_ps}")
            self._tasks += ["chief-0", *(f"ps-{index}" for index in range(num_ps))]
        self._began_at, self.told = time.monotonic(), list[str]()
        self._guilty: set[tuple[str, str]] = set()
        self._acts: dict[Callable[[], None], int] = {
            self.kill_a_task: 8,
            self.kill_two_tasks: 4,
            self.freeze_a_task: 5,
            self.freeze_a_task_for_a_moment: 2,
            self.freeze_the_launcher: 1,
            self.kill_the_launcher: 2,
            self.stop_the_launcher: 1,
            self.kill_the_fork_server: 1,
            self.freeze_the_fork_server: 1,
            self.kill_the_warm_process: 1,
        }
        self._tell(" ".join(self._arguments))
        self.start()

    def _tell(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self._began_at:6.1f} s: {text}")
        print(self.told[-1], flush=True)

    def start(self, steps: int = 100_000_000) -> None:
        watchdog_secs = WATCHDOG_SECS * slowness()
        self._frozen = f"showed no sign of life for {0.6 * watchdog_secs:.0f} s"
        limits = f"watchdog_secs={watchdog_secs}", f"grace_secs={GRACE_SECS * slowness()}"
        self.process = self._command.start(*self._arguments, *limits, f"train.steps={steps}")

    def act(self) -> None:
        """Does one thing or another to whoever runs in this moment."""
        [act] = self._random.choices(list(self._acts), list(self._acts.values()))
        self._tell(act.__name__.replace("_", " "))
        act()

    def _signal(self, task: str, *signums: int) -> None:
        try:
            process = task_process(self.run_dir, task)
            for signum in signums:
                process.send_signal(signum)
        except (LookupError, psutil.NoSuchProcess):
            self._tell(f"  {task} does not run")
        else:
            self._tell(f"  {task}")

    def kill_a_task(self) -> None:
        self._kill(self._random.choice(self._tasks))

    def _kill(self, task: str) -> None:
        self._guilty.add((task, KILLED))
        self._signal(task, signal.SIGKILL)

    def kill_two_tasks(self) -> None:
        for task in self._random.sample(self._tasks, 2):
            self._kill(task)

    def freeze_a_task(self) -> None:
        task = self._random.choice(self._tasks)
        self._guilty.add((task, self._frozen))
        self._signal(task, signal.SIGSTOP)

    def freeze_a_task_for_a_moment(self) -> None:
        """Nobody may notice."""
        task = self._random.choice(self._tasks)
        self._signal(task, signal.SIGSTOP)
        time.sleep(self._random.uniform(0.0, 1.0))
        self._signal(task, signal.SIGCONT)

    def freeze_the_launcher(self) -> None:
        """Nobody may notice."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.0, 8.0))
        self.process.send_signal(signal.SIGCONT)

    def kill_the_launcher(self) -> None:
        self.process.kill()
        self.end(-signal.SIGKILL)
        if self._random.random() < 0.5:  # otherwise it is started again while they die
            deadline = time.monotonic() + GONE_SECS * slowness()
            while left := [process for process in our_processes() if process.pid not in self._others]:
                assert time.monotonic() < deadline, f"left by a killed launcher: {left}"
                time.sleep(0.05)  # between two looks
        self.start()

    def stop_the_launcher(self) -> None:
        self.process.terminate()
        self.end(143)
        self.start()

    def kill_the_fork_server(self) -> None:
        """All tasks die with it; the launcher says so, and is started again as a scheduler would do."""
        for server in self._fork_server():
            server.kill()
            self.end(138)
            self.start()

    def freeze_the_fork_server(self) -> None:
        """It cannot tell of a task's end, nor end the tasks when the launcher is gone."""
        for server in self._fork_server():
            server.suspend()
            if not (tasks := server.children()) or self._random.random() < 0.5:
                self.kill_the_launcher()
            else:
                self._random.choice(tasks).kill()
                assert "the fork server is frozen" in self.end(138)
                self.start()

    def kill_the_warm_process(self) -> None:
        """A run that has begun does not need it."""
        if self._fork_server():
            (warm,) = filter(is_warm, psutil.Process(self.process.pid).children())
            warm.kill()

    def _fork_server(self) -> list[psutil.Process]:
        """One, or none if the launcher has only begun, or the warm process was killed."""
        return fork_servers_of(self.process.pid)

    def end(self, code: int) -> str:
        """Waits for the launcher's end; returns its stderr, which blames nobody who is innocent."""
        finished = self._command.finish(self.process, timeout_secs=HEAL_SECS)
        assert finished.code == code, finished
        for line in finished.stderr.splitlines():
            if "warning" in line:
                blamed = CULPRIT.search(line)
                assert blamed, f"{line}\n{finished}"
                assert blamed.groups() in self._guilty, f"innocent: {line}\n{finished}"
                self._tell(f"  told: {line}")
        self._guilty.clear()
        return finished.stderr

    def newest_step(self) -> int:
        return max((step_of(path) for path in (self.run_dir / "checkpoints").glob("step-*")), default=-1)

    def heal(self) -> None:
        """Waits until the run goes on, as its checkpoints tell."""
        before = self.newest_step()
        wait_until(lambda: self.newest_step() > before, self.process, HEAL_SECS)
        self._tell(f"healed at step {self.newest_step()}")

    def go_on_for(self, secs: float) -> None:
        deadline = time.monotonic() + secs
        while time.monotonic() < deadline:
            time.sleep(self._random.uniform(0.0, 8.0))  # the random moment
            assert self.process.poll() is None, f"ended by itself: {self._command.finish(self.process)}"
            self.act()


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def assert_nothing_is_left(run_dir: Path) -> None:
    assert {path.name for path in run_dir.iterdir()} == BELONGS
    assert not list((run_dir / "logs").glob("*.part"))
    checkpoints = sorted((run_dir / "checkpoints").iterdir())
    assert 1 <= len(checkpoints) <= 3
    for path in checkpoints:
        assert snapshot.read(path).step == step_of(path)
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.fixture
def chaos(
    command: Command, mode: str, algorithm: str, plugin: str, no_leftovers: Callable[[], None]
) -> Iterator[Chaos]:
    print(f"SEED={SEED} TF2DIST_CHAOS_SECS={CHAOS_SECS:.0f}")
    made = Chaos(command, mode, algorithm, plugin, SEED)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(CHAOS_SECS + 5 * HEAL_SECS * MAX_SLOWNESS)
@pytest.mark.parametrize(("mode", "algorithm", "plugin"), RUNS)
def test_chaos(chaos: Chaos, mode: str, algorithm: str, plugin: str) -> None:
    try:
        survive(chaos, mode, algorithm)
    except BaseException as error:  # those of pytest are no Exception
        again = f'make chaos SEED={SEED} ARGS="-k {mode}-{algorithm}-{plugin}"'
        error.add_note("\n".join([f"{again} failed; what was done in {chaos.run_dir}:", *chaos.told]))
        raise


def survive(chaos: Chaos, mode: str, algorithm: str) -> None:
    chaos.heal()
    chaos.go_on_for(CHAOS_SECS)
    chaos.heal()
    chaos.process.terminate()
    told = chaos.end(143)
    saved = re.search(r"saved at step (\d+)", told)
    assert saved, told
    target = max(int(saved[1]) + 500, LEARNED_AT[mode])
    chaos.start(target)
    told = chaos.end(0)
    assert f"going on at step {saved[1]}" in told
    summary = json.loads((chaos.run_dir / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == summary["target_step"] == target
    assert summary.get("algorithm", "plain") == algorithm  # with sync_replicas there is but one
    assert summary["restarts"] == 0
    assert summary["test_accuracy"] >= 0.9
    assert summary["test_examples"] == 360
    assert_nothing_is_left(chaos.run_dir)
