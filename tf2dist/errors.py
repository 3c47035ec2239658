"""What can go wrong, the exit code of each, and the record that a failed task leaves behind.

    TfDistError                 exit code
    |- RequestError                  2     the request is wrong: asking again will not help
    |  |- ConfigError                      an option, a key or a value
    |  |- ClusterError                     TF_CONFIG, a host list, a role
    |  `- DataError                        data that is not there or cannot be used
    |- TrainingError                 1     the training code failed
    |- NotFiniteError                3     the loss is not a finite number
    |- TaskLostError               138     a peer or the cluster was lost: worth a retry
    `- Interrupted            143 or 130   SIGTERM or Ctrl-C

Schedulers read 1 to 127 as permanent and 128 and up as worth a retry.
"""

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path


class TfDistError(Exception):
    """The base: `str(error)` is what the user reads, without a traceback if `plain`."""

    exit_code = 1
    plain = True


class RequestError(TfDistError):
    exit_code = 2


class ConfigError(RequestError):
    pass


class ClusterError(RequestError):
    pass


class DataError(RequestError):
    pass


class TrainingError(TfDistError):
    exit_code = 1


class NotFiniteError(TfDistError):
    exit_code = 3


class TaskLostError(TfDistError):
    exit_code = 138


class Interrupted(TfDistError):
    """Stopped by a signal; the exit code is the shell's, 128 plus the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__({2: "stopped by Ctrl-C", 15: "stopped by SIGTERM"}.get(signum, f"stopped by signal {signum}"))
        self.exit_code = 128 + signum


@dataclass(frozen=True)
class FailureRecord:
    """How one task failed. The earliest record of a run is its cause; the others are its echo."""

    task: str
    time: float
    exit_code: int
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, task: str, error: BaseException) -> "FailureRecord":
        known = isinstance(error, TfDistError)
        trace = "" if known else "".join(traceback.format_exception(error)).rstrip()
        message = str(error) if known else f"{type(error).__name__}: {first_line(str(error))}"
        return cls(task, time.time(), error.exit_code if isinstance(error, TfDistError) else 1, message, trace)

    def write(self, log_dir: Path) -> None:
        (log_dir / f"{self.task}.error.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, log_dir: Path) -> "list[FailureRecord]":
        """All records of a run, the earliest first."""
        records = [cls(**json.loads(path.read_text())) for path in log_dir.glob("*.error.json")]
        return sorted(records, key=lambda record: record.time)


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
