"""Fixtures of all tests: the data that is available, the command, and a check for leftover processes."""

import atexit
import contextlib
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil
import pytest
import pytest_timeout

from tf2dist import linux
from tf2dist.config.schema import CONTROL_PORT_SHIFT as SHIFT
from tf2dist.config.schema import RunConfig
from tf2dist.launch.launcher import warm_up
from tf2dist.launch.warm_process import NOT_READ, lend
from tf2dist.linux import CALL_MAIN, code_command, import_lazily

pytest_plugins = ["tf2dist.testing"]

REPOSITORY = Path(__file__).parents[1]
PREPARED = REPOSITORY.parent / "shared" / "tensorflow_datasets"
COMMAND = [sys.executable, "-m", "tf2dist"]
# The text of each page for users and contributors, by its path in the repository; a folder _build is not a source.
PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/**/[!_]*.md"))]
    if "_build" not in path.parts
}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def blocks_of(page: str, content: str) -> list[Block]:
    fences = re.findall(r"^( *)(`{3,})(.*)\n((?:.*\n)*?)\1\2 *$", content, re.MULTILINE)
    return [
        Block(page, language.strip(), re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, _, language, text in fences
    ]


# In the order of the pages, and of the blocks in each.
BLOCKS = [block for page, content in PAGES.items() for block in blocks_of(page, content)]

# For TensorFlow in the tests' own process, and against every network.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
os.environ["NO_GCE_CHECK"] = "true"
if "TFDS_DATA_DIR" not in os.environ and PREPARED.is_dir():
    os.environ["TFDS_DATA_DIR"] = str(PREPARED)
os.environ.pop("TF_CONFIG", None)
import_lazily()  # as in every task; Keras is imported in two thirds of the time and takes 60 MB less
# A shell starts what it runs in the background with Ctrl-C ignored, and nohup its command with SIGHUP ignored; every
# command of ours would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


MAX_SLOWNESS = 5.0
# Files of whole commands of which the summary of `make test` says that they take longest.
LONGEST = {
    f"test_{name}.py"
    for name in ("website", "resume", "elastic", "warm_fits", "train", "docs", "endings", "fit_places")
}
NUM_SLOWEST = 10
# The processes that ran before a test; once its fixtures are made, theirs are among them.
PIDS = pytest.StashKey[set[int]]()


def slowness() -> float:
    """By how much limits of time are longer, since others use the processors as well: between 1 and `MAX_SLOWNESS`."""
    return round(min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), MAX_SLOWNESS), 1)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """Makes the limit of a test longer on a busy machine; at the limit the processes that the test has started end."""
    item.stash[PIDS] = set(psutil.pids())
    # At the other limit, which is for what no signal reaches, the process of pytest itself ends.
    longest = float(item.config.getini("faulthandler_timeout") or "inf") - 60
    limit = max(settings.timeout, min(settings.timeout * slowness(), longest))
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit))
    fail = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(fail):

        def on_limit(signum: int, frame: FrameType | None) -> None:
            # Before the test ends, which may wait for them.
            if ended := end_processes(item.stash[PIDS]):
                item.add_report_section("call", "the limit of time", f"ended what the test had started: {ended}")
            fail(signum, frame)

        signal.signal(signal.SIGALRM, on_limit)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    item.stash[PIDS] = set(psutil.pids())


def end_processes(others: set[int]) -> list[str]:
    """Kills all processes of these tests but others, and waits for their end; returns what they were."""
    found = {process.pid: process for process in (*our_processes(), *psutil.Process().children(recursive=True))}
    mine, told = [process for pid, process in found.items() if pid not in others], []
    for process in mine:
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
    psutil.wait_procs(mine, timeout=5.0)
    return told


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has the longest files begin first: at the end one process would work on them, and the others have nothing."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_unconfigure() -> None:
    """Silences TensorFlow at exit: below the summary it would print pages about servers that are gone."""
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)  # pytest has restored the file descriptor by then


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells which files took longest, so that nobody finds out only when all take too long."""
    secs: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            secs[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    if len(secs) > NUM_SLOWEST:
        terminalreporter.section(f"slowest {NUM_SLOWEST} of {len(secs)} files")
        for path, total in secs.most_common(NUM_SLOWEST):
            terminalreporter.line(f"{total:6.1f} s  {path}")


def ports_of_tasks(count: int) -> list[int]:
    """Unused ports whose control ports are unused too; control ports lie in the odd thousands, these ports do not."""
    even = (port for port in linux.unused_ports(512) if port // SHIFT % 2 == 0)
    return list(itertools.islice((port for port in even if linux.is_free(port + SHIFT)), count))


@pytest.fixture(scope="session")
def real_data() -> str:
    """mnist if it is on this machine, otherwise digits; nothing is downloaded."""
    folder = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
    return "mnist" if any(folder.glob("mnist/3.*/dataset_info.json")) else "digits"


@dataclass
class Finished:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path

    def logs(self) -> str:
        """The output of the tasks, for the message of a failed assertion."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}\n{self.logs()}"


