"""The command on separate hosts: cut links, lost hosts, killed tasks, signals, wrong hosts, missing peers."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Hosts, hosts
from tests.jobs import PORT, Job

CUT_SECS = 10.0
ENDLESS = 100_000_000
HASTY = "watchdog_secs=15"  # a task that is silent for 9 seconds is lost
LOST_SECS = 35.0  # from the cut to the last end: 9 of silence, and what the others then wait for causes and hosts
RETRY_SECS = 120.0  # TensorFlow calls a lost host some times more, each for 20 s
STOPPED_SECS = 12.0  # less than what the launchers allow a leader that does not say when to go
KILLED_SECS = 20.0  # a closed connection is seen at once; the other hosts may be slow
ASYNC = ("chief-0", "ps-0", "worker-0", "worker-1")
SYNC = ("worker-0", "worker-1", "worker-2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.fixture(scope="module")
def five() -> Iterator[Hosts]:
    with hosts(5) as machines:
        yield machines


@pytest.fixture
def job(five: Hosts, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs whose hosts are connected again, and whose commands have ended, when the test ends."""
    made: list[Job] = []

    def make(mode: str) -> Job:
        made.append(Job(five, tmp_path, mode, ASYNC if mode == "async" else SYNC))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for place in range(5):
        five.heal(place)


def cut_for_a_while(job: Job, *names: str) -> None:
    """Cuts hosts off for ten seconds; afterwards all go on, and none has reported a loss."""
    for name in names:
        job.hosts.cut(job.names.index(name))
    time.sleep(CUT_SECS)  # the failure itself, not a wait for something
    for name in names:
        job.hosts.heal(job.names.index(name))
    job.wait_for_steps("worker-0", "worker-1")
    for task in job.tasks.values():
        assert task.process.poll() is None, str(job)
        assert "is gone" not in task.stderr, str(job)


def refused(job: Job, says: str, name: str, place: int, *options: str, **cluster: Any) -> None:
    """A command with wrong options, in addition to those of the job, ends with code 2 and says why."""
    started = job.start_one(name, place, *options, **cluster)
    assert job.code(started) == 2, str(started)
    assert re.search(says, started.stderr.splitlines()[-1]), str(started)


def test_async_wrong_hosts_cut_links_a_stop(job: Callable[[str], Job]) -> None:
    run = job("async")
    a, c, d = (run.hosts[place].address for place in (0, 2, 3))
    endless = f"train.steps={ENDLESS}"
    # While the others wait for it, the last host has first another option, then another order.
    run.start(endless, order=("worker-0", "ps-0", "chief-0"))
    run.wait(lambda: "starting TensorFlow" in run.leader.stderr, "the leader listens")
    refused(run, r"train.steps: 100000000 at chief-0, 7 here", "worker-1", 3, "train.steps=7")
    swapped = {**run.addresses, "worker": [f"{d}:{PORT}", f"{c}:{PORT}"]}
    refused(run, rf"cluster.worker: \[{c}.* at chief-0, \[{d}.* here", "worker-0", 3, endless, **swapped)
    refused(run, rf"worker 0 \({c}:{PORT}\): is not an address of this host", "worker-0", 3, endless)
    run.start(endless, order=("worker-1",))
    run.wait_for_steps("worker-0", "worker-1")
    # A fifth host claims to be a task that is there, then to be a second coordinator.
    holder = f"worker 1 is already held by host host3 pid {run.tasks['worker-1'].process.pid}"
    refused(run, holder, "worker-1", 4, endless, "cluster.check_address=false")
    second = {**run.addresses, "chief": [f"{run.hosts[4].address}:{PORT}"]}
    held = rf"held by .*chief-0 at {a}:{PORT}, host host0 pid {run.leader.process.pid}; a second coordinator"
    refused(run, held, "chief-0", 4, endless, **second)
    cut_for_a_while(run, "ps-0", "worker-1")
    # A stop of one is a stop of all.
    run.tasks["worker-0"].process.terminate()
    run.assert_codes(143, says="stopped by SIGTERM")
    assert run.saved_step() > 400, str(run)


def test_sync_wrong_hosts_cut_links_stops(job: Callable[[str], Job]) -> None:
    run = job("sync")
    endless = f"train.steps={ENDLESS}"
    run.start(endless, order=("worker-1", "worker-0"))
    run.wait(lambda: "starting TensorFlow" in run.leader.stderr, "the leader listens")
    a, b, c = (run.hosts[place].address for place in range(3))
    swapped = {"worker": [f"{a}:{PORT}", f"{c}:{PORT}", f"{b}:{PORT}"]}
    refused(run, rf"cluster.worker: \[{a}:{PORT}, {b}.* at worker-0, .* here", "worker-1", 2, endless, **swapped)
    run.start(endless, order=("worker-2",))
    run.wait_for_steps("worker-0")
    holder = f"worker 2 is already held by host host2 pid {run.tasks['worker-2'].process.pid}"
    refused(run, holder, "worker-2", 4, endless, "cluster.check_address=false")
    cut_for_a_while(run, "worker-1")
    run.tasks["worker-2"].process.terminate()
    run.assert_codes(143, says="stopped by SIGTERM")
    # Lost for good, killed, stopped once more: the same command goes on each time.
    saved = run.saved_step()
    run.start(endless, HASTY)
    run.wait_for_steps("worker-0", more=50)
    run.hosts.cut(2)
    run.assert_codes(138, "worker-0", "worker-1", says="worker-2: is gone (silent for", timeout_secs=LOST_SECS)
    run.assert_codes(139, "worker-2", says="worker-0: is gone (silent for", timeout_secs=LOST_SECS)
    run.hosts.heal(2)
    assert f"going on at step {saved}" in run.leader.stderr, str(run)
    run.start(endless, HASTY)
    run.wait_for_steps("worker-0", more=50)
    run.tasks["worker-1"].process.kill()
    run.assert_codes(138, "worker-0", "worker-2", says="worker-1: is gone (the connection", timeout_secs=KILLED_SECS)
    run.start(f"train.steps={saved + 100}", HASTY)
    run.assert_codes(0)
    run.summary(saved + 100)


