"""A process that is killed while it saves leaves whole checkpoints only, once its temporary files are removed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_saving import facts
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.store import Checkpoints

KILLS = 50
# For each line of its input a new process saves checkpoints without end. Only the first pays for the imports.
SAVE_FOR_EVER = """
import json, os, sys
from pathlib import Path
import numpy as np
from tf2dist.checkpoint.snapshot import Facts
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.store import Checkpoints

def save_for_ever():
    checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
    newest, facts = checkpoints.newest(print), Facts.of_json(json.loads(sys.argv[2]))
    step = newest.step if newest else 0
    print(os.getpid(), flush=True)
    while True:
        step += 1
        arrays = {f"model/{i}": np.full(30_000, step, np.float32) for i in range(5)}
        checkpoints.save(Snapshot(step, arrays, facts))

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        save_for_ever()
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.fixture
def saving(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Starts processes that save; ends them all, even if the test fails."""
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path / "checkpoints"), json.dumps(facts(1).to_json())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
    ) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def secs_of_a_save(folder: Path) -> float:
    start = time.monotonic()
    Checkpoints(folder).save(Snapshot(1, {f"model/{i}": np.full(30_000, 1, np.float32) for i in range(5)}, facts(1)))
    return time.monotonic() - start


def test_fifty_kills(tmp_path: Path, saving: "subprocess.Popen[str]") -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    generator = random.Random(seed)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    before, left_something, most = 0, 0, 0
    assert saving.stdin
    assert saving.stdout
    longest = max(0.05, 4 * secs_of_a_save(tmp_path / "timed"))
    for _ in range(KILLS):
        saving.stdin.write("another\n")
        pid = int(saving.stdout.readline())
        time.sleep(generator.uniform(0.0, longest))  # the random moment
        os.kill(pid, signal.SIGKILL)
        assert saving.stdout.readline() == "ended\n"
        damaged: list[str] = []
        newest = checkpoints.newest(damaged.append)
        assert not damaged
        assert (newest.step if newest else 0) >= before
        if newest:
            before = newest.step
            assert all((array == newest.step).all() for array in newest.arrays.values())
        left_something += len(list(checkpoints.folder.glob(".part-*"))) > 0
        checkpoints.clean()
        assert {path.name for path in checkpoints.folder.glob("*")} <= {path.name for path in checkpoints.paths()}
        # Killed between the saving and the removing, a process leaves one more than it found; the next may do so again.
        most = max(most, 2) + 1
        assert len(checkpoints.paths()) <= most
        most = len(checkpoints.paths())
    assert before > KILLS / 2, "most processes have saved"
    assert left_something > 0, "some kills came in the middle of a save"
    checkpoints.save(Snapshot(before + 1, {"model/0": np.zeros(3, np.float32)}, facts(1)))
    assert len(checkpoints.paths()) == 2, "whoever is not killed removes all that are too many"
