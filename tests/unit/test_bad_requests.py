"""Wrong requests to the whole command: exit code 2, at most three lines, and nothing is created."""

import os
from pathlib import Path

import pytest

from tests.unit import test_config
from tests.unit.bad_requests import IN_A_CLUSTER, IN_A_JOB, IN_A_STEP, IN_TF_CONFIG, MORE_OPTIONS, OPTIONS
from tf2dist import cli
from tf2dist.data import location
from tf2dist.launch import single_run

REQUESTS = [
    (["--multirun", "seed=1,2"], IN_A_CLUSTER, "--multirun: a sweep runs on this machine alone; unset TF_CONFIG"),
    *[(options, None, words) for options, words in OPTIONS],
    *[(["mode=sync", "data=digits"], text, words) for text, words in IN_TF_CONFIG],
]
# More of the same kinds, and what test_config.py has tried already, without the rest of the command.
MORE = [(options, None, words) for options, words in (*MORE_OPTIONS, *test_config.BAD, *test_config.BAD_AGAIN)]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "folder.py").mkdir(parents=True)
    (folder / "file").touch()
    (folder / "empty.py").touch()
    (folder / "config.yaml").touch()
    (folder / "broken.yaml").write_text("seed: [")
    (folder / "loop").symlink_to("loop")
    (folder / "broken.py").write_text("def x(:\n")
    (folder / "bytes.py").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; nothing is downloaded or started from it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(location, "_download", lambda *args: pytest.fail("a download for a wrong request"))
    monkeypatch.setattr(single_run, "run_host", lambda *args: pytest.fail("a wrong request is run"))
    monkeypatch.setattr(cli, "sweep_job", lambda *args: pytest.fail("a wrong request is run"))
    return folder


def first_words(text: str) -> str:
    return ascii(text[:40])[1:-1]


@pytest.mark.parametrize(
    ("options", "variable", "words"),
    [*REQUESTS, *(pytest.param(*request, marks=pytest.mark.thorough) for request in MORE)],
    ids=[f"{first_words(' '.join(options))} {first_words(variable or '')}" for options, variable, _ in REQUESTS + MORE],
)
def test_a_wrong_request_is_refused(
    options: list[str],
    variable: str | None,
    words: str,
    files: Path,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setitem(os.environ, "TF_CONFIG", variable)
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main([option.replace("{files}", str(files)) for option in options])
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert words in output.err
    assert len(output.err.splitlines()) <= 3
    assert max(map(len, output.err.splitlines())) < 350
    assert "Traceback" not in output.err
    assert output.out == ""
    assert list(empty.iterdir()) == []
    assert sorted(files.rglob("*")) == before, "nothing is left half-made"


IN_RANKS = {"TF2DIST_ADDRESSES": "a,b", "TF2DIST_RANK": "0"}
ALONE = "each of which would train alone; add cluster={}, or cluster=local if that is meant"
WHOLE = "each of which would run the whole sweep; start one process, or add cluster=local if that is meant"
LATER = "simulate.delay_secs ([1]): has 1 numbers for 3 workers"  # what is checked after the engine


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        (IN_RANKS, ["mode=sync"], ALONE.format("ranks")),
        (IN_A_STEP, ["mode=sync"], ALONE.format("slurm")),
        (IN_A_STEP, ["mode=sync", "cluster=local3"], LATER),
        (IN_RANKS, ["-m", "mode=sync", "seed=1,2"], WHOLE),
        (IN_A_STEP, ["-m", "mode=sync", "seed=1,2"], WHOLE),
        (IN_A_STEP, ["-m", "mode=sync", "seed=1,2", "cluster=local"], LATER),
        (IN_A_JOB, ["-m", "mode=sync", "seed=1,2"], LATER),
        (IN_A_JOB, ["mode=sync"], LATER),
        (IN_A_STEP | {"SLURM_STEP_NUM_TASKS": "1"}, ["mode=sync"], LATER),
    ],
)
def test_a_local_cluster_in_each_task_of_an_engine_is_refused(
    variables: dict[str, str],
    options: list[str],
    words: str,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main([*options, "data=digits", "simulate.delay_secs=[1]"])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_at_least_sixty_requests_are_tried() -> None:
    different = {(tuple(options), variable) for options, variable, _ in REQUESTS}
    assert len(different) >= 60
