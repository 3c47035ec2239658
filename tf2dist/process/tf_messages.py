"""What TensorFlow's error messages tell that the classes of its errors do not, by the words of the tested version.

A test provokes each of them. Where another version has other words, the user reads TensorFlow's own.
"""

import re

from tf2dist.cluster.spec import Task

TOO_LATE = re.compile(r"cannot be modified after (being )?initializ")
XLA_FAILURE = "tf2xla conversion failed"
XLA_PLACE = re.compile(r"The op is created at|File |dummy_file_name|\[\[")
XLA_PREFIX = re.compile(r"^\s*(\(\d+\) [A-Z_]+:)?\s*(Detected unsupported operations .*? on XLA_\w+: )?")
XLA_SUFFIX = re.compile(r"\{\{node \S+\}\}$")
NO_SERVER = "Could not start gRPC server"
SIGNS_OF_LOSS = re.compile(r"/job:|peer|[Ss]ocket|[Hh]eartbeat|Stream ID")
LATE, AFTER_LATE = "timed out task names", "\n\n"
SILENT, AFTER_SILENT = "stopped sending heartbeats", "The tasks have crashed"
DATA_ERROR = re.compile(r"^\s*(?:\(\d+\) [A-Z_]+:\s*)?(?:\w+Error: )?DataError: (data \(.*)$", re.MULTILINE)
TASK = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")


def devices_are_in_use(text: str) -> bool:
    """Whether something in `tf.config` was to be changed after TensorFlow had made its devices."""
    return TOO_LATE.search(text) is not None


def is_of_xla(text: str) -> bool:
    """Whether XLA could not compile a function."""
    return XLA_FAILURE in text


def xla_reason(text: str) -> str:
    """Why XLA could not: the line above the one that tells of the failure and those that tell of the place."""
    above = text.partition(XLA_FAILURE)[0].splitlines()[:-1]
    line = next((line for line in reversed(above) if line.strip() and not XLA_PLACE.match(line.strip())), "")
    return XLA_PREFIX.sub("", XLA_SUFFIX.sub("", line)).strip() or "see the log"


def port_is_taken(text: str) -> bool:
    """Whether `tf.distribute.Server` could not listen at its port."""
    return NO_SERVER in text


def data_error(text: str) -> str:
    """What a `DataError` says that was raised by a function of ours inside of a graph; empty if none was."""
    found = DATA_ERROR.search(text)
    return found[1] if found else ""


def line_of_loss(text: str) -> str:
    """The first line that tells of another task or of a connection; empty if none does."""
    return next((line.strip() for line in text.splitlines() if SIGNS_OF_LOSS.search(line)), "")


def silent_tasks(text: str) -> list[Task]:
    """Those whose heartbeats the coordination service has missed."""
    return _tasks(text.partition(SILENT)[2].partition(AFTER_SILENT)[0])


def late_tasks(text: str) -> list[Task]:
    """Those that did not come to the coordination service in time; only the leader is told of them."""
    return _tasks(text.partition(LATE)[2].partition(AFTER_LATE)[0])


def _tasks(text: str) -> list[Task]:
    return [Task(job, int(index)) for job, index in dict.fromkeys(TASK.findall(text))]
