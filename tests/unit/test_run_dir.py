"""A run directory that other users can write to, and standard streams that are missing or full."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import COMMAND, REPOSITORY
from tests.unit.scripted import host_run
from tf2dist import cli, compare, doctor, render
from tf2dist.cluster.reachability import Wait
from tf2dist.cluster.spec import Cluster
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError, Interrupted, TaskLostError, TrainingError
from tf2dist.launch import host_tasks, run_dir, single_run
from tf2dist.launch.findings import Finding
from tf2dist.training.writers import JsonlWriter

FOLDERS = ["logs", "checkpoints", "tensorboard"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory that a run has used before."""
    folder = run_dir.make_run_dir(RunConfig(run_dir=str(tmp_path / "run")))
    (folder / "config.yaml").touch()
    return folder


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter; pytest makes its own temporary folders private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


AS_NOBODY = """
import os, sys
from tf2dist.launch import run_dir
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    with run_dir.locked(run_dir.make_run_dir(RunConfig(run_dir=sys.argv[1]))):
        print("locked")
except ConfigError as error:
    print(error)
"""


def as_nobody(path: Path) -> str:
    """What another user reads about a run directory."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    completed = subprocess.run([sys.executable, "-c", AS_NOBODY, path], cwd=REPOSITORY, capture_output=True, text=True)
    assert completed.stderr == ""
    return completed.stdout.strip()


@pytest.mark.parametrize("name", ["logs", "checkpoints", ".lock", "logs/worker-0.log", "config.yaml"])
def test_files_of_another_user_are_refused_in_one_line(open_folder: Path, name: str) -> None:
    folder = run_dir.make_run_dir(RunConfig(run_dir=str(open_folder / "run")))
    for path in (folder, folder / "logs"):
        path.chmod(0o777)
    if name in FOLDERS:
        (folder / name).mkdir(exist_ok=True)
    else:
        (folder / name).touch()
    (folder / name).chmod(0o700 if name in FOLDERS else 0o600)
    (folder / "config.yaml").touch()
    (folder / "config.yaml").chmod(0o666 if name != "config.yaml" else 0o600)
    stdout = as_nobody(folder)
    assert f"{Path(name).name} in it cannot be read and written by this user; remove it" in stdout
    assert "\n" not in stdout


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("checkpoints", "is a link to /scratch/gone, which is not there"),
        ("tensorboard", "is not a directory"),
        ("summary.json", "is a directory"),
        ("model.keras", "is a directory"),
    ],
)
def test_what_stands_where_a_run_writes_is_refused_at_the_start(folder: Path, name: str, problem: str) -> None:
    if "link" in problem:
        (folder / name).symlink_to("/scratch/gone")
    elif "not" in problem:
        (folder / name).touch()
    else:
        (folder / name).mkdir()
    message = rf"run_dir \(.*\): {name} in it {problem}; remove it, or name another directory"
    with pytest.raises(ConfigError, match=message):
        run_dir.make_run_dir(RunConfig(run_dir=str(folder)))


def test_checkpoints_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (folder / "checkpoints").symlink_to(tmp_path / "scratch")
    assert run_dir.make_run_dir(RunConfig(run_dir=str(folder))) == folder


def test_one_run_at_a_time(folder: Path) -> None:
    in_use = "another run is using it; wait for its end, or name another directory"
    with run_dir.locked(folder) as lock:
        with pytest.raises(ConfigError, match=in_use), run_dir.locked(folder):
            pass
        lock.check()


@contextlib.contextmanager
def locked_by_another_host(folder: Path) -> Iterator[None]:
    """As a network file system shows the lock of another host, which may be down."""
    with run_dir.locked(folder):
        (folder / ".lock").write_text('{"kernel": "its boot", "host": "node3", "pid": 4711}')
        yield


def test_the_lock_of_another_host_is_worth_a_retry(folder: Path) -> None:
    message = r"run_dir \(.*\): process 4711 of host node3 holds its lock; wait for its end, or, if that host is down"
    with locked_by_another_host(folder):
        with pytest.raises(TaskLostError, match=message), run_dir.locked(folder):
            pass
        lines: list[str] = []
        with pytest.raises(TaskLostError), run_dir.locked(folder, wait=Wait(0.2, lines.append, 0.0)):
            pass
        assert lines == [f"waiting for the lock of {folder}, which process 4711 of host node3 holds, 0 s"]
        stopped = host_run(RunConfig(), folder)
        stopped.stop.ask(signal.SIGTERM)
        with pytest.raises(Interrupted), host_tasks.locked_for(stopped):
            pass
        (folder / ".lock").unlink()
        with run_dir.locked(folder) as lock:  # as the message says
            lock.check()


def test_a_run_waits_until_the_lock_of_another_host_is_released(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_by_another_host(folder))
        stack.enter_context(run_dir.locked(folder, wait=Wait(60, print), check=stack.pop_all().close))
        with pytest.raises(ConfigError, match="another run is using it"), run_dir.locked(folder, wait=Wait(60, print)):
            pass


def test_a_run_whose_directory_was_replaced_leaves_the_other_runs_results_alone(folder: Path) -> None:
    with run_dir.locked(folder) as lock:
        shutil.rmtree(folder)
        lock.check()  # no other run has come yet
        again = run_dir.make_run_dir(RunConfig(run_dir=str(folder)))
        with run_dir.locked(again) as its:
            host_tasks.write_summary(again, its, {"of": "the other run"})
        other = (again / "summary.json").read_text()
        with pytest.raises(TrainingError, match=rf"run_dir \({folder}\): was removed during the run, and another run"):
            host_tasks.note_begin(host_run(RunConfig(), folder), lock)
        with pytest.raises(TrainingError, match=r"another run uses that path now.*; its content would be\n.*this run"):
            host_tasks.write_summary(folder, lock, {"of": "this run"})
        assert (folder / "summary.json").read_text() == other
        assert not (folder / "config.yaml").exists()


def test_a_run_whose_directory_was_removed_says_so_and_writes_its_configuration_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = host_run(RunConfig(), folder)
    with run_dir.locked(folder) as lock:
        (folder / ".lock").unlink()  # as after a host that is down
        host_tasks.restore_config(run, lock)
        assert capsys.readouterr().err == ""
        shutil.rmtree(folder)
        (folder / "checkpoints").mkdir(parents=True)  # by the next checkpoint
        host_tasks.restore_config(run, lock)
    assert f"warning: run_dir ({folder}): was removed or moved during the run" in capsys.readouterr().err
    assert (folder / "config.yaml").read_text() == run.config.to_yaml()
    assert run_dir.make_run_dir(RunConfig(run_dir=str(folder))) == folder, "another run can go on there"


def test_a_run_that_begins_removes_the_result_of_an_earlier_one(folder: Path) -> None:
    for name in ("summary.json", "training.png", "metrics.jsonl"):
        (folder / name).write_text("earlier")
    host_tasks.note_begin(host_run(RunConfig(), folder), None)
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "logs", "metrics.jsonl"}


def test_a_metric_that_is_not_a_number_is_null(folder: Path) -> None:
    summary = {"test_loss": 0.5, "test_auc": float("nan"), "curve": [float("inf"), 1], "counts": [7, 0, 2]}
    host_tasks.write_summary(folder, None, summary)
    with contextlib.closing(JsonlWriter(folder / "metrics.jsonl", "worker-0", 0.0)) as writer:
        writer.write(3, {"auc": float("nan")})
    texts = [(folder / name).read_text() for name in ("summary.json", "metrics.jsonl")]
    result = [json.loads(text, parse_constant=pytest.fail) for text in texts]
    assert result[0] == {"test_loss": 0.5, "test_auc": None, "curve": [None, 1], "counts": [7, 0, 2]}
    assert '"counts": [7, 0, 2]' in texts[0]
    assert result[1]["auc"] is None


def test_no_room_for_the_fork_servers_log(
    small_disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk("nr_inodes=4")  # four files and folders, its root included
    with pytest.raises(SystemExit) as ended:
        cli.main([f"run_dir={folder}/run", "data=digits", "model=softmax", "cluster=local1", "train.steps=1"])
    assert ended.value.code == 2
    assert "cannot be written (No space left on device); make room" in capsys.readouterr().err


def run(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A shell command with $TF2DIST in it."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF2DIST": " ".join(COMMAND), **env}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    completed = run("mkdir gone; cd gone; rmdir ../gone; $TF2DIST data=digits; echo $?; $TF2DIST --version", tmp_path)
    assert completed.stdout.splitlines()[0] == "2"
    assert completed.stdout.splitlines()[1].startswith("tf2dist ")
    stderr = [line for line in completed.stderr.splitlines() if "getcwd" not in line]  # bash's own complaint
    (line,) = stderr
    assert "the working directory (No such file or directory): is gone; change to one that exists" in line


def test_streams_that_are_closed_or_full(tmp_path: Path) -> None:
    for redirection in ("2>&-", "2>/dev/full", "<&- >&- 2>&-"):
        completed = run(f"$TF2DIST mode=up {redirection}", tmp_path)
        assert (completed.returncode, completed.stdout, completed.stderr) == (2, "", ""), redirection


def test_too_few_files(tmp_path: Path) -> None:
    completed = run("ulimit -n 40; $TF2DIST data=digits run_dir=run", tmp_path)
    assert (completed.returncode, completed.stdout) == (2, "")
    text = "tf2dist: error: ulimit -n (40): a process may open too few files for a task; raise it to 64 or more\n"
    assert completed.stderr == text
    assert not (tmp_path / "run").exists()


RAISED = """
import resource
from tf2dist.linux import allow_open_files
print([(allow_open_files(number), *resource.getrlimit(resource.RLIMIT_NOFILE)) for number in (30, 64, 500)])
"""


def test_the_limit_on_open_files_is_raised_as_far_as_allowed(tmp_path: Path) -> None:
    """A thousand tasks need more than the 1,024 with which most systems begin."""
    completed = run(f"ulimit -Sn 40; ulimit -Hn 100; {sys.executable} -c '{RAISED}'", tmp_path)
    assert completed.stdout == "[(30, 40, 100), (64, 64, 100), (100, 100, 100)]\n", completed.stderr
    cluster = Cluster("async", {"chief": ("a:1",), "ps": ("b:1",), "worker": tuple(f"c{n}:1" for n in range(1000))})
    assert cluster.open_files == 2044


def test_a_reader_that_leaves_early(tmp_path: Path) -> None:
    for flag in ("--help", "--cfg job"):
        completed = run(f"set -o pipefail; (sleep 1; $TF2DIST {flag}) | true; echo $?", tmp_path)
        assert (completed.stdout, completed.stderr) == ("0\n", ""), flag


FULL = "tf2dist: error: the standard output cannot be written (No space left on device)\n"
SHOWN: list[tuple[Callable[[list[str]], None], list[str]]] = [
    (cli.main, ["--help"]),
    (cli.main, ["--info"]),
    (compare.main, ["--help"]),
    (doctor.main, ["--help"]),
    (doctor.main, ["mode=up", "--json"]),
    (render.main, ["--help"]),
    (render.main, ["slurm"]),
]


@pytest.mark.parametrize(("main", "arguments"), SHOWN)
def test_a_standard_output_that_cannot_be_written(
    main: Callable[[list[str]], None],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([Finding("fail", "mode", "up")]))
    reader, without_reader = os.pipe()
    os.close(reader)
    for file, code, stderr in (("/dev/full", 1, FULL), (without_reader, 0, "")):
        with open(file, "w", encoding="utf-8") as stdout:
            monkeypatch.setattr("sys.stdout", stdout)
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        assert (ended.value.code, capsys.readouterr().err) == (code, stderr)


def test_a_command_for_finished_runs_whose_output_cannot_be_written(tmp_path: Path) -> None:
    full = run("$TF2DIST.plot --help > /dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (1, FULL)
    left = run("set -o pipefail; (sleep 0.3; $TF2DIST.plot --help) | true", tmp_path)
    assert (left.returncode, left.stderr) == (0, "")


def test_a_broken_pipe_inside_a_run_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_in_folder(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(single_run, "run_in_folder", run_in_folder)
    with pytest.raises(BrokenPipeError):
        cli.main(["data=digits"])


def test_hydra_writes_into_the_directory_that_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two runs that start in the same second one has another name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir, "new_names", lambda outputs, _: iter([outputs / "second"]))
    monkeypatch.setattr(single_run, "run_host", lambda *_: {})
    with pytest.raises(SystemExit) as ended:
        cli.main(["data=digits"])
    assert (ended.value.code, [path.name for path in tmp_path.glob("outputs/*")]) == (0, ["second"])
    assert (tmp_path / "outputs" / "second" / ".hydra").is_dir()


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


NOT_UTF_8 = "has letters that Python takes for ascii in this locale, and TensorFlow for UTF-8; set PYTHONUTF8=1"


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("run_dir=modèle/run", "modèle/run"),
        pytest.param("plugins=[modèle/mine.py]", "modèle/mine.py", marks=pytest.mark.thorough),
        pytest.param("--config-dir=modèle", "modèle", marks=pytest.mark.thorough),
        pytest.param("-m seed=1 hydra.sweep.dir=modèle", "modèle", marks=pytest.mark.thorough),
    ],
)
def test_names_in_a_locale_that_is_not_utf_8(option: str, name: str, tmp_path: Path) -> None:
    """Python would name files in its encoding, and TensorFlow in UTF-8."""
    (tmp_path / "modèle").mkdir()
    (tmp_path / "modèle" / "mine.py").touch()
    completed = run(f"$TF2DIST data=digits {option}", tmp_path, **ASCII)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == f"tf2dist: error: {name.replace('è', chr(92) + 'xe8')}: {NOT_UTF_8}\n"


@pytest.mark.thorough
def test_a_working_directory_in_a_locale_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "modèle").mkdir()
    why = NOT_UTF_8
    completed = run("cd modèle; $TF2DIST data=digits; $TF2DIST.doctor data=digits", tmp_path, **ASCII)
    assert completed.stderr.endswith(f"mod\\xe8le/outputs: {why}\n")
    assert f"fail  run_dir: {tmp_path}/mod\\xe8le/outputs: {why}\n" in completed.stdout
    assert not (tmp_path / "modèle" / "outputs").exists()


def test_characters_that_an_ascii_terminal_lacks(tmp_path: Path) -> None:
    completed = run("$TF2DIST run_dir=Läufe --cfg job", tmp_path, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "run_dir: L\\xe4ufe" in completed.stdout
