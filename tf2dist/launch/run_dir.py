"""The run directory: private, checked before anything is written into it, and locked by one run."""

import contextlib
import fcntl
import itertools
import json
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tf2dist import files
from tf2dist.cluster.reachability import Wait
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError, TaskLostError, TrainingError
from tf2dist.files import is_path, open_to_read
from tf2dist.linux import kernel_id

FILES = (".lock", "config.yaml", "summary.json", "metrics.jsonl", "model.json", "model.keras", "training.png")
POLL_SECS = 0.5
RANGES = "ranges"  # of a prediction
FOLDERS = ("logs", "checkpoints", "tensorboard", "timeline", RANGES, "predictions")


def make_run_dir(config: RunConfig, kind: str | None = None) -> Path:
    """Creates the folder of this run, accessible by its owner alone, with `logs` in it.

    Args:
        kind: in the name of a new folder in `outputs`; None for the mode.
    """
    name = config.run_dir or "outputs"
    with files.raising(f"run_dir ({name}): cannot be written", "name another directory", also=(ValueError,)):
        run_dir = Path(name).expanduser().absolute()
        if not is_path(str(run_dir)):
            raise ConfigError(f"run_dir ({run_dir}): is not valid UTF-8; name another directory")
        if not config.run_dir:
            run_dir = _new_default_dir(run_dir, f"{kind or config.mode}-{config.model['name']}")
        # Every run makes `logs`, so a config.yaml without it belongs to some other program.
        if (run_dir / "config.yaml").exists() and not (run_dir / "logs").exists():
            raise ConfigError(f"run_dir ({name}): has a config.yaml of something else; name another directory")
        files.make_private(run_dir)
        _check_access(run_dir, name)
        (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        # If nothing can be written here, the user should learn it now and not at the first checkpoint.
        tempfile.TemporaryFile(dir=run_dir / "logs").close()
    return run_dir


def new_names(outputs: Path, name: str) -> Iterator[Path]:
    """Names for a new folder in another one: DATE_TIME-NAME, and then the same with numbers at the end."""
    dated = f"{datetime.now():%Y%m%d_%H%M%S}-{name}"
    yield outputs / dated
    for number in itertools.count(2):
        yield outputs / f"{dated}-{number}"


def _new_default_dir(outputs: Path, name: str) -> Path:
    outputs.mkdir(mode=0o700, exist_ok=True)
    for run_dir in new_names(outputs, name):
        # Two runs may start in the same second. mkdir is atomic, so exactly one of them makes the folder.
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(mode=0o700)
            break
    return run_dir


def _check_access(run_dir: Path, name: str) -> None:
    """Checks that this user may write to what another run has left, which may have been of root in a container."""
    for path in (*(run_dir / entry for entry in (*FOLDERS, *FILES)), *(run_dir / "logs").glob("*.log")):
        if problem := _why_unusable(path, is_folder=path.name in FOLDERS):
            raise ConfigError(f"run_dir ({name}): {path.name} in it {problem}; remove it, or name another directory")


def _why_unusable(path: Path, is_folder: bool) -> str:
    """What is wrong with an entry of a run directory, which need not be there; "" if nothing is."""
    if not path.exists():
        # A run could not make the folder in the place of the link, and would notice it at its first checkpoint.
        return f"is a link to {path.readlink()}, which is not there" if is_folder and path.is_symlink() else ""
    if path.is_dir() != is_folder:
        return "is not a directory" if is_folder else "is a directory"
    access = os.R_OK | os.W_OK | (os.X_OK if is_folder else 0)
    # By default `access` asks for the real user, and files are opened as the effective one.
    return "" if os.access(path, access, effective_ids=True) else "cannot be read and written by this user"


def how_to_go_on(run_dir: Path, in_python: bool) -> str:
    """The words for what the user adds to the command, or to the call of `fit`, to go on with the run."""
    if in_python:
        return f"add run_dir={json.dumps(str(run_dir), ensure_ascii=False)}"
    return f"add {in_shell('run_dir', run_dir)}"


def in_shell(option: str, folder: Path) -> str:
    """The option with its folder, as a user can paste it into a shell."""
    return f"{option}={shlex.quote(str(folder))}"


def can_go_on(run_dir: Path) -> bool:
    """Whether there is a checkpoint, or a range of a prediction."""
    return any((run_dir / "checkpoints").glob("step-*")) or any((run_dir / RANGES).glob("*.npz"))


def log_path(log_dir: Path, name: str) -> Path:
    return log_dir / f"{name}.log"


def open_log(log_dir: Path, name: str) -> int:
    """Opens the log of a process, and returns its descriptor."""
    with files.raising(
        f"run_dir ({log_dir.parent}): logs/{name}.log cannot be written", "make room, or name another directory"
    ):
        return files.open_log(log_path(log_dir, name))


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as the file says; `kernel`: see `kernel_id`."""

    kernel: str
    host: str
    pid: int


@dataclass(frozen=True)
class Lock:
    """The lock of a run directory that this process holds."""

    run_dir: Path
    file: IO[str]

    @property
    def is_gone(self) -> bool:
        """Whether the directory was removed or moved, or somebody has removed the file in it."""
        return not (self.run_dir / ".lock").exists()

    def check(self) -> None:
        """Checks that no other run has locked the path meanwhile.

        The lock belongs to a file and not to its path. If somebody removes the directory, another run can make a new
        one in its place and lock that, and then each of the two would remove or replace the other's results.
        """
        with contextlib.suppress(FileNotFoundError):  # removed, but no other run has come
            if not os.path.samestat((self.run_dir / ".lock").lstat(), os.fstat(self.file.fileno())):
                raise TrainingError(
                    f"run_dir ({self.run_dir}): was removed during the run, and another run uses that path now; "
                    "start this run again in another directory"
                )


@contextlib.contextmanager
def locked(
    run_dir: Path, option: str = "run_dir", wait: Wait | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[Lock]:
    """Locks the run directory until the block or this process ends.

    Args:
        option: the one that has named the directory, for the message.
        wait: for a lock that another host holds; None for no wait.
        check: called twice a second meanwhile; an exception that it raises ends the wait.

    Raises:
        ConfigError: a process of this host has locked it.
        TaskLostError: one of another host has locked it.
    """
    holder = Holder(kernel_id(), socket.gethostname(), os.getpid())
    with contextlib.ExitStack() as stack:
        while True:
            with files.raising(f"{option} ({run_dir}): .lock in it cannot be opened", "name another directory"):
                lock = stack.enter_context(open(run_dir / ".lock", "a", encoding="utf-8"))
            # The kernel releases this lock however the process ends; a file that merely exists would outlive a kill.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _refuse_or_wait(run_dir, option, holder, wait)
            except OSError:
                break  # a file system without locks
            lock.close()  # opened again, since a user may remove the file meanwhile
            check()
            time.sleep(POLL_SECS)
        with contextlib.suppress(OSError):  # a full disk; the lock holds without it
            os.truncate(lock.fileno(), 0)
            os.write(lock.fileno(), json.dumps(asdict(holder)).encode())
            os.fsync(lock.fileno())  # or another host would read it half a minute later
        yield Lock(run_dir, lock)


def _refuse_or_wait(run_dir: Path, option: str, own: Holder, wait: Wait | None) -> None:
    """Raises an error if the lock of another process is not to be waited for, or not any more."""
    try:
        with open_to_read(run_dir / ".lock") as file:
            other = Holder(**json.load(file))
    except (OSError, ValueError, TypeError):  # it has just begun
        other = own
    if other.kernel == own.kernel:
        raise ConfigError(f"{option} ({run_dir}): another run is using it; wait for its end, or name another directory")
    # On a network file system the lock of a host that died stays: until a lease of a minute or two ends, or for ever.
    if wait is None or wait.is_over:
        raise TaskLostError(
            f"{option} ({run_dir}): process {other.pid} of host {other.host} holds its lock; wait for its end, or, if "
            "that host is down or has no such process, remove .lock in the directory"
        )
    wait.notify(f"the lock of {run_dir}, which process {other.pid} of host {other.host} holds")


def finished_summary(run_dir: Path) -> dict[str, Any] | None:
    """The result of a run that is done and has saved its weights; None for any other."""
    try:
        with open_to_read(run_dir / "summary.json") as file:
            summary: dict[str, Any] = json.load(file)
        # Without the weights of its last step a job is resumed, so that it can save them.
        return summary if summary["global_step"] == summary.get("saved_step", summary["global_step"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def rows_of(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that is damaged, or still being written, is left out.

    Args:
        last_bytes: of the file, which alone are read; None for all.
    """
    with open_to_read(path) as file:
        if last_bytes:
            file.seek(max(0, path.stat().st_size - last_bytes))
        for line in file:
            with contextlib.suppress(ValueError):  # a full disk has cut it off, or the last bytes begin within it
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row
