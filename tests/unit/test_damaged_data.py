"""Damaged and missing data is reported before anything starts."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.tfds import write_mnist
from tf2dist import cli
from tf2dist.config.schema import DataConfig
from tf2dist.data import image_files, location
from tf2dist.launch import findings

EXAMPLES = [bytes([number]) * 40 for number in range(5)]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 40 * 4])


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rename_shard_lengths(path: Path) -> None:
    path.write_text(path.read_text().replace("shardLengths", "lengths"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the cache and the run directory into the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (empty, "mnist-train*", "has 0 bytes of at least 200"),
        (truncate, "mnist-train*", "has 160 bytes of at least 200"),
        (truncate, "mnist-test*", "has 160 bytes of at least 200"),
        (replace_by_a_folder, "mnist-test*", "cannot be read: Is a directory"),
        (empty, "dataset_info.json", "does not say how many examples the split train has"),
        (rename_shard_lengths, "dataset_info.json", "does not say how many examples the split train has"),
        (replace_by_a_folder, "dataset_info.json", "cannot be read: Is a directory"),
    ],
)
def test_damaged_data_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    damage: Callable[[Path], None],
    name: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("of")  # a long path would be shortened in the message
    write_mnist(folder, EXAMPLES)
    (file,) = (folder / "mnist" / "3.0.1").glob(name)
    damage(file)
    with pytest.raises(SystemExit) as ended:
        cli.main([f"data.dir={folder}"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tf2dist: error: data (mnist): {file} {words}; put a whole one there, or remove ")
    assert not (folder / "outputs").exists()
    (finding,) = findings.training_data(DataConfig(dir=str(folder)))
    assert (finding.level, finding.text) == ("fail", f"data (mnist): {file} {words}")


def test_an_unknown_size_is_not_reported_as_damage(tmp_path: Path) -> None:
    files = write_mnist(tmp_path, EXAMPLES)
    info_file = tmp_path / "mnist" / "3.0.1" / "dataset_info.json"
    info = json.loads(info_file.read_text())
    for split in info["splits"]:
        del split["numBytes"]  # tensorflow-datasets has 0 for an unknown size, and leaves out what is 0
    info_file.write_text(json.dumps(info))
    location.resolve(DataConfig(dir=str(tmp_path)), pytest.fail)
    assert [image_files.num_examples(file) for file in files] == [len(EXAMPLES)] * 2


def test_without_mnist_it_is_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "none"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    monkeypatch.setattr(location, "_download", lambda *_: "no network")
    told: list[str] = []
    assert location.resolve(DataConfig(), told.append).name == "digits"
    problem = f"data (mnist): not in {folder}, and the download failed: no network"
    assert told == [f"{problem}; training on data=digits instead"]
    assert not folder.exists()


AS_ANOTHER_USER = """
import os, sys
from tf2dist.config import load
from tf2dist.config.schema import DataConfig
from tf2dist.data import image_files, location
from tf2dist.errors import RequestError
load.load(["data=digits"], None)  # imports what the other user may not be able to read
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(image_files.find(DataConfig()))
location.resolve(DataConfig(dir=sys.argv[1]), print)
for option in ("init_from", "data.dir"):
    try:
        load.load([f"{option}={os.environ['HOME']}/x", "data=digits"], None)
    except RequestError as error:
        print(error)
"""


def test_a_home_directory_that_this_user_may_not_enter_counts_as_missing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with tempfile.TemporaryDirectory() as folder:
        home, data = Path(folder, "home"), Path(folder, "data")
        home.mkdir(mode=0o700)
        write_mnist(data, EXAMPLES)
        for path in (Path(folder), *data.rglob("*"), data):
            path.chmod(0o755 if path.is_dir() else 0o644)
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        for name in ("XDG_CACHE_HOME", "TFDS_DATA_DIR"):
            environment.pop(name, None)
        completed = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, str(data)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert completed.stderr == ""
    first, *refused = completed.stdout.splitlines()
    assert first == "None"
    assert len(refused) == 1, "an unreadable folder must count as missing, without hiding other data"
    assert refused[0].startswith("init_from (")


RESOLVE = """
import sys
from tf2dist import errors
from tf2dist.config import schema
from tf2dist.data import location
try:
    print(location.resolve(schema.DataConfig(offline=sys.argv[1]), print).name)
except errors.DataError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
@pytest.mark.parametrize(
    ("offline", "has_data_dir", "lines"),
    [
        ("fail", True, ["mnist"]),
        (
            "fail",
            False,
            ["data (mnist): this user has no home directory for ~/tensorflow_datasets; set TFDS_DATA_DIR or"],
        ),
        ("fallback", False, ["data (mnist): this user has no home directory for ~/tensorflow_datasets; ", "digits"]),
    ],
)
def test_a_user_without_a_home(tmp_path: Path, offline: str, has_data_dir: bool, lines: list[str]) -> None:
    """The user has neither HOME nor an entry in /etc/passwd, as in containers that run under an arbitrary user id."""
    write_mnist(tmp_path, EXAMPLES)
    unset = {"HOME", "XDG_CACHE_HOME", "TFDS_DATA_DIR"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    command = ["unshare", "--user", "--map-user=54321", sys.executable, "-c", RESOLVE, offline]
    completed = subprocess.run(
        command,
        env=env | ({"TFDS_DATA_DIR": str(tmp_path)} if has_data_dir else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in completed.stderr:
        pytest.skip("this system allows no user namespaces")
    assert completed.stderr == ""
    assert len(completed.stdout.splitlines()) == len(lines)
    assert all(line.startswith(words) for line, words in zip(completed.stdout.splitlines(), lines, strict=True))
