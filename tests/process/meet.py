"""Takes part in a meeting as a separate process: `python -m tests.process.meet JSON`; prints a `Said` on each line.

Reads lines from stdin: `stop SIGNUM`. Any other line, or the end of the input, ends it.
"""

import json
import os
import queue
import sys
import threading
from dataclasses import dataclass
from typing import Any

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import TfDistError
from tf2dist.hosts.identity import job_key
from tf2dist.hosts.meeting import Meeting
from tf2dist.hosts.protocol import Back, Ended, Identity, Lost, Stop
from tf2dist.messages import pack


@dataclass(frozen=True)
class Listening:
    """The meeting has begun."""


@dataclass(frozen=True)
class Agreed:
    """All tasks have joined."""


@dataclass(frozen=True)
class Told:
    """A line for the user."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The process ends with this code."""

    code: int
    text: str


Said = Listening | Agreed | Told | Failed | Lost | Back | Stop | Ended


def say(said: Said) -> None:
    print(pack(said).decode(), flush=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    cluster = Cluster(request["mode"], {job: tuple(hosts) for job, hosts in request["jobs"].items()})
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read, args=(commands,), daemon=True).start()
    try:
        with meeting_of(cluster, request) as meeting:
            say(Listening())
            meeting.join(request.get("timeout_secs", 30.0), lambda: None)
            say(Agreed())
            follow(meeting, commands)
    except TfDistError as error:
        say(Failed(error.exit_code, str(error)))
        sys.exit(error.exit_code)


def meeting_of(cluster: Cluster, request: dict[str, Any]) -> Meeting:
    return Meeting(
        cluster,
        Task(*request["task"]),
        Identity(cluster.jobs, {}, {}, (), {}),
        job_key(os.environ, cluster, lambda text: say(Told(text))),
        lambda text: say(Told(text)),
        lost_after_secs=request.get("lost_after_secs", 30.0),
    )


def read(commands: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        commands.put(line)
    commands.put("")


def follow(meeting: Meeting, commands: "queue.SimpleQueue[str]") -> None:
    while True:
        for event in meeting.events():
            say(event)
        try:
            line = commands.get(timeout=0.05)
        except queue.Empty:
            continue
        word, _, rest = line.strip().partition(" ")
        if word != "stop":
            return
        meeting.stop(int(rest))


if __name__ == "__main__":
    main()
