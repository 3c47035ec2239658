"""What Kubernetes would start for rendered manifests, as processes on private hosts: runs, lost and evicted pods."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_slurm import FIT, SCRIPT
from tests.hosts import Hosts, hosts
from tests.pods import Pods, pods_of
from tf2dist import render

SMALL = ("data=digits", "model=softmax", "figure=false", "devices.onednn=false", "train.log_every_steps=20")
# Slow enough for something to happen to it, and saved often.
LONG = ("train.steps=3000", "checkpoint.every_steps=100")
SYNC = ("kubernetes", "mode=sync", "cluster.num_workers=2", *SMALL)
ASYNC = ("jobset", "mode=async", "cluster.num_workers=2", *SMALL)
SMALL_SCRIPT = ("devices.onednn=false", "figure=false", "train.log_every_steps=20", "checkpoint.every_steps=100")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.fixture(scope="module")
def places() -> Iterator[Hosts]:
    with hosts(6) as made:
        yield made


def pods(places: Hosts, folder: Path, *request: str) -> Pods:
    engine, asked = render.read(*render.flags(list(request)))
    return Pods(places, folder, pods_of(engine.render(asked)))


def pods_of_script(places: Hosts, folder: Path, engine: str, mode: str, epochs: int, *options: str) -> Pods:
    (folder / "train.py").write_text(SCRIPT)
    command = ("--command", f"python {folder}/train.py {mode} {epochs}")
    return pods(places, folder, engine, f"mode={mode}", "cluster.num_workers=2", *SMALL_SCRIPT, *options, *command)


def assert_exact(run: Pods, steps: int) -> None:
    """All pods have ended well, and every step has been made once."""
    assert set(run.codes().values()) == {0}, str(run)
    summary = json.loads((run.folder / "runs" / "tf2dist" / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == summary["target_step"] == steps, str(run)
    assert summary["test_examples"] == 360


def wait_for_steps(run: Pods, task: str, more: int = 100) -> None:
    """Waits until the log of a task shows so many steps that it makes from now on."""
    path = run.folder / "runs" / "tf2dist" / "logs" / f"{task}.log"
    begin = path.stat().st_size if path.exists() else 0

    def are_made() -> bool:
        text = path.read_text(errors="replace")[begin:] if path.exists() else ""
        steps = [int(found) for found in re.findall(r"local_step=(\d+)", text)]
        return bool(steps) and steps[-1] - steps[0] >= more

    run.wait(f"{task} makes {more} steps", are_made)


def saved_step(run: Pods, leader: str) -> int:
    found = re.findall(r"saved at step (\d+)", run.running[leader].output)
    assert found, str(run)
    return int(found[-1])


def wait_to_go_on(run: Pods, leader: str, step: int | None = None) -> None:
    words = "going on at step " + (f"{step}\n" if step is not None else "")
    run.wait(words, lambda: words in run.running[leader].output)


def test_sync_pods_train_to_the_end(places: Hosts, tmp_path: Path) -> None:
    run = pods(places, tmp_path, *SYNC, "train.steps=200")
    run.start_all()
    assert_exact(run, 200)
    assert "no job token" not in str(run)


@pytest.mark.slow
def test_sync_pods_one_lost_and_one_evicted(places: Hosts, tmp_path: Path) -> None:
    leader, other = "tf2dist-0", "tf2dist-1"
    run = pods(places, tmp_path, *SYNC, *LONG, "simulate.delay_secs=[0.01,0.01]")
    run.start_all()
    run.wait("a checkpoint", lambda: any(tmp_path.glob("runs/tf2dist/checkpoints/step-*")))
    run.running[other].process.kill()
    codes = run.codes()
    assert codes == {leader: 138, other: 137}, str(run)
    assert run.actions(codes) == {leader: "Count", other: "Count"}
    # Both are made anew, the leader at the address of the pod that is gone, which the name server still has for that.
    run.start(leader, place=1)
    run.start(other, place=3, stale=True)
    words = "waiting for the name of worker-1, tf2dist-1.tf2dist, to lead to another host than this one"
    run.wait("the leader waits", lambda: words in run.running[leader].output)
    run.wait(
        "it waits", lambda: "waiting for this host's own name tf2dist-1.tf2dist to lead" in run.running[other].output
    )
    run.publish(other, place=3)
    wait_to_go_on(run, leader)
    wait_for_steps(run, "worker-0")
    run.running[other].process.terminate()
    codes = run.codes()
    assert codes == {leader: 143, other: 143}, str(run)
    assert run.actions(codes) == {leader: "Ignore", other: "Ignore"}
    saved = saved_step(run, leader)
    run.start_all(first_place=4)
    wait_to_go_on(run, leader, saved)
    assert_exact(run, 3000)


@pytest.mark.slow
def test_async_pods_a_lost_worker_returns_alone_and_an_evicted_ps_stops_all(places: Hosts, tmp_path: Path) -> None:
    chief, ps, worker = "tf2dist-chief-0-0", "tf2dist-ps-0-0", "tf2dist-worker-1-0"
    run = pods(places, tmp_path, *ASYNC, *LONG, "simulate.delay_secs=[0.02,0.02]")
    run.start_all()
    wait_for_steps(run, "worker-1")
    run.running[worker].process.kill()
    assert run.actions(run.codes(worker)) == {worker: "Count"}
    # Its child Job has failed, and the JobSet makes that one anew.
    run.wait("the loss is told", lambda: "worker-1 is gone" in run.running[chief].output)
    run.start(worker, place=4)
    wait_for_steps(run, "worker-1")
    wait_for_steps(run, "worker-0")
    assert "going on at step" not in run.running[chief].output, "nobody else has started again"
    run.running[ps].process.terminate()
    codes = run.codes()
    assert codes == dict.fromkeys(run.pods, 143), str(run)
    assert set(run.actions(codes).values()) == {"Ignore"}
    saved = saved_step(run, chief)
    run.start_all(first_place=2)
    wait_to_go_on(run, chief, saved)
    assert_exact(run, 3000)


@pytest.mark.slow
def test_the_doctor_and_fit_find_the_place_of_a_pod(places: Hosts, tmp_path: Path) -> None:
    run = pods(places, tmp_path, *SYNC)
    program = tmp_path / "program.py"
    program.write_text(FIT.format(folder=tmp_path))
    doctor = ["python", "-m", "tf2dist.doctor", "mode=sync", "cluster=ranks", "data=digits"]
    for command in (doctor, ["python", str(program)]):
        run.pods = {name: pod._replace(command=command) for name, pod in run.pods.items()}
        run.publish("tf2dist-1", place=1)
        run.start_all()
        assert set(run.codes().values()) == {0}, str(run)
        for number in (0, 1):
            output = run.running[f"tf2dist-{number}"].output
            if command == doctor:
                assert f"ok    cluster: 2 worker; this is worker-{number}" in output
                assert f"ok    ports: worker-{number} can listen at tf2dist-{number}.tf2dist:12000" in output
            else:
                assert f"fit: worker-{number} joins 2 workers" in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 10


@pytest.mark.thorough
def test_a_script_of_a_user_trains_in_the_pods(places: Hosts, tmp_path: Path) -> None:
    run = pods_of_script(places, tmp_path, "kubernetes", "sync", 2)
    run.start_all()
    assert set(run.codes().values()) == {0}, str(run)
    assert "steps: 100\n" in run.running["tf2dist-0"].output
    assert "steps: on another host\n" in run.running["tf2dist-1"].output
    summary = json.loads((tmp_path / "runs" / "tf2dist" / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 100
    assert "no job token" not in str(run)


@pytest.mark.slow
def test_a_script_of_a_user_goes_on_after_a_loss_and_an_eviction(places: Hosts, tmp_path: Path) -> None:
    """Its exit codes are those of the command, by which the engine starts it again."""
    leader, other = "tf2dist-0", "tf2dist-1"
    run = pods_of_script(places, tmp_path, "kubernetes", "sync", 40, "simulate.delay_secs=[0.01,0.01]")
    run.start_all()
    run.wait("a checkpoint", lambda: any(tmp_path.glob("runs/tf2dist/checkpoints/step-*")))
    run.running[other].process.kill()
    codes = run.codes()
    assert codes == {leader: 138, other: 137}, str(run)
    assert run.actions(codes) == {leader: "Count", other: "Count"}
    run.start_all(first_place=2)
    wait_to_go_on(run, leader)
    wait_for_steps(run, "worker-0")
    run.running[other].process.terminate()
    codes = run.codes()
    assert codes == {leader: 143, other: 143}, str(run)
    assert run.actions(codes) == {leader: "Ignore", other: "Ignore"}
    run.start_all(first_place=4)
    assert set(run.codes().values()) == {0}, str(run)
    assert "steps: 2000\n" in run.running[leader].output


@pytest.mark.slow
def test_a_worker_of_a_script_leaves_and_comes_back_alone(places: Hosts, tmp_path: Path) -> None:
    chief, worker = "tf2dist-chief-0-0", "tf2dist-worker-1-0"
    delays = ("simulate.delay_secs=[0.02,0.02]", "cluster.num_ps=2")
    run = pods_of_script(places, tmp_path, "jobset", "async", 40, *delays)
    run.start_all()
    wait_for_steps(run, "worker-1")
    run.running[worker].process.terminate()
    assert run.actions(run.codes(worker)) == {worker: "Ignore"}
    run.start(worker, place=5)
    wait_for_steps(run, "worker-1")
    assert set(run.codes().values()) == {0}, str(run)
    assert "steps: 4000\n" in run.running[chief].output
    assert "going on at step" not in run.running[chief].output, "nobody else has started again"


@pytest.mark.slow
def test_a_script_in_another_mode_than_the_job_fails_the_job(places: Hosts, tmp_path: Path) -> None:
    run = pods_of_script(places, tmp_path, "kubernetes", "sync", 1)
    pod = run.pods["tf2dist-0"]
    run.pods["tf2dist-0"] = pod._replace(command=["async" if word == "sync" else word for word in pod.command])
    run.start("tf2dist-0", place=0)
    codes = run.codes()
    assert run.actions(codes) == {"tf2dist-0": "FailJob"}, str(run)
    assert "mode ('async'): the job was requested with mode=sync; give both the same" in str(run)


@pytest.mark.slow
def test_async_pods_train_to_the_end(places: Hosts, tmp_path: Path) -> None:
    run = pods(places, tmp_path, *ASYNC, "train.steps=400")
    run.start_all()
    assert_exact(run, 400)


def test_a_pod_with_wrong_options_fails_the_job(places: Hosts, tmp_path: Path) -> None:
    """One that no schema knows, since the image may have other plugins."""
    run = pods(places, tmp_path, *SYNC, "train.steps=200", "data.dir=/no/such/folder")
    run.start("tf2dist-0", place=0)
    run.publish("tf2dist-1", place=1)
    codes = run.codes()
    assert codes == {"tf2dist-0": 2}, str(run)
    assert run.actions(codes) == {"tf2dist-0": "FailJob"}