def test_async_losses(job: Callable[[str], Job]) -> None:
    run = job("async")
    options = (f"train.steps={ENDLESS}", HASTY, "checkpoint.every_steps=500")
    # A worker that is killed: the others go on, and it takes part again.
    run.start(*options)
    run.wait_for_steps("worker-0", "worker-1")
    run.tasks["worker-1"].process.kill()
    run.wait(lambda: "warning: worker-1 is gone" in run.leader.stderr, "the loss is told")
    run.wait_for_steps("worker-0")
    run.start(*options, order=("worker-1",))
    run.wait_for_steps("worker-1", "worker-0")
    # The coordinator: nobody goes on without it.
    run.leader.process.kill()
    others = ("ps-0", "worker-0", "worker-1")
    run.assert_codes(139, *others, says="chief-0: is gone", timeout_secs=KILLED_SECS)
    # A ps.
    run.start(*options)
    run.wait_for_steps("worker-0", "worker-1")
    assert "going on at step" in run.leader.stderr, str(run)
    run.tasks["ps-0"].process.kill()
    others = ("chief-0", "worker-0", "worker-1")
    run.assert_codes(138, *others, says="ps-0: is gone", timeout_secs=KILLED_SECS)


def test_async_hosts_cut_off_for_good(job: Callable[[str], Job]) -> None:
    run = job("async")
    options = (HASTY, "checkpoint.every_steps=500")
    # A ps takes the job with it.
    run.start(f"train.steps={ENDLESS}", *options)
    run.wait_for_steps("worker-0", "worker-1")
    run.hosts.cut(1)
    others = ("chief-0", "worker-0", "worker-1")
    run.assert_codes(138, *others, says="ps-0: is gone (silent for", timeout_secs=LOST_SECS)
    run.assert_codes(139, "ps-0", says="chief-0: is gone (silent for", timeout_secs=LOST_SECS)
    run.hosts.heal(1)
    # Without a worker it goes on to the end, though the coordinator waits for a call in which the worker is.
    step = int(re.findall(r"global_step=(\d+)", run.tasks["worker-0"].log)[-1])
    target = step + 3_000
    run.start(f"train.steps={target}", *options)
    run.wait(lambda: run.tasks["worker-0"].steps and run.tasks["worker-1"].steps, "both begin")
    run.hosts.cut(3)
    run.assert_codes(139, "worker-1", says="chief-0: is gone (silent for", timeout_secs=LOST_SECS)
    run.assert_codes(0, "chief-0", "ps-0", "worker-0", timeout_secs=RETRY_SECS)
    assert "warning: worker-1 is gone (silent for" in run.leader.stderr, str(run)
    run.summary(target)


@pytest.mark.parametrize(("name", "signum"), [("chief-0", signal.SIGTERM), ("ps-0", signal.SIGTERM)])
def test_async_stops(job: Callable[[str], Job], name: str, signum: signal.Signals) -> None:
    run = job("async")
    run.start(f"train.steps={ENDLESS}")
    run.wait_for_steps("worker-0", more=50)
    run.tasks[name].process.send_signal(signum)
    run.assert_codes(128 + signum, timeout_secs=STOPPED_SECS)
    assert run.saved_step() > 0


def test_peers_that_never_come(job: Callable[[str], Job]) -> None:
    run = job("async")
    run.addresses["worker"] = [f"{run.hosts[2].address}:{PORT}", "10.77.0.99:2222", "no-such-host.invalid:2222"]
    run.start("train.steps=1", "startup_timeout_secs=12", order=("chief-0", "ps-0"))
    run.wait(lambda: "waiting for" in run.leader.stderr, "who is waited for")
    run.assert_codes(138, "chief-0", "ps-0", timeout_secs=25)
    assert len(re.findall("^waiting for", run.leader.stderr, re.MULTILINE)) >= 2
    for text in (run.leader.stderr.splitlines()[-1], run.tasks["ps-0"].stderr.splitlines()[-1]):
        assert "worker-0 at 10.77.0.3:2222 (connection refused" in text, str(run)
        assert "worker-1 at 10.77.0.99:2222 (No route to host" in text, str(run)
        assert "worker-2 at no-such-host.invalid:2222 (name unknown" in text, str(run)
    for signum in (signal.SIGTERM, signal.SIGINT):
        run.start("train.steps=1", order=("chief-0", "ps-0"))
        run.wait(lambda: "waiting for" in run.tasks["ps-0"].stderr, "who is waited for")
        run.tasks["ps-0"].process.send_signal(signum)
        run.assert_codes(128 + signum, "ps-0", "chief-0", timeout_secs=10)
