"""A process that is killed while it saves leaves whole checkpoints only, once its temporary files are removed."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.unit.test_saving import facts
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.store import Checkpoints

KILLS = 50
SAVE_FOR_EVER = """
import json, sys
from pathlib import Path
import numpy as np
from tf2dist.checkpoint.facts import Facts
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.store import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
newest, facts = checkpoints.newest(print), Facts.of_json(json.loads(sys.argv[2]))
step = newest.step if newest else 0
print("begun", flush=True)
while True:
    step += 1
    arrays = {f"model/{i}": np.full(30_000, step, np.float32) for i in range(5)}
    checkpoints.save(Snapshot(step, arrays, facts))
"""


def secs_of_a_save(folder: Path) -> float:
    start = time.monotonic()
    Checkpoints(folder).save(Snapshot(1, {f"model/{i}": np.full(30_000, 1, np.float32) for i in range(5)}, facts(1)))
    return time.monotonic() - start


def test_fifty_kills(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    generator = random.Random(seed)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    before, left_something = 0, 0
    longest = max(0.05, 4 * secs_of_a_save(tmp_path / "timed"))
    for _ in range(KILLS):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(checkpoints.folder), json.dumps(facts(1).to_json())]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        time.sleep(generator.uniform(0.0, longest))  # the random moment
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        process.stdout.close()
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
        assert len(checkpoints.paths()) <= 3, "one too many only between the saving and the removing"
    assert before > KILLS / 2, "most processes have saved"
    assert left_something > 0, "some kills came in the middle of a save"
