"""Where `tf2dist.fit` is called from: a script, a notebook, many hosts; and how it is stopped there."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ports_of_tasks, slowness
from tf2dist.signals import name_of

QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
BEGIN = """
import sys
import keras, numpy as np, tensorflow as tf
import tf2dist

tf.constant(1) + 1  # TensorFlow is in use
units = 4
x = np.random.default_rng(0).normal(size=(120, 3))

def build():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

given = dict(batch_size=20, verbose=0, cluster=tf2dist.Local(workers=2, ps=1))
"""
# Waits in each epoch, and tells of the first.
SLOWLY = """
import time, pathlib
class Slowly(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pathlib.Path("trained").touch()
        time.sleep(0.2)
"""


def start(folder: Path, code: str, **environment: str) -> "subprocess.Popen[str]":
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**QUIET, **environment},
    )


def wait_for(path: Path, process: "subprocess.Popen[str]", secs: float = 90.0) -> None:
    deadline = time.monotonic() + secs
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_script_without_a_guard_in_both_modes_after_each_other(tmp_path: Path) -> None:
    code = """
for mode in ("async", "sync"):
    result = tf2dist.fit(build, x, x.sum(1), epochs=2, mode=mode, **given)
    print(len(result.history["loss"]), result.summary["mode"], result.run_dir.parent.name, result.model.name)
"""
    process = start(tmp_path, BEGIN + code)
    out, err = process.communicate(timeout=110 * slowness())
    assert process.returncode == 0, err
    assert out.splitlines() == ["2 async outputs sequential", "2 sync outputs sequential"]
    assert len(list((tmp_path / "outputs").glob("*/model.keras"))) == 2


@pytest.mark.slow
def test_what_is_shown(tmp_path: Path) -> None:
    code = """
import contextlib, io, json
for verbose in (0, 1, 2):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        early = keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1)
        more = {"validation_split": 0.2, "callbacks": [early], "verbose": verbose}
        tf2dist.fit(build, x, x.sum(1), epochs=4, **{**given, **more})
    lines = [line for line in err.getvalue().splitlines() if "warning: " not in line]
    print(json.dumps([out.getvalue().splitlines(), lines]))
"""
    process = start(tmp_path, BEGIN + code)
    out, err = process.communicate(timeout=110 * slowness())
    assert process.returncode == 0, err
    silent, progress, lines = map(json.loads, out.splitlines())
    assert silent == [[], []]
    assert progress[0] == []
    first = ["fit: starting 2 workers and 1 ps", "a step is one worker's batch of 20 examples", "starting TensorFlow"]
    assert progress[1][:3] == first
    epochs = [line.partition(":")[0] for line in progress[1][:-3] if "val" in line]
    assert epochs == ["epoch 1/4", "epoch 2/4"], "each is told once"
    assert "EarlyStopping ended the run in epoch 2 of 4" in progress[1]
    last = progress[1][-4]
    assert last.startswith("step 10/10  loss "), "the run ends here, so nothing is left"
    (rate,) = re.findall(r" ([\d.,]+) steps/s", last)
    assert f", 10 steps at {rate}/s (" in progress[1][-3]
    assert Path(progress[1][-1]).parent == tmp_path / "outputs"
    assert lines[1][:2] == first[:2]
    assert ", 10 steps at " in lines[1][-3]
    assert Path(lines[1][-1]).parent == tmp_path / "outputs"
    assert not [line for line in lines[1] if line.startswith(("step ", "starting ", "epoch "))]
    assert lines[0][0] == "Epoch 1/4"
    assert lines[0][1].startswith("5/5 - ")
    assert " - loss: " in lines[0][1]


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_the_cluster_and_the_call_that_it_names_goes_on(signum: signal.Signals, tmp_path: Path) -> None:
    code = """
sys.stderr = sys.stdout
model = build()
try:
    tf2dist.fit(model, x, x.sum(1), epochs=10_000, callbacks=[Slowly()], **given)
