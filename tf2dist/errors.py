"""Errors, the exit code of each, and the record that a failed task leaves behind.

    TfDistError                 exit code
    |- RequestError                  2     the request is wrong: asking again will not help
    |  |- ConfigError                      an option, a key or a value
    |  |  `- FitError                      an argument of `tf2dist.fit`; also a ValueError, as of Keras
    |  |- ClusterError                     TF_CONFIG, a host list, a role
    |  |- DataError                        data that is not there or cannot be used
    |  |- CheckpointError                  a checkpoint of another model, or none that is whole
    |  `- InstallationError                an installed package without something that is needed of it
    |- TrainingError                 1     the training code failed
    |- TaskFailure            its task's   one or more tasks of this host failed
    |- NotFiniteError                3     the loss or a variable is not finite
    |- TaskLostError               138     a peer or the cluster was lost: worth a retry
    |  `- LeaderLostError          139     the leader is gone, or did not come
    |- SomeFailed         its first one's   runs of a sweep or a comparison failed
    |- TaskLeft                    143     this task alone ended on SIGTERM, see task.on_term
    `- Interrupted     143, 130 or 129     SIGTERM, Ctrl-C or SIGHUP

Schedulers take codes from 1 to 127 as permanent failures, and retry after 128 and higher ones.
"""

import difflib
import errno
import itertools
import json
import re
import signal
import site
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tf2dist.signals import name_of
from tf2dist.tf_constants import (
    AUTOGRAPH_FILE,
    BELOW_REASON,
    COLOURS,
    EMBEDDING_FILE,
    FAILED_NODE,
    FIRST_OF_SEVERAL,
    GRAPH_ERROR,
    KERAS_FRAME,
    LAYER_FILE,
    LAYER_SCOPE,
    LOSS_SCOPE,
    NO_SUCH_ROW,
    TRACED,
)

# Names of classes such as int, ndarray and SGD, but not UniformNoise.
SPOKEN_WITH_A_VOWEL = re.compile(r"[AEIOaeio]|[Uu](?!int|ni|se)|nd|[FHLMNRSX][A-Z]")
# A line of a traceback, with the line of code below it; TensorFlow marks some of the places with stars.
LOCATION = re.compile(r'^ *File "(.+?)", line (\d+), in .*\n.*$', re.MULTILINE)


class TfDistError(Exception):
    """The base of all errors that the user reads, as `str(error)`.

    Attributes:
        exit_code: of a command that ends with this error.
    """

    exit_code = 1


class RequestError(TfDistError):
    """The request is wrong: the same one will fail again. Exit code 2."""

    exit_code = 2


class ConfigError(RequestError):
    """An option, an argument or a value is wrong or not supported. Exit code 2."""


class FitError(ConfigError, ValueError):
    """An argument of `tf2dist.fit` or `tf2dist.predict` is wrong or not supported."""


@contextmanager
def naming(subject: str) -> Iterator[None]:
    """Puts the subject, such as "model (dnn)", before the text of a ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{subject}: {error}") from error.__cause__


class ClusterError(RequestError):
    """TF_CONFIG, a list of hosts, or the role of this process is wrong. Exit code 2."""


class DataError(RequestError):
    """Data are not there, or cannot be used. Exit code 2."""


class CheckpointError(RequestError):
    """A checkpoint is damaged, of another model, or not there. Exit code 2."""


class InstallationError(RequestError):
    """An installed package lacks something that is needed of it."""


class TrainingError(TfDistError):
    """The training code failed. Exit code 1."""


class NotFiniteError(TfDistError):
    """The loss or a variable is not finite. Exit code 3."""

    exit_code = 3


class TaskLostError(TfDistError):
    """Tasks were lost, or a checkpoint cannot be read now; a retry may help. Exit code 138."""

    exit_code = 138


class LeaderLostError(TaskLostError):
    """The leader is gone, or did not come; a retry may help once it is back. Exit code 139."""

    exit_code = 139


LOST_TASK_CODES = (TaskLostError.exit_code, LeaderLostError.exit_code)


class TaskLeft(TfDistError):
    """This task alone was told to end; the others go on without it."""

    # Of SIGTERM: schedulers start again what has ended with it, and after 0 they would not.
    exit_code = 128 + signal.SIGTERM

    def __init__(self, task: str) -> None:
        super().__init__(f"{task} has left after SIGTERM; the others go on, and it may come back")


class Interrupted(TfDistError):
    """Stopped by a signal; the exit code is the shell's, 128 plus the signal's number."""

    def __init__(self, signum: int, more: str = "") -> None:
        super().__init__(f"stopped by {name_of(signum)}{more}")
        self.signum, self.more = signum, more
        self.exit_code = 128 + signum


MAX_NAMED = 8


class SomeFailed(TfDistError):
    """Some runs of a command failed, or were stopped; the exit code is that of the first of them.

    Args:
        failed: the name and the exit code of each of these.
        total: how many there were, such as "3 jobs".
        again: the option of the same command that tries them again.
    """

    def __init__(self, failed: list[tuple[str, int | None]], total: str, again: str) -> None:
        named = [f"{name} (exit code {code})" for name, code in failed[:MAX_NAMED]]
        listed = "; ".join([*named, "..."] if len(failed) > MAX_NAMED else named)
        super().__init__(f"{len(failed)} of {total} failed: {listed}; the same command with {again} tries them again")
        self.exit_code = failed[0][1] or 1


@dataclass(frozen=True)
class FailureRecord:
    """How one task failed; the task itself writes this into a file beside its log."""

    task: str
    time: float
    exit_code: int
    message: str
    details: str = ""
    by_signal: bool = False  # it was killed or lost, so it could write nothing itself
    kind: str = ""  # the class of the error

    @classmethod
    def of(cls, task: str, error: BaseException) -> "FailureRecord":
        if isinstance(error, TfDistError):
            return cls(task, time.time(), error.exit_code, str(error), kind=type(error).__name__)
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(
            task,
            time.time(),
            1,
            f"{type(error).__name__}: {reason_of(error)}{users_location(error)}",
            trace,
            kind=type(error).__name__,
        )

    @staticmethod
    def path(log_dir: Path, task: str) -> Path:
        return log_dir / f"{task}.error.json"

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, log_dir: Path, task: str) -> "FailureRecord | None":
        path = cls.path(log_dir, task)
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


class TaskFailure(TfDistError):
    """Tasks of this host failed, as by an error of your own code in them.

    The first failure is the cause, the others are its consequences. The text has the traceback of the cause.

    Attributes:
        exit_code: that of the cause.
        records: one for each task that failed, the cause first.

    Args:
        records: the same.
        more: to be added to the line about the first.
    """

    def __init__(self, records: list[FailureRecord], more: str = "") -> None:
        first, *others = records
        lines = [f"{first.task}: {first.message}" + (f", {more}" if more else "")]
        if first.details:
            lines.insert(0, first.details)
        lines += [f"  then {other.task}: {other.message}" for other in others if other.message != first.message]
        super().__init__("\n".join(lines))
        self.records = records
        self.exit_code = first.exit_code


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def brief_reason(error: BaseException) -> str:
    """The words of the system for an error of a file, without its path and number; for others the first line."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:  # the disk has room
        return f"{error.strerror}: raise ulimit -f"
    return getattr(error, "strerror", None) or first_line(str(error)) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """The text of an exception of the user's code, of Keras or of TensorFlow, on one line; its class if there is none.

    Keras breaks a sentence into several lines, and puts a line about the layer before it. An error in a traced function
    begins with "in user code:" and the places that led to it, and that of a graph with the nodes that failed.
    """
    text = COLOURS.sub("", str(error)).strip()
    if text.startswith(GRAPH_ERROR):
        reason = _first_paragraph(_below_nodes(text), type(error).__name__)
        return f"{reason}{_part_of_model(text, not users_location(error))}"
    places = list(LOCATION.finditer(text))
    if places and text.startswith(TRACED):
        text = text[places[-1].end() :].strip().removeprefix(f"{type(error).__name__}: ")
    return _first_paragraph(text, type(error).__name__)


