"""Entry of the command: read the request, refuse it in one line or run it, end with the right exit code."""

import contextlib
import fcntl
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from tf2dist import __version__, cluster, compose, sources
from tf2dist.addresses import check_not_public, exposure
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.console import Console, result_lines
from tf2dist.control_port import check_ports
from tf2dist.errors import ConfigError, RequestError, TfDistError
from tf2dist.help import help_text
from tf2dist.job_token import job_key
from tf2dist.paths import make_private
from tf2dist.peers import check_own_address
from tf2dist.supervisor import supervise

MAX_LINE_CHARS = 300


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command line and exits: see `errors` for the codes."""
    started_at = time.time()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        run(arguments, started_at)
    except TfDistError as error:
        text = brief(str(error)) if isinstance(error, RequestError) else str(error)
        print(f"tf2dist: error: {text}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)
    sys.exit(0)


def brief(text: str) -> str:
    """At most three lines of at most `MAX_LINE_CHARS`, without control characters that a value may hold."""
    lines = text.splitlines()
    if len(lines) > 3:
        lines = [*lines[:2], f"and {len(lines) - 2} more; python -m tf2dist.doctor with the same options shows all"]
    lines = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines]
    half = MAX_LINE_CHARS // 2 - 2  # the name is at the beginning, the way out at the end
    return "\n".join(line if len(line) <= MAX_LINE_CHARS else f"{line[:half]}...{line[-half:]}" for line in lines)


def run(arguments: list[str], started_at: float) -> None:
    flags = {argument for argument in arguments if argument.startswith("-")}
    overrides = [argument for argument in arguments if argument not in flags]
    if unknown := sorted(flags - {"--help", "-h", "--cfg", "--version"}):
        raise ConfigError(f"{unknown[0]}: there is no such flag; options look like train.steps=1000, see --help")
    if "--version" in flags:
        show(f"tf2dist {__version__}\n")
        return
    if flags & {"--help", "-h"}:
        show(help_text(shutil.get_terminal_size((120, 24)).columns))
        return
    tf_config = os.environ.get("TF_CONFIG") or None
    config = compose.load(overrides, tf_config)
    if "--cfg" in flags:
        show(config.to_yaml())
        return
    this = None if config.cluster.kind == "local" else cluster.from_config(config, tf_config)
    train(config, this, started_at)


def show(text: str) -> None:
    """Writes what was asked for to the standard output.

    Raises:
        TfDistError: it takes nothing; a full disk, for example.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
        raise TfDistError(f"the standard output cannot be written ({error.strerror})") from None


def train(config: RunConfig, this: tuple[Cluster, Task] | None, started_at: float) -> None:
    """Checks what can be checked before anything is made, then makes the run directory and runs."""
    num_workers = this[0].num_workers if this else config.cluster.num_workers
    sources.check_batch_size(config, num_workers)
    if this:
        check_not_public(*this, allow_public=config.cluster.allow_public)
        if config.cluster.check_address:
            check_own_address(*this)
        check_ports(this[0], config.cluster.control_port_shift)
        job_key(os.environ, this[0], tell=lambda _: None)  # it warns once the run begins
    console = Console()
    if this:
        if text := exposure(*this):
            console.warn(text)
        # Every host sees its own data alone: to fall back is for all of them or none.
        config.data = replace(config.data, offline="fail")
    if this is None or this[1].job != "ps":
        config.data = sources.resolve(config.data, console.warn)
    sources.check_batch_size(config, num_workers)  # again: the data may have become another
    leads = this is None or this[1] == this[0].leader
    run_dir = make_run_dir(config)
    with the_only_run(run_dir) if leads else contextlib.nullcontext():
        summary = supervise(config, run_dir, this, console, started_at)
    if summary:
        try:
            print(result_lines(summary, str(run_dir)), flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            console.warn(f"the result could not be printed ({error.strerror}); it is in {run_dir}/summary.json")


def make_run_dir(config: RunConfig) -> Path:
    """The folder of this run, readable by its owner alone, with `logs` in it.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        run_dir = Path(config.run_dir).expanduser().absolute() if config.run_dir else new_default_dir(config)
        if (run_dir / "config.yaml").exists() and not (run_dir / "logs").exists():
            raise ConfigError(
                f"run_dir ({config.run_dir}): has a config.yaml of something else; name another directory"
            )
        make_private(run_dir)
        (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir / "logs").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"run_dir ({config.run_dir or 'outputs'}): cannot be written ({reason}); name another directory"
        ) from None
    return run_dir


@contextlib.contextmanager
def the_only_run(run_dir: Path) -> Iterator[None]:
    """Holds the run directory for as long as this process lives, however it ends.

    Raises:
        ConfigError: another run holds it.
    """
    with open(run_dir / ".lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run_dir ({run_dir}): another run is using it; wait for its end, or name another directory"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def new_default_dir(config: RunConfig) -> Path:
    """Makes outputs/DATE_TIME-MODE-MODEL, with a number behind it where that exists."""
    name = f"{datetime.now():%Y%m%d_%H%M%S}-{config.mode}-{config.model['name']}"
    outputs = Path("outputs").absolute()
    outputs.mkdir(mode=0o700, exist_ok=True)
    for number in itertools.count(1):
        run_dir = outputs / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(mode=0o700)
            break
    return run_dir