except (KeyboardInterrupt, SystemExit) as error:
    print(error, flush=True)
import psutil
(warm,) = psutil.Process().children()
print([each.name() for each in warm.children(recursive=True)])
(run_dir,) = pathlib.Path("outputs").iterdir()
saved = tf2dist.load_model(run_dir)
print([np.array_equal(here, there) for here, there in zip(model.get_weights(), saved.get_weights())])
result = tf2dist.fit(build, x, x.sum(1), epochs=3, run_dir=run_dir, **given)
print(result.summary["global_step"] >= 6)
"""
    process = start(tmp_path, BEGIN + SLOWLY + code)
    wait_for(tmp_path / "trained", process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=110 * slowness())
    assert process.returncode == 0, err
    told, *codes, left, is_as_saved, goes_on = out.splitlines()
    assert told.startswith(f"tf2dist: stopped by {name_of(signum)}; saved at step ")
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert told.endswith(f'; add run_dir="{run_dir}" to go on')
    assert codes == (["143"] if signum == signal.SIGTERM else [])
    assert left == "[]"
    assert is_as_saved == str(4 * [True]), "the model is not as the run was saved"
    assert goes_on == "True"


@pytest.mark.thorough
def test_threads_of_a_program_train_side_by_side_and_are_saved_when_it_is_interrupted(tmp_path: Path) -> None:
    code = """
import threading
model = build()

def train(model, epochs, *callbacks):
    result = tf2dist.fit(model, x, x.sum(1), epochs=epochs, callbacks=list(callbacks), **given)
    print(result.summary["global_step"], flush=True)

given["cluster"] = tf2dist.Local(workers=1)

short = threading.Thread(target=train, args=(model, 2))
long = threading.Thread(target=train, args=(build, 10_000, Slowly()))
short.start()
long.start()
predictions = tf2dist.predict(build, x, verbose=0, cluster=given["cluster"])
print(len(predictions), flush=True)
short.join()
pathlib.Path("joined").touch()
long.join()
"""
    process = start(tmp_path, BEGIN + SLOWLY + code)
    wait_for(tmp_path / "joined", process)
    wait_for(tmp_path / "trained", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=110)
    assert sorted(out.split()) == ["12", "120"]
    assert process.returncode == -signal.SIGINT
    assert re.search(r"\ntf2dist: stopped by Ctrl-C; saved at step \d+; add run_dir=.*-build\" to go on\n", err)


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run(tmp_path: Path) -> None:
    code = """
class Mine(Exception):
    pass

def fail(epoch, logs):
    raise Mine("of my own")

try:
    tf2dist.fit(build, x, x.sum(1), epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)], **given)
except Mine as error:
    print(error)
import psutil
tf2dist.end_warm_process()
print([each.name() for each in psutil.Process().children(recursive=True)])
"""
    process = start(tmp_path, BEGIN + code)
    out, err = process.communicate(timeout=110 * slowness())
    assert process.returncode == 0, err
    assert out.splitlines() == ["of my own", "[]"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_lost_worker_is_started_again_while_callbacks_follow(mode: str, tmp_path: Path) -> None:
    code = f"""
import os, signal, psutil
class Kill(keras.callbacks.Callback):
    killed = None
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and not self.killed:
            (warm,) = psutil.Process().children()
            (server,) = warm.children()
            self.killed = server.children()[-1].pid  # the tasks are started in the order of their names
            os.kill(self.killed, signal.SIGKILL)

kill = Kill()
result = tf2dist.fit(build, x, x.sum(1), epochs=6, mode={mode!r}, callbacks=[kill],
                     options=["checkpoint.every_steps=3"], **given)
print(kill.killed is not None, result.history["loss"].__len__(), result.summary["restarts"])
"""
    process = start(tmp_path, BEGIN + code)
    out, err = process.communicate(timeout=110 * slowness())
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "True 6 1"


@pytest.mark.slow
def test_many_hosts_run_the_same_script(tmp_path: Path) -> None:
    ports = ports_of_tasks(2)
    code = """
