"""Which tasks meet, which are missing, and which are refused."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.process.participants import ASYNC, WAIT_SECS, Meetings, Participant, all_of, claimant, cluster_of, wait_for
from tf2dist.cluster.addresses import control_address
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ClusterError, ConfigError, LeaderLostError, TaskLostError
from tf2dist.hosts.connections import MAX_MESSAGE_BYTES, VERSION
from tf2dist.hosts.protocol import Ended
from tf2dist.launch.console import Console
from tf2dist.launch.single_run import check_place
from tf2dist.linux import unused_ports


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("mode", "counts"), [("sync", {"worker": 3}), ("async", ASYNC)], ids=["sync", "async"])
def test_all_meet_in_any_order(enter: Meetings, mode: str, counts: dict[str, int], order: int) -> None:
    cluster = cluster_of(mode, **counts)
    participants: list[Participant] = []
    for task in cluster.tasks[::order]:
        assert not any(participant.joined.done() for participant in participants)
        participants.append(enter(cluster, str(task)))
    for participant in participants:
        participant.go()
    assert not any(participant.events() for participant in participants)


def test_a_cluster_of_one_task(enter: Meetings) -> None:
    enter(cluster_of(worker=1), "worker-0").go()


def test_an_evaluator_may_join_late(enter: Meetings) -> None:
    cluster = cluster_of(worker=1, evaluator=1)
    leader = enter(cluster, "worker-0").go()
    enter(cluster, "evaluator-0").go().leave()
    assert leader.event(Ended, "evaluator-0").code == 0


def test_a_missing_follower_is_named_to_all(enter: Meetings) -> None:
    cluster = cluster_of(worker=3)
    leader, other = enter(cluster, "worker-0", timeout_secs=3), enter(cluster, "worker-1")
    for participant in (leader, other):
        assert isinstance(participant.error(), TaskLostError)
        text = str(participant.error())
        assert f"worker-2 at {cluster.jobs['worker'][2]} (connection refused, control port " in text
        assert "worker-1 at" not in text


def test_a_missing_leader_is_named_while_waiting(enter: Meetings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf2dist.cluster.reachability.LINE_EVERY_SECS", 0.3)
    participant = enter(cluster_of(worker=2), "worker-1", timeout_secs=1)
    assert isinstance(participant.error(), LeaderLostError)
    assert "still waiting for worker-0 at localhost:" in str(participant.error())
    assert participant.printed[-1].startswith("waiting for worker-0 at localhost:")
    assert "connection refused" in participant.printed[-1]


def test_a_name_that_nobody_knows(enter: Meetings) -> None:
    (port,) = unused_ports(1)
    cluster = Cluster("sync", {"worker": ("no-such-host.invalid:2222", f"localhost:{port}")})
    assert "name unknown" in str(enter(cluster, "worker-1", timeout_secs=3).error())


def test_a_leader_that_accepts_and_sends_nothing(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    with socket.create_server(control_address(cluster.jobs["worker"][0])):
        participant = enter(cluster, "worker-1", timeout_secs=6)
        assert "(no answer" in str(participant.error())


def test_another_program_at_the_port(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    with socket.create_server(control_address(cluster.jobs["worker"][0])) as server:
        participant = enter(cluster, "worker-1", timeout_secs=1.5)
        with server.accept()[0] as line:
            line.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: something else\r\n\r\n")
            wait_for(lambda: "another program answers" in participant.meeting._role.waiting_for)
    assert isinstance(participant.error(), TaskLostError)


def test_a_signal_to_one_process_ends_the_wait_of_all(enter: Meetings) -> None:
    cluster = cluster_of(worker=4)
    participants = [enter(cluster, f"worker-{index}") for index in range(3)]
    wait_for(lambda: "worker-1" not in participants[0].meeting._role.waiting_for)
    wait_for(lambda: "worker-2" not in participants[0].meeting._role.waiting_for)
    participants[2].signum = 15
    assert [participant.error().exit_code for participant in participants] == [143, 143, 143]


VERSIONS: dict[str, Any] = {"versions": {"keras": "3.15.1"}, "config": {"seed": 0, "train": {"steps": 5}}}
OTHER: dict[str, Any] = {"versions": {"keras": "3.14.0"}, "config": {"seed": 0, "train": {"steps": 6}}}


def test_a_difference_is_shown_and_can_be_corrected(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    leader = enter(cluster, "worker-0", **VERSIONS)
    wrong = enter(cluster, "worker-1", **OTHER)
    assert isinstance(wrong.error(), ClusterError)
    assert "train.steps: 5 at worker-0, 6 here; versions.keras: 3.15.1 at worker-0, 3.14.0 here" in str(wrong.error())
    wait_for(lambda: any("versions.keras: 3.15.1 here, 3.14.0 there" in line for line in leader.printed))
    assert "was refused before: train.steps" in wait_for(
        lambda: "refused before" in leader.meeting._role.waiting_for and leader.meeting._role.waiting_for
    )
    enter(cluster, "worker-1", **VERSIONS).go()
    leader.go()


def test_a_configuration_that_does_not_fit_into_a_message() -> None:
    config, cluster = RunConfig(model={"name": "x" * MAX_MESSAGE_BYTES}), cluster_of(worker=2)
    with pytest.raises(ConfigError, match=r"the configuration, with its host list, has 1,.*: at most 524,288"):
        check_place(config, cluster, Task("worker", 1), Console())


def test_a_refused_task_is_named_at_the_timeout(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    leader = enter(cluster, "worker-0", **VERSIONS, timeout_secs=3)
    enter(cluster, "worker-1", **OTHER).error()
    assert isinstance(leader.error(), TaskLostError)
    assert "versions.keras: 3.15.1 here, 3.14.0 there" in str(leader.error())


NEWER = """
import json
from tf2dist.hosts import connections
connections.VERSION, connections.GREETING = 99, connections.NAME + bytes([99])
from tests.process.meet import main
main()
"""


def newer(cluster: Cluster, task: str) -> subprocess.Popen[str]:
    """A process of a later version that holds the task, or wants to."""
    request = {
        "mode": cluster.mode,
        "jobs": cluster.jobs,
        "task": (task[:-2], int(task[-1])),
        "timeout_secs": WAIT_SECS,
    }
    return subprocess.Popen(
        [sys.executable, "-c", NEWER, json.dumps(request)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def test_another_version_is_reported_on_both_sides(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    leader = enter(cluster, "worker-0")
    with newer(cluster, "worker-1") as process:
        said = process.communicate(timeout=WAIT_SECS)[0]
    assert process.returncode == 2
    text = f"worker-0 at {cluster.jobs['worker'][0]} cannot take worker-1: another version of tf2dist: protocol"
    assert f'"type":"Failed","code":2,"text":"{text} {VERSION}, here 99"' in said
    there = f"another version of tf2dist: protocol 99, here {VERSION}"
    wait_for(lambda: f"refused a connection from 127.0.0.1: {there}" in leader.printed)
    enter(cluster, "worker-1").go()
    leader.go()


def test_a_leader_of_another_version(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    participant = enter(cluster, "worker-1")
    with newer(cluster, "worker-0") as process:
        there = f"another version of tf2dist: protocol 99, here {VERSION}"
        assert isinstance(participant.error(), ClusterError)
        assert str(participant.error()).endswith(f"cannot take worker-1: {there}")
        line = f"refused a connection from 127.0.0.1: another version of tf2dist: protocol {VERSION}, here 99"
        assert any(line in said for said in process.stdout or ())
        process.kill()


def test_a_leader_learns_that_a_missing_task_has_another_version(enter: Meetings) -> None:
    cluster = cluster_of(worker=3)
    with newer(Cluster("sync", {"worker": cluster.jobs["worker"][::-1]}), "worker-1") as process:
        leader = enter(cluster, "worker-0")
        wait_for(lambda: f"(another version of tf2dist: protocol 99, here {VERSION}" in leader.waiting_for)
        process.kill()


def test_two_processes_that_both_claim_to_lead(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    turned = Cluster("sync", {"worker": cluster.jobs["worker"][::-1]})
    for error in [participant.error() for participant in (enter(cluster, "worker-0"), enter(turned, "worker-0"))]:
        assert isinstance(error, ClusterError)
        assert "cluster.worker: [localhost:" in str(error)


def test_a_list_with_another_leader(enter: Meetings) -> None:
    """Host 2 takes host 1 for the leader; host 1 refuses it and goes on."""
    cluster = cluster_of(worker=3)
    a, b, c = cluster.jobs["worker"]
    one, zero = enter(cluster, "worker-1"), enter(cluster, "worker-0")
    wrong = enter(Cluster("sync", {"worker": (b, a, c)}), "worker-2")
    assert isinstance(wrong.error(), ClusterError)
    assert "cluster.worker: [localhost:" in str(wrong.error())
    enter(cluster, "worker-2").go()
    zero.go()
    one.go()


def test_a_list_whose_leader_never_comes_because_another_one_leads(enter: Meetings) -> None:
    cluster = cluster_of(worker=3)
    a, b, c = cluster.jobs["worker"]
    leader = enter(cluster, "worker-0")
    error = enter(Cluster("sync", {"worker": (b, a, c)}), "worker-2").error()
    assert isinstance(error, ClusterError)
    assert f"worker-0 at {a}" in str(error)
    assert f"claims to lead, and here that is worker-0 at {b}: cluster.worker: [" in str(error)
    assert not leader.joined.done()


def test_cluster_lists_of_different_length(enter: Meetings) -> None:
    cluster = cluster_of(worker=3)
    small = Cluster("sync", {"worker": cluster.jobs["worker"][:2]})
    enter(cluster, "worker-0")
    error = enter(small, "worker-1").error()
    assert isinstance(error, ClusterError)
    assert "cluster.worker" in str(error)


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_duplicate_is_refused_and_names_the_holder(enter: Meetings, running: bool) -> None:
    cluster = cluster_of(worker=2 if running else 3)
    participants = {task: enter(cluster, task) for task in ("worker-0", "worker-1")}
    wait_for(lambda: "worker-1" not in participants["worker-0"].meeting._role.waiting_for)
    duplicate = claimant(enter, cluster, "worker-1")
    assert isinstance(duplicate.error(), ClusterError)
    assert f"worker 1 is already held by host {socket.gethostname()} pid {os.getpid()}" in str(duplicate.error())
    if running:
        for participant in participants.values():
            assert not participant.go().events()


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_second_coordinator_is_refused(enter: Meetings, running: bool) -> None:
    cluster = cluster_of("async", **ASYNC)
    tasks = cluster.tasks if running else cluster.tasks[:-1]
    participants = {str(task): enter(cluster, str(task)) for task in tasks}
    wait_for(lambda: "worker-0" not in participants["chief-0"].meeting._role.waiting_for)
    wait_for(lambda: "ps-0" not in participants["chief-0"].meeting._role.waiting_for)
    second = Cluster("async", {**cluster.jobs, "chief": cluster_of(chief=1).jobs["chief"]})
    error = enter(second, "chief-0").error()
    assert isinstance(error, ClusterError)
    assert f"is already held by job {participants['chief-0'].meeting._membership.job_id} of chief-0 at " in str(error)
    if not running:
        participants["worker-1"] = enter(cluster, "worker-1")
    for participant in participants.values():
        assert not participant.go().events()


def test_a_wrong_list_is_refused_by_a_running_leader(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    participants = all_of(enter, cluster)
    stray = Cluster("sync", {"worker": (cluster.jobs["worker"][0], *cluster_of(worker=1).jobs["worker"])})
    assert isinstance(enter(stray, "worker-1").error(), ClusterError)
    assert not any(participant.events() for participant in participants.values())