def _first_paragraph(text: str, otherwise: str) -> str:
    """The first one that is not about the layer, on one line."""
    text = text.partition("\nTraceback (most recent call last):")[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return next((each for each in paragraphs if each and not KERAS_FRAME.search(each)), otherwise)


def _below_nodes(text: str) -> str:
    """The reason in the error of a graph; of an id that is not in the table, the id as the layer was given it."""
    reason = FIRST_OF_SEVERAL.sub("", FAILED_NODE.sub("", text.removeprefix(GRAPH_ERROR)).strip())
    reason = BELOW_REASON.split(reason)[0].rstrip(".")
    if (row := NO_SUCH_ROW.match(reason)) and EMBEDDING_FILE in text:
        index, rows = map(int, row.groups())
        return f"id {index if index >= 0 else index - rows} is not in [0, {rows})"
    return reason


def _part_of_model(text: str, or_node: bool) -> str:
    """In which layer or loss the first node that has failed is, as the end of a sentence; "" if in none.

    Args:
        or_node: whether then to name the node.
    """
    places, node = (match[0], match[1]) if (match := FAILED_NODE.search(text)) else ("", "")
    in_layer = node.removeprefix("while/").split("/")[:-1] if LAYER_FILE in places else []
    scopes = [LAYER_SCOPE.match(scope) for scope in in_layer]
    if layers := [scope[1] for scope in itertools.takewhile(bool, scopes) if scope]:
        return f", in the layer {'/'.join(layers)}"
    if loss := LOSS_SCOPE.search(node):
        return f", in the loss {loss[1]}"
    return f", at the node {node}" if node and or_node else ""


def users_location(error: BaseException) -> str:
    """Where in the user's code an exception was raised, such as " (train.py:12)"; "" if in none of it."""
    raised = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    # What TensorFlow has traced, or called from a graph, stands in the text alone.
    quoted = [(place[1], place[2]) for place in LOCATION.finditer(str(error))]
    paths = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    packages = [f"{folder}/" for folder in (*paths, *site.getsitepackages(), Path(__file__).parent)]
    # Autograph writes the traced code into files of its own, and the places in the text are those of the user's files.
    not_users = (*packages, "<frozen", "<string>", "<__array_function__")
    places = [
        (file, line)
        for file, line in (*raised, *quoted)
        if not file.startswith(not_users) and AUTOGRAPH_FILE not in file
    ]
    return " ({}:{})".format(*places[-1]) if places else ""


def kind_of(value: object) -> str:
    """The kind of a value, for a message: "None" or, for example, "a tuple", "an int"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if SPOKEN_WITH_A_VOWEL.match(name) else 'a'} {name}"


def printable(text: str) -> str:
    """Text for a terminal: control characters are spelled out, such as \\x1b.

    Messages quote text that others have written, and a terminal obeys the escape sequences in it: they can hide
    lines, or make the terminal answer as if the user had typed.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, as the end of an error's line; "" if none is similar."""
    folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[close[0]]}?" if close else ""
