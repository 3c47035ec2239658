"""After a training the commands and the workers of `tf2dist.predict` look rows up, and never hold a table."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensorflow as tf

import tf2dist
from tests.conftest import Command, ended, our_processes, start_module, wait_until
from tf2dist.data.loading import make_impressions
from tf2dist.tools.finished.opening import data_of
from tf2dist.tools.finished.shell import CommandLine

pytestmark = pytest.mark.timeout(900)  # several runs of some 10 s, each with a limit of its own

FEW, MANY = 1000, 1_000_000  # rows of 64 bytes
TABLE_MB = 64
OPTIONS = (
    *("experiment=clicks", "cluster=local2", "mode=async", "data.num_items=1000", "data.num_impressions=40000"),
    *("data.num_validation=1000", "train.epochs=null", "train.eval_every_steps=null", "train.steps=20"),
)


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A run for each number of rows."""
    run_dirs = {}
    for rows in (FEW, MANY):
        finished = Command(tmp_path_factory.mktemp(f"rows-{rows}"))(*OPTIONS, f"data.num_users={rows}")
        assert finished.code == 0, finished
        run_dirs[rows] = finished.run_dir
    return run_dirs


@contextlib.contextmanager
def peaks_mb(is_wanted: Callable[[psutil.Process], bool]) -> Iterator[list[int]]:
    """Takes samples of the memory of these processes that no file has; the list has them all at the end."""
    samples: list[int] = []
    is_done = threading.Event()

    def sample() -> None:
        while not is_done.wait(0.02):
            for process in our_processes():
                with contextlib.suppress(OSError, IndexError, psutil.Error):  # it has ended
                    if is_wanted(process):
                        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                        samples.append(int(re.findall(r"RssAnon:\s*(\d+)", status)[0]) >> 10)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_done.set()
        thread.join()
    assert len(samples) > 20


def is_worker(process: psutil.Process) -> bool:
    return "worker-" in os.readlink(f"/proc/{process.pid}/fd/2")


def check(run_dir: Path, rows: int, folder: Path) -> list[int]:
    """Compares what the commands and `tf2dist.predict` give with the model of `load_model`; returns memory peaks."""
    folder.mkdir()
    model = tf2dist.load_model(run_dir)
    _, splits = data_of(CommandLine(run_dir, [], {}, [], None, []))
    assert splits.test
    with peaks_mb(lambda process: "tf2dist.evaluate" in process.cmdline()) as evaluating:
        stdout, _ = ended(start_module(folder, "tf2dist.evaluate", str(run_dir)), 0)
    expected = model.evaluate(splits.test.x, splits.test.y, 256, verbose=0)[0]
    assert re.findall(r"loss +(\S+)", stdout) == [np.array2string(np.asarray(expected), precision=6)]

    stdout, _ = ended(start_module(folder, "tf2dist.predict", str(run_dir)), 0)
    right = (model.predict(splits.test.x, 256, verbose=0) > 0.5) == splits.test.y
    assert f"accuracy {right.mean():.4f} over {len(right):,} examples" in stdout

    ended(start_module(folder, "tf2dist.export", str(run_dir), str(folder / "exported")), 0)
    x, _, _ = make_impressions(40_000, rows, 1000, sample=1)
    like = {tensor.name: tf.cast(x[tensor.name][:100], tensor.dtype) for tensor in model.inputs}
    exported = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(exported.serve(like), model(like), rtol=1e-5)

    with peaks_mb(is_worker) as predicting:
        local = tf2dist.Local(workers=2)
        predictions = tf2dist.predict(str(run_dir), x, 100, 0, cluster=local, run_dir=folder / "predictions")
    np.testing.assert_array_equal(predictions, model.predict(x, 100, verbose=0))
    return [max(evaluating), max(predicting)]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["model.keras", "a checkpoint"])
def test_the_results_of_a_table_in_a_file_are_the_same(runs: dict[int, Path], source: str, tmp_path: Path) -> None:
    peaks = {}
    for rows, run_dir in runs.items():
        if source == "a checkpoint":  # as where model.keras did not fit into the memory
            (run_dir / "model.keras").unlink()
        peaks[rows] = check(run_dir, rows, tmp_path / str(rows))
    for small, large in zip(*peaks.values(), strict=True):
        assert large < small + TABLE_MB / 2, peaks


@pytest.mark.thorough
def test_a_model_in_memory_is_sent_as_files(runs: dict[int, Path], tmp_path: Path) -> None:
    peaks = []
    for rows, run_dir in runs.items():
        model, (x, _, _) = tf2dist.load_model(run_dir), make_impressions(40_000, rows, 1000, sample=2)
        with peaks_mb(is_worker) as predicting:
            local = tf2dist.Local(workers=2)
            predictions = tf2dist.predict(model, x, 100, 0, cluster=local, run_dir=tmp_path / str(rows))
        np.testing.assert_array_equal(predictions, model.predict(x, 100, verbose=0))
        peaks.append(max(predicting))
    assert peaks[1] < peaks[0] + TABLE_MB / 2, peaks


@pytest.mark.thorough
def test_nothing_is_left_of_a_command_that_is_stopped(
    runs: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start_module(tmp_path, "tf2dist.evaluate", str(runs[MANY]))
    wait_until(lambda: any(tmp_path.glob("tf2dist-*")), process)
    process.send_signal(signal.SIGINT)
    ended(process, 130)
    assert not any(tmp_path.iterdir())
