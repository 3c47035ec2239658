"""Takes part in a meeting as a process of its own: `python -m tests.process.meet JSON`, one JSON line an event.

Reads lines from stdin: `stop SIGNUM`, `ended CODE MESSAGE`; the end of the input ends it without a word.
"""

import json
import os
import queue
import sys
import threading
from typing import Any

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.control.meeting import Meeting
from tf2dist.control.token import job_key
from tf2dist.errors import TfDistError


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    cluster = Cluster(request["mode"], {job: tuple(hosts) for job, hosts in request["jobs"].items()})
    task = Task(*request["task"])
    identity = {"cluster": request["jobs"], **request.get("identity", {})}
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read, args=(commands,), daemon=True).start()
    try:
        key = job_key(os.environ, cluster, lambda text: say(event="told", text=text))
        meeting = Meeting(
            cluster,
            task,
            identity,
            key,
            lambda text: say(event="told", text=text),
            lost_after_secs=request.get("lost_after_secs", 30.0),
        )
        with meeting:
            say(event="listening")
            meeting.join(request.get("timeout_secs", 30.0), lambda: None)
            say(event="go")
            follow(meeting, commands)
    except TfDistError as error:
        say(event="error", code=error.exit_code, text=str(error))
        sys.exit(error.exit_code)


def read(commands: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        commands.put(line)
    commands.put("")


def follow(meeting: Meeting, commands: "queue.SimpleQueue[str]") -> None:
    while True:
        for event in meeting.events():
            say(**event)
        try:
            line = commands.get(timeout=0.05)
        except queue.Empty:
            continue
        word, _, rest = line.strip().partition(" ")
        match word:
            case "stop":
                meeting.stop(int(rest))
            case "ended":
                code, _, message = rest.partition(" ")
                meeting.ended(int(code), message)
            case _:
                return


if __name__ == "__main__":
    main()
