"""When checkpoints are saved, and what happens if saving fails."""

import errno
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.unit.test_saving import assert_same, fail, snapshot
from tf2dist.checkpoint import store
from tf2dist.checkpoint.snapshot import Frozen, Snapshot
from tf2dist.checkpoint.store import Checkpoints, Saver
from tf2dist.errors import TrainingError
from tf2dist.launch.host_tasks import check_saved, write_summary
from tf2dist.messages import Saved, ToLauncher, Warned

RESULT = {"test_accuracy": 0.9, "test_loss": 0.3, "test_examples": 100}
NOBODY = ToLauncher("chief-0", lambda message: None)


def frozen(step: int) -> Frozen:
    return lambda: snapshot(step)


class Disk(Checkpoints):
    """A disk that is full until `full` is False."""

    full = True

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(path, snapshot)


def test_a_full_disk_is_a_warning_and_saving_is_retried(tmp_path: Path) -> None:
    now = [0.0]
    sent: list[Any] = []
    disk = Disk(tmp_path)
    saver = Saver(disk, 600.0, ToLauncher("chief-0", sent.append), clock=lambda: now[0])
    now[0] = 599.0
    assert not saver.due()
    now[0] = 600.0
    assert saver.due()
    saver.save(lambda: frozen(1))
    saver.wait()
    assert "step 1 could not be saved (No space left on device)" in sent[-1].text
    assert [type(message) for message in sent] == [Warned]
    assert not saver.due()
    now[0] += 30.0
    assert saver.due(), "saving must be retried soon"
    disk.full = False
    saver.save(lambda: frozen(2))
    saver.wait()
    assert sent[-1] == Saved(2, stopping=False, task="chief-0")
    assert not saver.due()
    assert_same(disk.newest(fail), snapshot(2))


