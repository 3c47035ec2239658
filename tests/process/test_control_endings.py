"""Tasks that are lost, that return and that stop, and how the others learn of it."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.process.participants import ASYNC, WAIT_SECS, Meetings, Participant, all_of, claimant, cluster_of, wait_for
from tf2dist.cluster.spec import Task
from tf2dist.errors import ClusterError, NotFiniteError, TaskLeft, TaskLostError, TrainingError
from tf2dist.hosts.protocol import Back, Ended, Lost, Stop


def test_a_lost_worker_may_return_in_async_and_the_others_are_notified(enter: Meetings) -> None:
    cluster = cluster_of("async", **ASYNC)
    participants = all_of(enter, cluster)
    for _ in range(2):
        participants["worker-1"].vanish()
        assert participants["chief-0"].event(Lost, "worker-1").why == "the connection was closed"
        participants["worker-1"] = enter(cluster, "worker-1").go()
        participants["chief-0"].event(Back, "worker-1")
        participants["chief-0"].seen.clear()
    # Messages keep their order: all that was forwarded before has arrived when this arrives.
    participants["worker-1"].meeting.stop(15)
    assert participants["ps-0"].event(Stop, "worker-1").signum == 15
    assert [type(event) for event in participants["ps-0"].events()] == [Lost, Lost, Stop]


def test_a_worker_that_has_left_may_return(enter: Meetings) -> None:
    cluster = cluster_of("async", **ASYNC)
    participants = all_of(enter, cluster)
    participants["worker-1"].leave(TaskLeft("worker-1"))
    for task in ("chief-0", "ps-0", "worker-0"):
        assert participants[task].event(Ended, "worker-1") == Ended(
            "worker-1", 143, str(TaskLeft("worker-1")), left=True
        )
    enter(cluster, "worker-1").go()
    participants["chief-0"].event(Back, "worker-1")
    assert [type(event) for event in participants["chief-0"].events()] == [Ended, Back], "neither a stop nor a loss"


def test_a_job_begins_with_some_of_its_workers_and_others_join(enter: Meetings) -> None:
    cluster = replace(cluster_of("async", chief=1, ps=1, worker=3), min_workers=1)
    chief, worker = enter(cluster, "chief-0"), enter(cluster, "worker-1")
    wait_for(lambda: "ps-0" in worker.waiting_for, "it has joined")
    assert not chief.joined.done(), "all ps are needed"
    for participant in (enter(cluster, "ps-0"), chief, worker):
        participant.go()
    first, third = cluster.address(Task("worker", 0)), cluster.address(Task("worker", 2))
    told = f"beginning without worker-0 at {first}, worker-2 at {third}; each may join later"
    chief.events()  # passes on what is to be told
    assert told in chief.printed
    enter(cluster, "worker-2").go()
    assert chief.event(Back, "worker-2").is_first
    worker.vanish()
    enter(cluster, "worker-1").go()
    assert not chief.event(Back, "worker-1").is_first


def test_a_worker_that_leaves_before_the_start_is_waited_for(enter: Meetings) -> None:
    cluster = cluster_of("async", **ASYNC)
    others = [enter(cluster, task) for task in ("chief-0", "ps-0")]
    left = enter(cluster, "worker-1")
    wait_for(lambda: "worker-0" in left.waiting_for, "it has joined")
    left.leave(TaskLeft("worker-1"))
    wait_for(lambda: any("worker-1 has left" in line for line in others[0].printed), "that is told")
    for participant in [*others, enter(cluster, "worker-0"), enter(cluster, "worker-1")]:
        participant.go()


@pytest.mark.parametrize(
    ("mode", "counts", "lost"), [("async", ASYNC, "ps-0"), ("sync", {"worker": 3}, "worker-1")], ids=["ps", "sync"]
)
def test_a_loss_that_ends_the_job_is_reported_to_all(
    enter: Meetings, mode: str, counts: dict[str, int], lost: str
) -> None:
    cluster = cluster_of(mode, **counts)
    participants = all_of(enter, cluster)
    participants.pop(lost).vanish()
    for participant in participants.values():
        participant.event(Lost, lost)
    returned = enter(cluster, lost)
    assert isinstance(returned.error(), TaskLostError)
    assert "the job is running" in str(returned.error())


def test_a_lost_leader_is_reported_to_all(enter: Meetings) -> None:
    cluster = cluster_of("async", **ASYNC)
    participants = all_of(enter, cluster)
    participants.pop("chief-0").vanish()
    for participant in participants.values():
        participant.event(Lost, "chief-0")


def test_silence_is_a_loss(enter: Meetings) -> None:
    """A process that is frozen keeps its connections."""
    cluster = cluster_of(worker=3)
    participants = all_of(enter, cluster, lost_after_secs=3)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(WAIT_SECS)

    participants["worker-1"].meeting._commands.put(freeze)
    try:
        for task in ("worker-0", "worker-2"):
            event = participants[task].event(Lost, "worker-1")
            assert event.why.startswith("silent for ") or task == "worker-2"
    finally:
        thaw.set()
    assert [event.task for event in participants["worker-2"].events()] == ["worker-1"]
    assert participants["worker-1"].event(Lost, "worker-1").why.startswith("stood still for ")
    assert participants["worker-1"].events()[0].task == "worker-1", "it does not blame the others first"


def test_a_silent_holder_keeps_its_task_for_a_while(enter: Meetings) -> None:
    """Its host may be gone, and the task may have been started elsewhere; or its link is only cut for a moment."""
    cluster = cluster_of("async", **ASYNC)
    participants = all_of(enter, cluster)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(WAIT_SECS)

    participants["worker-1"].meeting._commands.put(freeze)
    wait_for(lambda: _silence(participants["chief-0"], "worker-1") > 3.6)
    second = claimant(enter, cluster, "worker-1")
    wait_for(lambda: "which has been silent for" in second.meeting._role.waiting_for)
    thaw.set()
    assert isinstance(second.error(), ClusterError)
    assert not any(participant.events() for participant in participants.values())


def _silence(leader: Participant, task: str) -> float:
    members: dict[Task, Any] = leader.meeting._role._members  # type: ignore[union-attr]
    (found,) = [member for member in members.values() if str(member.task) == task]
    return time.monotonic() - float(found.link.heard_at)


def test_a_leader_that_is_started_again_while_all_wait(enter: Meetings) -> None:
    cluster = cluster_of(worker=3)
    first = enter(cluster, "worker-0")
    one = enter(cluster, "worker-1")
    wait_for(lambda: "to say go" in one.meeting._role.waiting_for or "worker-2" in one.meeting._role.waiting_for)
    first.vanish()
    wait_for(lambda: "connection refused" in one.meeting._role.waiting_for)
    for participant in (enter(cluster, "worker-0"), enter(cluster, "worker-2"), one):
        participant.go()


def test_a_leader_that_gives_up_says_why(enter: Meetings) -> None:
    cluster = cluster_of(worker=3)
    leader, one = enter(cluster, "worker-0"), enter(cluster, "worker-1")
    wait_for(lambda: "worker-1" not in leader.meeting._role.waiting_for)
    leader.leave(TrainingError("no more patience"))
    assert isinstance(one.error(), TaskLostError)
    assert "worker-0 at localhost:" in str(one.error())
    assert "has ended: no more patience" in str(one.error())


@pytest.mark.parametrize("source", ["worker-0", "worker-2"], ids=["leader", "follower"])
def test_stop_and_end_reach_all(enter: Meetings, source: str) -> None:
    participants = all_of(enter, cluster_of(worker=3))
    first = participants.pop(source)
    first.meeting.stop(2)
    first.leave(NotFiniteError("the loss\nis nan"))
    for participant in participants.values():
        assert participant.event(Stop, source).signum == 2
        assert participant.event(Ended, source) == Ended(source, 3, "the loss is nan")
        assert not [event for event in participant.events() if isinstance(event, Lost)]


def test_a_broken_connection_does_not_end_a_program_with_sigpipe() -> None:
    code = """if True:
        import signal, socket
        from types import SimpleNamespace
        from tf2dist.hosts.connections import Links

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        links = Links(b"key", SimpleNamespace(on_closed=lambda link, why: print(why)))
        listener = socket.create_server(("127.0.0.1", 0))
        links.open(listener)
        other = socket.create_connection(listener.getsockname())
        links.poll(1.0)
        links.all[0].sock.shutdown(socket.SHUT_WR)
        links.poll(1.0)
    """
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (completed.returncode, completed.stdout) == (0, "Broken pipe\n"), completed.stderr
