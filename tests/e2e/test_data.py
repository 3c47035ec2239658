"""Runs on idx files and on damaged data, and runs of a user without a home directory."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import COMMAND, Command, slowness
from tests.idx import TRAIN_IMAGES, write_fashion_mnist
from tf2dist.config.schema import DataConfig
from tf2dist.data import image_files


@pytest.mark.thorough
def test_a_changed_byte_in_the_data_is_reported(command: Command, real_data: str, tmp_path: Path) -> None:
    if real_data != "mnist":
        pytest.skip("MNIST is not on this machine")
    found = image_files.find(DataConfig())
    assert found
    files = (*found.train, *found.test)
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    for file in (*files, files[0].parent / "dataset_info.json"):
        shutil.copyfile(file, folder / file.name)
    with open(folder / files[0].name, "r+b") as train:
        train.seek(9_000_000)
        (byte,) = train.read(1)
        train.seek(9_000_000)
        train.write(bytes([byte ^ 1]))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    finished = command("cluster=local1", f"data.dir={tmp_path}", "train.steps=20", env=env)
    assert finished.code == 2, finished
    assert f"data (mnist): {folder / files[0].name} is damaged (DataLossError: corrupted record" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.thorough  # the reading is shown by tests/replica/test_fashion_mnist.py
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_fashion_mnist_from_idx_files(command: Command, tmp_path: Path, mode: str) -> None:
    write_fashion_mnist(tmp_path / "files", 400, 50)
    finished = command(
        *(f"mode={mode}", "cluster=local2", "data=fashion_mnist", f"data.dir={tmp_path / 'files'}"),
        *("data.num_validation=100", "train.batch_size_per_worker=50", "train.steps=60"),
    )
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (summary["data"], summary["validation_examples"], summary["test_examples"]) == ("fashion_mnist", 100, 50)
    assert summary["test_accuracy"] > 0.15


@pytest.mark.thorough
def test_a_compressed_file_that_ends_early(command: Command, tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "files", 400, 50)
    file = tmp_path / "files" / f"{TRAIN_IMAGES}.gz"
    file.write_bytes(file.read_bytes()[:-100])
    finished = command(
        *("cluster=local2", "data=fashion_mnist", f"data.dir={file.parent}", "data.num_validation=100"),
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert finished.code == 2, finished
    assert f"data (fashion_mnist): {file} is damaged: Compressed file ended before" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_a_user_without_a_home(real_data: str, tmp_path: Path) -> None:
    """The user has neither HOME nor an entry in /etc/passwd; the command must leave nothing but the run directory."""
    as_unknown_user = ["unshare", "--user", "--map-user=54321"]
    if subprocess.run([*as_unknown_user, "true"], stderr=subprocess.DEVNULL, timeout=30 * slowness()).returncode:
        pytest.skip("this system allows no user namespaces")
    folder = image_files.tfds_dir(DataConfig())
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "KERAS_HOME")}
    completed = subprocess.run(
        [*as_unknown_user, *COMMAND, "cluster=local1", f"data={real_data}", "train.steps=20", "run_dir=run"],
        cwd=tmp_path,
        env=env | {"TFDS_DATA_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120 * slowness(),
    )
    assert completed.returncode == 0, completed.stderr
    assert "test accuracy" in completed.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
