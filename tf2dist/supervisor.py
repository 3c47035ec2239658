"""The launcher's policy: which tasks to start on this host, and what their ends mean."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tf2dist import cluster as clusters
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.console import Console
from tf2dist.errors import FailureRecord, Interrupted, TaskFailure, TaskLostError
from tf2dist.launcher import START_TIMEOUT_SECS, Event, Launcher

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # 1 and below print the cluster's configuration on every task
    "GRPC_FAIL_FAST": "use_caller",  # a call to a task that is gone fails instead of waiting for it
    "KERAS_BACKEND": "tensorflow",
    "http_proxy": "",  # gRPC would ask a proxy for the way to the next process
    "https_proxy": "",
}
POLL_SECS = 0.2
ECHO_SECS = 1.0  # the record of the task that failed first may arrive after the complaints of others
LEAVE_SECS = 15.0  # for the other tasks, once the leader is done


class Signals:
    """Turns SIGTERM and Ctrl-C into a question that a loop asks; a second one shortens the farewell."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._received: list[int] = []

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            self._launcher.grace_secs = 0.0
        self._received.append(number)

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come."""
        if self._received:
            raise Interrupted(self._received[0])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def supervise(
    config: RunConfig, run_dir: Path, this: tuple[Cluster, Task] | None, console: Console, started_at: float
) -> dict[str, Any]:
    """Runs a whole local cluster, or this host's one task, to its end.

    Args:
        this: the cluster and this process's task in it; None for a local cluster.

    Returns:
        The summary; empty if the task that writes it runs elsewhere.

    Raises:
        TaskFailure: a task failed; it tells the first failure whole and the others in a line each.
        TaskLostError: the tasks could not be started.
        Interrupted: by a signal; everything has been stopped in order.
    """
    launcher = Launcher(run_dir / "logs", isolate=this is None, env=ENVIRONMENT, grace_secs=config.grace_secs)
    with Signals(launcher) as signals, launcher, console:
        console.status("starting TensorFlow")
        watch = Watch(launcher, console, signals)
        watch.wait_ready()
        if this:
            cluster, tasks = this[0], [this[1]]
        else:
            cluster = clusters.local(config.mode, config.cluster, launcher.ports)
            tasks = cluster.tasks
            if not launcher.isolated:
                console.warn("this system allows no private network: other hosts can reach the ports of this cluster")
        for task in tasks:
            payload = {
                "config": config.to_yaml(),
                "mode": cluster.mode,
                "jobs": cluster.jobs,
                "task": (task.job, task.index),
                "run_dir": str(run_dir),
                "started_at": started_at,
            }
            launcher.start(str(task), "tf2dist.task:main", payload)
        where = f" at {cluster.address(this[1])}" if this else ""
        console.status(f"starting {', '.join(map(str, tasks))}{where}")
        return watch.run(str(cluster.leader))


class Watch:
    """Follows the tasks of a launcher until they have all ended well, or one has not."""

    def __init__(self, launcher: Launcher, console: Console, signals: Signals) -> None:
        self._launcher, self._console, self._signals = launcher, console, signals
        self._failures: list[FailureRecord] = []
        self._summary: dict[str, Any] = {}
        self._leader = ""
        self._leave_by = float("inf")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while not self._launcher.ready:
            self._step()
            if time.monotonic() > deadline:
                raise TaskLostError(f"TensorFlow was not imported within {START_TIMEOUT_SECS:.0f} s")

    def run(self, leader: str) -> dict[str, Any]:
        self._leader = leader
        while self._launcher.tasks and not self._failures:
            self._step()
            if leader not in self._launcher.tasks:
                self._leave_by = min(self._leave_by, time.monotonic() + LEAVE_SECS)
            if self._summary and time.monotonic() > self._leave_by:
                return self._summary  # the result is whole; leaving the launcher stops who does not leave
        if self._failures:
            self._collect_echo()
            self._signals.check()  # sent to all of us at once, it is the cause
            raise TaskFailure(self._in_order())
        return self._summary

    def _step(self) -> None:
        self._signals.check()
        for event in self._launcher.events(POLL_SECS):
            self._on_event(event)
            self._signals.check()

    def _on_event(self, event: Event) -> None:
        match event["event"]:
            case "progress":
                self._console.progress(event)
            case "message":
                self._console.status(event["text"])
            case "result":
                self._summary = event["summary"]
            case "exited" if event["code"] != 0 and self._summary:
                self._console.warn(f"{event['task']} ended with code {event['code']} after the result was written")
            case "exited" if event["code"] != 0 or (event["task"] == self._leader and not self._summary):
                self._failures.append(self._failure(event))

    def _failure(self, event: Event) -> FailureRecord:
        """The record that the task left, or what can be said of one that could not leave any."""
        task, code = event["task"], event["code"]
        record = FailureRecord.read(self._launcher.log_dir, task)
        if record:
            return record
        path = self._launcher.log_dir / f"{task}.log"
        tail = "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.exists() else ""
        if code >= 0:
            return FailureRecord(task, event["time"], code or 1, f"ended with exit code {code}", tail)
        name = signal.strsignal(-code) if -code not in set(signal.Signals) else signal.Signals(-code).name
        what = f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
        return FailureRecord(task, event["time"], TaskLostError.exit_code, what, tail)

    def _collect_echo(self) -> None:
        deadline = time.monotonic() + ECHO_SECS
        while self._launcher.tasks and time.monotonic() < deadline:
            self._step()

    def _in_order(self) -> list[FailureRecord]:
        return sorted(self._failures, key=lambda failure: failure.time)