import os
result = tf2dist.fit(build, x, x.sum(1), epochs=2, mode="sync", batch_size=20, verbose=0, run_dir="run",
                     options={"startup_timeout_secs": 60})
try:
    print(result.model.name, len(result.history["loss"]))
except tf2dist.TfDistError as error:
    print(error)
"""
    processes = hosts(tmp_path, ports, [BEGIN + code] * 2)
    outs = [process.communicate(timeout=110 * slowness()) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    assert outs[0][0] == "sequential 2\n"
    assert outs[1][0].startswith(f"the model is not on this host: worker-0 at localhost:{ports[0]} has it")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_on_all_hosts(tmp_path: Path) -> None:
    code = """
def explode():
    model = build()
    model.optimizer.learning_rate = 1e30
    return model

result = tf2dist.fit(explode, x, x.sum(1), epochs=2, mode="sync", batch_size=20, verbose=0, run_dir="run",
                     callbacks=[keras.callbacks.TerminateOnNaN()], options={"startup_timeout_secs": 60})
print(result.summary)
"""
    processes = hosts(tmp_path, ports_of_tasks(2), [BEGIN + code] * 2)
    outs = [process.communicate(timeout=110 * slowness()) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    assert [out.splitlines()[-1] for out, _ in outs] == ["{}"] * 2


@pytest.mark.slow
def test_hosts_with_other_data_refuse_each_other(tmp_path: Path) -> None:
    code = 'tf2dist.fit(build, x[{}:], x[{}:].sum(1), mode="sync", batch_size=20, verbose=0, run_dir="run")'
    processes = hosts(tmp_path, ports_of_tasks(2), [BEGIN + code.format(n, n) for n in (0, 1)])
    outs = [process.communicate(timeout=110 * slowness())[1] for process in processes]
    assert all(process.returncode for process in processes)
    assert any("fit.train: 120 of" in text and "119 of" in text for text in outs), outs


def hosts(folder: Path, ports: list[int], codes: list[str]) -> list["subprocess.Popen[str]"]:
    addresses = [f"localhost:{port}" for port in ports]
    results = []
    for index, code in enumerate(codes):
        place = folder / str(index)
        place.mkdir()
        task = {"type": "worker", "index": index}
        results.append(start(place, code, TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": task})))
    return results


@pytest.mark.slow
def test_a_notebook_is_executed_and_survives_an_interrupt(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        BEGIN + SLOWLY,
        "result = tf2dist.fit(build, x, x.sum(1), epochs=2, **{**given, 'verbose': 1}); result.history",
        """
try:
    tf2dist.fit(build, x, x.sum(1), epochs=10_000, callbacks=[Slowly()], **given)
except KeyboardInterrupt as error:
    print("interrupted", error)
""",
        "print(tf2dist.fit(build, x, x.sum(1), mode='sync', **given).summary['mode'])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=int(100 * slowness()), resources={"metadata": {"path": str(tmp_path)}}
    )

    def interrupt() -> None:
        deadline = time.monotonic() + 100
        while not (tmp_path / "trained").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    client.execute()

    def text_of(cell: Any) -> str:
        return "".join(str(output.get("text") or output.get("data", {}).get("text/plain")) for output in cell.outputs)

    _, trained, stopped, again = map(text_of, notebook.cells)
    assert "epoch 2/2, loss " in trained, "what the run tells stands below the cell"
    (page,) = (
        output.data["text/html"] for output in notebook.cells[1].outputs if "text/html" in output.get("data", {})
    )
    assert '<progress value="12" max="12"' in page
    assert page.count("<tr>") == 3
    assert "━━━━━━━━━━ step 12/12  loss " in trained
    assert not [output for output in notebook.cells[1].outputs if output.get("name") == "stderr"], "nothing is red"
    assert "'loss': [" in trained
    assert "interrupted tf2dist: stopped by Ctrl-C; saved at step" in stopped
    assert again.strip().endswith("sync")
