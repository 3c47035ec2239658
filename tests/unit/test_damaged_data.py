"""Damaged data is reported before anything starts; a damaged cache of decoded data is made again."""

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
from tf2dist.data import cache, location
from tf2dist.launch import machine

EXAMPLES = [bytes([number]) * 40 for number in range(5)]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 40 * 4])


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def number_gone(path: Path) -> None:
    path.write_text(path.read_text().replace("shardLengths", "lengths"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (empty, "mnist-train*", "has 0 bytes of at least 200"),
        (cut, "mnist-train*", "has 160 bytes of at least 200"),
        (cut, "mnist-test*", "has 160 bytes of at least 200"),
        (folder_in_its_place, "mnist-test*", "cannot be read: Is a directory"),
        (empty, "dataset_info.json", "does not say how many examples the split train has"),
        (number_gone, "dataset_info.json", "does not say how many examples the split train has"),
        (folder_in_its_place, "dataset_info.json", "cannot be read: Is a directory"),
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
    (finding,) = machine.training_data(DataConfig(dir=str(folder)))
    assert (finding.level, finding.text) == ("fail", f"data (mnist): {file} {words}")


def test_an_unknown_size_is_not_reported_as_damage(tmp_path: Path) -> None:
    files = write_mnist(tmp_path, EXAMPLES)
    about = tmp_path / "mnist" / "3.0.1" / "dataset_info.json"
    info = json.loads(about.read_text())
    for split in info["splits"]:
        del split["numBytes"]  # tensorflow-datasets leaves out what is 0, and writes 0 for a size that it does not know
    about.write_text(json.dumps(info))
    location.resolve(DataConfig(dir=str(tmp_path)), pytest.fail)
    assert [location.num_examples(file) for file in files] == [len(EXAMPLES)] * 2


OF_A_STRANGER = """
import os, sys
from tf2dist.config import load
from tf2dist.config.schema import DataConfig
from tf2dist.data import location
from tf2dist.errors import RequestError
load.load(["data=digits"], None)  # imports what the other user may not be able to read
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(location.mnist_files(location.mnist_dir(DataConfig())))
location.resolve(DataConfig(dir=sys.argv[1]), print)
for option in ("init_from", "data.dir"):
    try:
        load.load([f"{option}={os.environ['HOME']}/x", "data=digits"], None)
    except RequestError as error:
        print(error)
"""


def test_a_home_that_this_user_may_not_enter() -> None:
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
        done = subprocess.run(
            [sys.executable, "-c", OF_A_STRANGER, str(data)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stderr == ""
    first, *refused = done.stdout.splitlines()
    assert first == "None"
    assert len(refused) == 1, "an unreadable folder must count as missing, without hiding other data"
    assert refused[0].startswith("init_from (")


def kept_of(file: Path) -> Path:
    """The cache folder of a file, filled."""
    folder = cache.folder_of(file)
    assert folder
    folder.mkdir(parents=True)
    for name in cache.ARRAYS:
        (folder / name).write_bytes(b"x" * 100)
    cache.seal(folder)
    return folder


def flip(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[50] ^= 1
    path.write_bytes(text)


@pytest.mark.parametrize("name", [*cache.ARRAYS, cache.HASHES])
@pytest.mark.parametrize("damage", [flip, empty, Path.unlink])
def test_a_damaged_cache_is_removed_and_reported(tmp_path: Path, damage: Callable[[Path], None], name: str) -> None:
    files = write_mnist(tmp_path, EXAMPLES)
    whole, broken = map(kept_of, files)
    damage(broken / name)
    warned: list[str] = []
    for _ in range(2):
        location.resolve(DataConfig(dir=str(tmp_path)), warned.append)
    assert warned == [f"the cached copy of the decoded {files[1].name} is damaged; the file is decoded again"]
    assert list((tmp_path / "cache" / "tf2dist").iterdir()) == [whole]


SCRIPT = """
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
    ("offline", "given", "lines"),
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
def test_a_user_without_a_home(tmp_path: Path, offline: str, given: bool, lines: list[str]) -> None:
    """Neither HOME nor an entry in passwd, as in containers that run under an arbitrary user id."""
    write_mnist(tmp_path, EXAMPLES)
    own = {"HOME", "XDG_CACHE_HOME", "TFDS_DATA_DIR"}
    env = {key: value for key, value in os.environ.items() if key not in own}
    command = ["unshare", "--user", "--map-user=54321", sys.executable, "-c", SCRIPT, offline]
    done = subprocess.run(
        command,
        env=env | ({"TFDS_DATA_DIR": str(tmp_path)} if given else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr:
        pytest.skip("this system allows no user namespaces")
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == len(lines)
    assert all(line.startswith(words) for line, words in zip(done.stdout.splitlines(), lines, strict=True))
