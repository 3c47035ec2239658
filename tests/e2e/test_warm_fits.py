"""Later calls of `tf2dist.fit` in a process, which need no import: they are as the first one, but begin sooner."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import slowness

# `leave` changes whatever a process has one of, in the tasks of the second call alone.
PROGRAM = """
import json, os, pathlib, sys, threading, time
import keras, numpy as np, psutil
import tf2dist

caller, folder = os.getpid(), pathlib.Path(sys.argv[1]).absolute()
rng = np.random.default_rng(0)
x = rng.normal(size=(240, 3)).astype("float32")

def of_process():
    import matplotlib
    return [os.environ.get("LEFT"), keras.mixed_precision.global_policy().name, keras.config.floatx(),
            matplotlib.get_backend(), [each.name for each in threading.enumerate() if "left" in each.name],
            "left" in sys.modules]

def leave():
    import matplotlib
    os.environ["LEFT"] = "1"
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    matplotlib.use("svg")
    sys.modules["left"] = os
    threading.Thread(target=time.sleep, args=(60,), name="left", daemon=True).start()

def build(number):
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([3]), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    if os.getpid() != caller:
        (folder / f"{number}-{os.getpid()}.json").write_text(json.dumps(of_process()))
        if number == 1:
            leave()
            (folder / f"left-{os.getpid()}.json").write_text(json.dumps(of_process()))
    return model

def train(number, mode):
    began = time.time()
    result = tf2dist.fit(lambda: build(number), x, x.sum(1), batch_size=20, epochs=2, seed=5, verbose=0,
                         mode=mode, cluster=tf2dist.Local(workers=1 if mode == "async" else 2), shuffle=True)
    first = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    return [first["time"] - began, [weight.tolist() for weight in result.model.get_weights()]]

def warm():
    return [each.pid for each in psutil.Process().children()]

first = train(0, sys.argv[2])
pids = warm()
train(1, sys.argv[2])
third = train(2, sys.argv[2])
print(json.dumps([first, third, warm() == pids, len(pids)]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_later_call_begins_sooner_and_gives_the_same(tmp_path: Path, mode: str) -> None:
    """Nothing of what the tasks of the second one have changed in their process is there in the third."""
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "found").mkdir()
    done = subprocess.run(
        [sys.executable, "script.py", "found", mode],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120 * slowness(),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    (cold_secs, cold), (warm_secs, warm), stayed, num_warm = json.loads(done.stdout.splitlines()[-1])
    assert warm == cold, "the same seed gives the same weights"
    assert stayed
    assert num_warm == 1
    assert warm_secs < cold_secs
    found: dict[str, set[str]] = {}
    for path in (tmp_path / "found").iterdir():
        found.setdefault(path.name.partition("-")[0], set()).add(path.read_text())
    assert found["0"] == found["2"]
    assert len(found["0"]) == 1
    assert not found["0"] & found["left"], "the second call did change its processes"


TEN_CALLS = """
import gc, json, os, pathlib, sys
import keras, numpy as np, psutil
import tf2dist

x = np.random.default_rng(0).normal(size=(240, 3)).astype("float32")

def build():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

def held():
    gc.collect()
    own = psutil.Process()
    (warm,) = own.children()
    files = [sorted(os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.exists())]
    return [own.memory_info().rss, *([p.num_fds(), p.num_threads(), len(p.children(True))] for p in (own, warm)), files]

for number in range(11):
    tf2dist.fit(build, x, x.sum(1), batch_size=20, verbose=0, mode=sys.argv[1], cluster=tf2dist.Local(workers=2))
    if number == 0:
        first = held()
print(json.dumps([first, held()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_ten_more_calls_leave_nothing_behind(tmp_path: Path, mode: str) -> None:
    (tmp_path / "script.py").write_text(TEN_CALLS)
    before = set(Path("/dev/shm").iterdir()) | set(Path("/tmp").iterdir())
    command = [sys.executable, "script.py", mode]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200 * slowness())
    assert done.returncode == 0, done.stderr
    (first_bytes, *first), (last_bytes, *last) = json.loads(done.stdout.splitlines()[-1])
    assert first == last
    assert last_bytes - first_bytes < 20e6
    assert set(Path("/dev/shm").iterdir()) | set(Path("/tmp").iterdir()) <= before