@dataclass
class Command:
    """Starts tf2dist in a folder that belongs to the test, as a command.

    Attributes:
        folder: its working directory.
        env: its further environment variables.
        is_cold: whether it is ``python -m tf2dist`` and nothing else. Otherwise it is lent the warm process of these
            tests, as the runs of a comparison are, which saves an import of TensorFlow; but for a command with
            variables that an import may read.
    """

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    is_cold: bool = False

    def start(self, *arguments: str, run_dir: str = "run", env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        # A picture takes a second of processor time, and few tests look at it.
        picture = [] if any(argument.startswith(("-", "figure=")) for argument in arguments) else ["figure=false"]
        words = [f"run_dir={self.folder / run_dir}", *picture, *arguments]
        variables = {**self.env, **(env or {})}
        is_cold = self.is_cold or not set(variables) <= set(NOT_READ)
        lent, descriptors = ({}, []) if is_cold else warm_process_to_lend()
        return subprocess.Popen(
            [*COMMAND, *words] if is_cold else code_command(CALL_MAIN, "tf2dist.__main__", *words),
            cwd=self.folder,
            env={**os.environ, **variables, **lent},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str], run_dir: str = "run", timeout_secs: float = 120.0) -> Finished:
        timeout_secs *= slowness()
        try:
            stdout, stderr = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"not done in {timeout_secs} s\n{Finished(-9, stdout, stderr, self.folder / run_dir)}")
        return Finished(process.returncode, stdout, stderr, self.folder / run_dir)

    def __call__(
        self,
        *arguments: str,
        run_dir: str = "run",
        timeout_secs: float = 120.0,
        env: dict[str, str] | None = None,
    ) -> Finished:
        return self.finish(self.start(*arguments, run_dir=run_dir, env=env), run_dir, timeout_secs)


def warm_process_to_lend() -> tuple[dict[str, str], list[int]]:
    """The variables and the descriptors for a command; its path of modules must be that of these tests."""
    warm_up(RunConfig(), lambda: None)
    return lend()


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    """A command; that of a slow test is cold."""
    return Command(tmp_path, is_cold=request.node.get_closest_marker("slow") is not None)


@pytest.fixture
def cold_command(tmp_path: Path) -> Command:
    return Command(tmp_path, is_cold=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory, with an option of tmpfs such as size=3m, and returns its folder."""
    folder = tmp_path / "disk"

    def mount(option: str) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"this system lets nobody mount a small file system: {mounted.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


def leave_free(folder: Path, num_bytes: int) -> Path:
    """Fills a file system but for so many bytes; returns the file that fills it."""
    fill = folder / "fill"
    with open(fill, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(fill, fill.stat().st_size - num_bytes)
    return fill


def our_processes() -> list[psutil.Process]:
    """Fork servers and the tasks forked from them, of any run on this machine started from these tests.

    The warm process of these tests themselves stays for the next one.
    """
    mark = os.environ["TF2DIST_TEST_MARK"]
    results = []
    for process in psutil.process_iter():
        try:
            stays = process.ppid() == os.getpid() and is_warm(process)
            if process.pid != os.getpid() and process.environ().get("TF2DIST_TEST_MARK") == mark and not stays:
                results.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return results


def fork_servers_of(pid: int) -> list[psutil.Process]:
    """Those of the runs of a process, which its warm process has forked."""
    return [server for warm in psutil.Process(pid).children() if is_warm(warm) for server in warm.children()]


def is_warm(process: psutil.Process) -> bool:
    """Whether it is a warm process, or forked from one, that has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
        return "tf2dist.launch.warm_process" in process.cmdline()
    return False


# Parallel processes of pytest inherit the mark of their parent; each looks only for its own processes.
MARK = os.environ.get("TF2DIST_TEST_MARK", f"{os.getpid()}").partition(" ")[0]
os.environ["TF2DIST_TEST_MARK"] = " ".join([MARK, os.environ.get("PYTEST_XDIST_WORKER", "")]).strip()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Fails the test if it leaves an environment variable changed: the next one would be another test.

    TensorFlow, JAX and Ray add some of their own when they are imported or first used.
    """
    before = {**os.environ, "PYTEST_CURRENT_TEST": ""}
    yield
    now = {**os.environ, "PYTEST_CURRENT_TEST": ""}
    assert {name: now.get(name) for name in before} == before


@pytest.fixture
def many_files() -> Iterator[int]:
    """A number that a descriptor may have now, too high for `select.select`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert linux.allow_open_files(2000) == 2000, "the hard limit of ulimit -n is lower"
    yield 1100
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def no_leftovers() -> Iterator[Callable[[], None]]:
    """Fails the test if a process of ours still runs 5 seconds after it, and kills such processes for the next test."""
    before = {process.pid for process in our_processes()}

    def check() -> None:
        left = [process for process in our_processes() if process.pid not in before]
        _, alive = psutil.wait_procs(left, timeout=5.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not alive, f"left behind: {alive}"

    yield check
    check()


def task_process(run_dir: Path, task: str) -> psutil.Process:
    """The process of a task; it is found by the log file that is its standard output.

    Raises:
        LookupError: it does not run.
    """
    for process in our_processes():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(run_dir / "logs" / f"{task}.log"):
                return process
    raise LookupError(f"{task} does not run")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_secs: float = 90.0) -> None:
    """Waits for a condition as long as the process runs."""
    timeout_secs *= slowness()
    deadline = time.monotonic() + timeout_secs
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"ended too early: {process.communicate()}")
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"not within {timeout_secs:.0f} s: {process.communicate()}")
        time.sleep(0.05)  # the interval between two checks


def start_module(folder: Path, module: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts ``python -m module`` in the folder, in a process group of its own, as a shell starts a command."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """The stdout and stderr; asserts that the command has ended with this code."""
    stdout, stderr = process.communicate(timeout=200 * slowness())
    assert process.returncode == code, stdout + stderr
    return stdout, stderr
