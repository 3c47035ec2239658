"""Jobs whose commands run on separate hosts."""

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hosts import Hosts

PORT = 2222
WAIT_SECS = 60.0


class Started:
    """One command on one host; its output goes to files, so that it never waits for a reader."""

    def __init__(self, job: "Job", name: str, place: int, number: int, *options: str, **cluster: Any) -> None:
        self.name = name
        self.run_dir = job.folder / f"host{place}"
        self._stderr_path = job.folder / f"{number}-{name}.stderr"
        self._log_from = len(self.log)
        task, _, index = name.partition("-")
        tf_config = {"cluster": cluster or job.addresses, "task": {"type": task, "index": int(index)}}
        arguments = [f"mode={job.mode}", "data=digits", "model=softmax", "train.log_every_steps=50", *options]
        with open(self._stderr_path, "w", encoding="utf-8") as stderr:
            self.process: subprocess.Popen[str] = job.hosts[place].popen(
                [sys.executable, "-m", "tf2dist", f"run_dir={self.run_dir}", *arguments],
                cwd=job.folder,
                env={**os.environ, "TF_CONFIG": json.dumps(tf_config)},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text(errors="replace")

    @property
    def log(self) -> str:
        path = self.run_dir / "logs" / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        """The local steps in the lines that the task has logged since this start."""
        return [int(text) for text in re.findall(r"local_step=(\d+)", self.log[self._log_from :])]

    def __str__(self) -> str:
        code = self.process.poll()
        return f"=== {self.name}: exit code {code}\n{self.stderr}\n--- log\n{self.log[self._log_from :][-3000:]}"


class Job:
    """The commands of one cluster, one on each host, in the order of `names`."""

    def __init__(self, made: Hosts, folder: Path, mode: str, names: tuple[str, ...]) -> None:
        self.hosts, self.folder, self.mode, self.names = made, folder, mode, names
        self.addresses: dict[str, list[str]] = {}
        for place, name in enumerate(names):
            self.addresses.setdefault(name.partition("-")[0], []).append(f"{made[place].address}:{PORT}")
        self.tasks: dict[str, Started] = {}
        self._all: list[Started] = []

    def start(self, *options: str, order: tuple[str, ...] = ()) -> None:
        for name in order or self.names:
            self.tasks[name] = self.start_one(name, self.names.index(name), *options)

    def start_one(self, name: str, place: int, *options: str, **cluster: Any) -> Started:
        started = Started(self, name, place, len(self._all), *options, **cluster)
        self._all.append(started)
        return started

    def wait(self, condition: Callable[[], Any], what: str, timeout_secs: float = WAIT_SECS) -> None:
        deadline = time.monotonic() + timeout_secs
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_secs:.0f} s: {what}\n{self}"
            time.sleep(0.05)  # the interval between two checks

    def wait_for_steps(self, *names: str, more: int = 200) -> None:
        """Waits until each of these workers has logged `more` further local steps."""
        for name in names:
            task = self.tasks[name]
            before = task.steps[-1] if task.steps else 0
            self.wait(functools.partial(_has_made, task, before + more), f"{name} makes {more} steps")

    def code(self, task: Started | str, timeout_secs: float = WAIT_SECS) -> int:
        """Waits until a command has ended; returns its exit code."""
        task = self.tasks[task] if isinstance(task, str) else task
        self.wait(lambda: task.process.poll() is not None, f"{task.name} ends", timeout_secs)
        return int(task.process.returncode)

    def assert_codes(self, code: int, *names: str, says: str = "", timeout_secs: float = WAIT_SECS) -> None:
        """Asserts that these commands, or all, end with the code within the time, and that their last lines fit."""
        deadline = time.monotonic() + timeout_secs
        names = names or self.names
        codes = {name: self.code(name, max(0.0, deadline - time.monotonic())) for name in names}
        assert codes == dict.fromkeys(names, code), str(self)
        for name in names:
            text = self.tasks[name].stderr
            assert says in text[text.rfind("tf2dist: error: ") :], f"{name} does not say {says}\n{self}"

    @property
    def leader(self) -> Started:
        return self.tasks[self.names[0]]

    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        steps = re.findall(r"saved at step (\d+)", self.leader.stderr)
        assert steps, str(self)
        return int(steps[-1])

    def summary(self, steps: int) -> dict[str, Any]:
        """The summary of a run that has ended; asserts that its counts are exact."""
        found: dict[str, Any] = json.loads((self.leader.run_dir / "summary.json").read_text())
        assert found["global_step"] == found["updates_applied"] == found["target_step"] == steps, str(self)
        assert found["test_examples"] == 360
        return found

    def close(self) -> None:
        for started in self._all:
            started.process.kill()
            started.process.wait(WAIT_SECS)

    def __str__(self) -> str:
        return "\n".join(map(str, self._all))


def _has_made(task: Started, steps: int) -> bool:
    return bool(task.steps) and task.steps[-1] >= steps
