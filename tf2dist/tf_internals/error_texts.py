"""Texts of the errors of TensorFlow and Keras, which say more than their types, as the tested versions word them.

If another version words a message differently, the user reads it as it is. `tests/replica/probes.py` provokes
what one process can provoke, and `tests/replica/test_error_texts.py` the loss of other tasks.
"""

import re

from tf2dist.cluster.spec import Task
from tf2dist.tf_constants import NODES

# From the setters of `tf.config`, which word it in two ways.
TOO_LATE = re.compile(r"cannot be modified after (being )?initializ")

# XLA wraps the reason: above the line of the failure stand the reason, then where the operation was made; around the
# reason stand numbers of errors, the name of the device, and that of the node.
XLA_FAILURE = "tf2xla conversion failed"
XLA_PLACE = re.compile(r"The op is created at|File |dummy_file_name|\[\[")
XLA_PREFIX = re.compile(r"^\s*(\(\d+\) [A-Z_]+:)?\s*(Detected unsupported operations .*? on XLA_\w+: )?")
XLA_SUFFIX = re.compile(r"\{\{node \S+\}\}$")

NO_SERVER = "Could not start gRPC server"

# A remote task in the message, or a failed connection; "Stream ID" is what gRPC says when a connection has none left.
SIGNS_OF_LOSS = re.compile(r"/job:|peer|[Ss]ocket|[Hh]eartbeat|Stream ID")
# The coordination service lists tasks between these words: those that never registered, and those that it lost.
LATE, AFTER_LATE = "timed out task names", "\n\n"
SILENT, AFTER_SILENT = "stopped sending heartbeats", "The tasks have crashed"
# An exception of Python in a graph arrives as text, with its class name and perhaps a number among several errors.
DATA_ERROR = re.compile(r"^\s*(?:\(\d+\) [A-Z_]+:\s*)?(?:\w+Error: )?DataError: (data \(.*)$", re.MULTILINE)
TASK = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")

# Of Keras: a class or function of the user's that a saved model needs, and code in the file that safe mode refuses.
UNKNOWN_CODE = re.compile(r"Could not locate (\w+) '([^']+)'")
UNSAFE_CODE = re.compile("safe_mode|unsafe_deserialization")


def whole_text(error: BaseException | None) -> str:
    """The messages of an error and of all that caused it; Keras tells the reason in the innermost of several errors."""
    return f"{error}\n{whole_text(error.__cause__ or error.__context__)}" if error else ""


def devices_are_in_use(text: str) -> bool:
    """Whether code tried to change `tf.config` after TensorFlow had initialized its devices."""
    return TOO_LATE.search(text) is not None


def is_xla_failure(text: str) -> bool:
    """Whether XLA could not compile a function."""
    return XLA_FAILURE in text


def xla_reason(text: str) -> str:
    """Why XLA could not compile the function, without the places in the code that stand around the reason."""
    # The nearest line above the failure that is not about a place.
    above = text.partition(XLA_FAILURE)[0].splitlines()[:-1]
    line = next((line for line in reversed(above) if line.strip() and not XLA_PLACE.match(line.strip())), "")
    return XLA_PREFIX.sub("", XLA_SUFFIX.sub("", line)).strip() or "see the log"


def port_is_taken(text: str) -> bool:
    """Whether `tf.distribute.Server` could not listen at its port."""
    return NO_SERVER in text


def data_error(text: str) -> str:
    """The message of a `DataError` that one of our functions raised inside of a graph; empty if there is none."""
    match = DATA_ERROR.search(NODES.sub("", text))
    return match[1] if match else ""


def unknown_code(text: str) -> tuple[str, str] | None:
    """The object that a saved model needs and Keras does not find: "class" or "function", and its name; or None."""
    match = UNKNOWN_CODE.search(text)
    return (match[1], match[2]) if match else None


def is_unsafe_code(text: str) -> bool:
    """Whether Keras refuses a saved model since code is in its file."""
    return UNSAFE_CODE.search(text) is not None


def line_of_loss(text: str) -> str:
    """The first line about another task or a connection; empty if there is none."""
    return next((line.strip() for line in text.splitlines() if SIGNS_OF_LOSS.search(line)), "")


def silent_tasks(text: str) -> list[Task]:
    """The tasks whose heartbeats the coordination service has missed."""
    return _tasks(text.partition(SILENT)[2].partition(AFTER_SILENT)[0])


def late_tasks(text: str) -> list[Task]:
    """The tasks that did not register with the coordination service in time; only the leader's error lists them."""
    return _tasks(text.partition(LATE)[2].partition(AFTER_LATE)[0])


def _tasks(text: str) -> list[Task]:
    return [Task(job, int(index)) for job, index in dict.fromkeys(TASK.findall(text))]
