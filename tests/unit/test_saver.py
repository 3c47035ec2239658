"""When to save, and what follows if that fails."""

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_saving import assert_same, fail, snapshot
from tf2dist.errors import TrainingError
from tf2dist.saver import Saver
from tf2dist.saving import Checkpoints
from tf2dist.snapshot import Snapshot
from tf2dist.supervisor import check_saved


class Disk(Checkpoints):
    """A disk that is full for a while."""

    full = True

    def save(self, snapshot: Snapshot) -> Path:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().save(snapshot)


def test_a_full_disk_is_told_and_tried_again(tmp_path: Path) -> None:
    now = [0.0]
    sent: list[dict[str, Any]] = []
    disk = Disk(tmp_path)

    def send(event: dict[str, Any]) -> None:
        sent.append(event)

    saver = Saver(disk, 600.0, send, {"data": "digits"}, clock=lambda: now[0])
    now[0] = 599.0
    assert not saver.due()
    now[0] = 600.0
    assert saver.due()
    saver.save(lambda: snapshot(1))
    assert sent[-1]["event"] == "warning"
    assert "step 1 could not be saved (No space left on device)" in sent[-1]["text"]
    assert not saver.due()
    now[0] += 30.0
    assert saver.due(), "tried again soon"
    disk.full = False
    saver.save(lambda: snapshot(2))
    assert sent[-1] == {"event": "saved", "step": 2, "stopping": False}
    assert not saver.due()
    found = disk.newest(fail)
    assert found
    assert found.facts["data"] == "digits"


def test_the_last_step_is_tried_once_more(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    saver = Saver(disk, None, lambda event: None, {})
    saver.save(lambda: snapshot(9))
    saver.insist(9, lambda: snapshot(9))
    assert saver.saved_step is None
    with pytest.raises(TrainingError, match=r"step 9 could not be saved: .* accuracy of 0.9000 are lost; make room"):
        check_saved({"global_step": 9, "saved_step": saver.saved_step, "test_accuracy": 0.9})
    disk.full = False
    saver.insist(9, lambda: snapshot(9))
    assert_same(disk.newest(fail), snapshot(9))
    saver.insist(9, lambda: pytest.fail("it is saved"))
    check_saved({"global_step": 9, "saved_step": saver.saved_step})


def test_never_by_time(tmp_path: Path) -> None:
    assert not Saver(Checkpoints(tmp_path), None, lambda event: None, {}, clock=lambda: 1e9).due()