def test_saving_the_last_step_is_retried(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    saver = Saver(disk, None, NOBODY)
    saver.save(lambda: frozen(9))
    saver.retry(9, lambda: frozen(9))
    assert saver.saved_step is None
    with pytest.raises(
        TrainingError, match=r"step 9 could not be saved: .*test accuracy 0\.9000, .*are lost; make room, and add X to"
    ):
        check_saved({"global_step": 9, "saved_step": saver.saved_step, **RESULT}, "add X")
    disk.full = False
    saver.retry(9, lambda: frozen(9))
    assert_same(disk.newest(fail), snapshot(9))
    saver.retry(9, lambda: pytest.fail("it has been saved"))
    check_saved({"global_step": 9, "saved_step": saver.saved_step}, "add X")


def test_a_summary_that_cannot_be_written_tells_that_the_weights_are_lost_too(tmp_path: Path) -> None:
    summary = {"global_step": 9, "saved_step": None, **RESULT}
    lost = r"step 9 could not be saved: the weights behind the result \(test accuracy 0.9000, .*\) are lost"
    with pytest.raises(TrainingError, match=rf"\(No such file or directory\), and {lost}; its content would be\n"):
        write_summary(tmp_path / "gone", None, summary)
    with pytest.raises(TrainingError, match=r"\(No such file or directory\); its content would be\n"):
        write_summary(tmp_path / "gone", None, summary | {"saved_step": 9})


def test_the_way_out_of_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from tests.unit.test_saver import RESULT, frozen
from tf2dist.checkpoint.store import Checkpoints, Saver
from tf2dist.launch.host_tasks import check_saved
from tf2dist.messages import ToLauncher
saver = Saver(Checkpoints(Path.cwd()), None, ToLauncher("chief-0", lambda message: print(message.text, flush=True)))
saver.retry(9, lambda: frozen(9))
check_saved({"global_step": 9, "saved_step": None, **RESULT}, "add X")
"""
    command = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", sys.executable, "-c", program]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    said = "step 9 could not be saved (File too large: raise ulimit -f); what was saved before stays\n"
    assert done.stdout == said, done.stderr
    assert "are lost; raise ulimit -f or make room, and add X to go on" in done.stderr


class SlowDisk(Checkpoints):
    """A disk that takes nothing until `may_write` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        assert self.may_write.wait(30.0)
        super()._write(path, snapshot)


def test_the_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """The next one waits for it, whether it is saved for good or in passing."""
    now, sent = [0.0], list[Any]()
    disk = SlowDisk(tmp_path)
    with Saver(disk, 600.0, ToLauncher("chief-0", sent.append), clock=lambda: now[0]) as saver:
        now[0] = 600.0
        saver.save(lambda: frozen(1))
        now[0] = 1200.0
        assert not saver.due(), "training would pause until the disk is done"
        assert sent == []
        disk.may_write.set()
        saver.save(lambda: frozen(2), stopping=True)
        assert sent == [Saved(1, stopping=False, task="chief-0"), Saved(2, stopping=True, task="chief-0")]
        disk.may_write.clear()
        saver.save(lambda: frozen(3))
        threading.Timer(0.2, disk.may_write.set).start()
    assert steps_on(disk) == [1, 2, 3], "the end of the run must wait"
    assert saver.saved_step == 3


@pytest.mark.parametrize("hangs", [False, True])
def test_a_wait_for_the_disk_is_progress_unless_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Whether the run goes on, is being stopped or tries again: the watchdog would take it for stalled."""
    monkeypatch.setattr(store, "WAIT_SECS", 0.02)
    noted, counts = list[None](), list[int]()

    class Slow(Checkpoints):
        def _write(self, path: Path, snapshot: Snapshot) -> None:
            noted.clear()
            if hangs:
                time.sleep(0.4)
            gives_up_at = time.monotonic() + 30.0
            while not hangs and len(noted) < 4 and time.monotonic() < gives_up_at:
                pass
            counts.append(len(noted))
            super()._write(path, snapshot)

    with Saver(Slow(tmp_path), None, NOBODY, progress=lambda: noted.append(None)) as saver:
        saver.save(lambda: frozen(1))
        saver.wait()
        saver.save(lambda: frozen(2), stopping=True)
        saver.retry(3, lambda: frozen(3))
    assert len(counts) == 3
    assert max(counts) <= 2 if hangs else min(counts) >= 4


def test_the_training_goes_on_while_a_snapshot_is_fetched(tmp_path: Path) -> None:
    may_fetch = threading.Event()

    def fetch() -> Snapshot:
        assert may_fetch.wait(30.0)
        return snapshot(1)

    disk = Checkpoints(tmp_path)
    with Saver(disk, None, NOBODY) as saver:
        saver.save(lambda: fetch)
        assert steps_on(disk) == []
        may_fetch.set()
    assert steps_on(disk) == [1]


def test_the_error_that_ends_a_training_is_told_before_one_of_the_writing_thread(tmp_path: Path) -> None:
    def fetch() -> Snapshot:
        raise ZeroDivisionError

    def train() -> None:
        with Saver(Checkpoints(tmp_path), None, NOBODY) as saver:
            saver.save(lambda: fetch)
            raise KeyError

    with pytest.raises(KeyError):
        train()


def test_an_error_of_the_writing_thread_is_no_secret(tmp_path: Path) -> None:
    class Broken(Checkpoints):
        def save(self, *_: Any) -> Path:
            raise ZeroDivisionError

    saver = Saver(Broken(tmp_path), None, NOBODY)
    saver.save(lambda: frozen(1))
    with pytest.raises(ZeroDivisionError):
        saver.wait()


class SmallDisk(Checkpoints):
    """A disk with room for `room` checkpoints."""

    room = 3

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        if len(self.paths()) >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(path, snapshot)


def steps_on(disk: Checkpoints) -> list[int]:
    return [int(path.name[-3:]) for path in disk.paths()]


@pytest.mark.parametrize("stopping", [False, True])
def test_older_checkpoints_are_removed_for_the_last_one(tmp_path: Path, stopping: bool) -> None:
    sent: list[Any] = []
    disk = SmallDisk(tmp_path, keep=5)
    saver = Saver(disk, None, ToLauncher("chief-0", sent.append))
    for step in (1, 2, 3, 4):
        saver.save(lambda: frozen(step))  # noqa: B023
        saver.wait()
    assert steps_on(disk) == [1, 2, 3], "checkpoints were removed before the end of the run"
    sent.clear()
    if stopping:
        saver.save(lambda: frozen(4), stopping=True)
    else:
        saver.retry(4, lambda: frozen(4))
    assert steps_on(disk) == [2, 3, 4]
    text = "step-0000000001 was removed: the disk is full, and the new checkpoint needs its room"
    assert sent == [Warned(text, task="chief-0"), Saved(4, stopping, task="chief-0")]
    assert_same(disk.newest(fail), snapshot(4))


def test_a_disk_without_room_to_freeze_the_run(tmp_path: Path) -> None:
    """Tables are frozen in files."""
    sent: list[Any] = []
    disk = Checkpoints(tmp_path, keep=5)
    saver = Saver(disk, None, ToLauncher("chief-0", sent.append))

    def freeze() -> Frozen:
        if len(disk.paths()) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return frozen(3)

    for step in (1, 2):
        disk.save(snapshot(step))
    saver.save(freeze)
    saver.wait()
    text = "the run could not be saved (No space left on device); what was saved before stays"
    assert sent == [Warned(text, task="chief-0")]
    assert steps_on(disk) == [1, 2]
    saver.save(freeze, stopping=True)
    assert steps_on(disk) == [2, 3]
    assert sent[-1] == Saved(3, stopping=True, task="chief-0")


def test_the_newest_whole_checkpoint_is_never_removed(tmp_path: Path) -> None:
    """If the next checkpoint does not fit even then, it is the only one of the run."""
    disk = SmallDisk(tmp_path, keep=5)
    for step in (1, 2, 3):
        disk.save(snapshot(step))
    (disk.paths()[-1] / "arrays.npz").write_bytes(b"damaged")
    disk = SmallDisk(tmp_path, keep=5)
    disk.room = 0
    with pytest.raises(OSError, match="No space left"):
        disk.save(snapshot(4), lambda text: None)
    assert steps_on(disk) == [2]


def changed(step: int) -> Snapshot:
    before = snapshot(step)
    return replace(before, arrays={name: array + 1 for name, array in before.arrays.items()})


def test_a_step_that_was_saved_is_saved_again_if_it_has_changed(tmp_path: Path) -> None:
    """At the end of a training callbacks may change weights; a full disk delays that, and forgets nothing."""
    sent: list[Any] = []
    disk = Disk(tmp_path)
    disk.full = False
    saver = Saver(disk, None, ToLauncher("chief-0", sent.append))
    saver.save(lambda: frozen(1))
    saver.wait()
    assert saver.saved_arrays(1) is not None
    disk.full = True
    saver.save(lambda: lambda: changed(1), replaces=True)
    assert saver.saved_arrays(1) is None, "what was saved before is not what the run is"
    assert_same(disk.newest(fail), snapshot(1))
    disk.full = False
    saver.retry(1, lambda: lambda: changed(1))
    assert saver.saved_step == 1
    assert_same(disk.newest(fail), changed(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]


def test_saving_by_time_can_be_switched_off(tmp_path: Path) -> None:
    assert not Saver(Checkpoints(tmp_path), None, NOBODY, clock=lambda: 1e9).due()
