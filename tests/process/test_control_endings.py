"""Who is lost, who returns, and how the others learn of it and of a stop."""

import threading
import time
from typing import Any

import pytest

from tests.process.parties import ASYNC, WAIT_SECS, Party, Table, all_of, claimant, cluster_of, wait_for
from tf2dist.cluster.spec import Task
from tf2dist.control.messages import Back, Ended, Lost, Stop
from tf2dist.errors import ClusterError, TaskLostError, TrainingError


def test_a_lost_worker_may_return_in_async_and_the_others_hear_of_it(table: Table) -> None:
    cluster = cluster_of("async", **ASYNC)
    parties = all_of(table, cluster)
    for _ in range(2):
        parties["worker-1"].vanish()
        assert parties["chief-0"].event(Lost, "worker-1").why == "the connection was closed"
        parties["worker-1"] = table(cluster, "worker-1").go()
        parties["chief-0"].event(Back, "worker-1")
        parties["chief-0"].seen.clear()
    parties["worker-1"].meeting.stop(15)  # whatever was forwarded before has come when this comes
    assert parties["ps-0"].event(Stop, "worker-1").signum == 15
    assert [type(event) for event in parties["ps-0"].events()] == [Lost, Lost, Stop]


@pytest.mark.parametrize(
    ("mode", "counts", "lost"), [("async", ASYNC, "ps-0"), ("sync", {"worker": 3}, "worker-1")], ids=["ps", "sync"]
)
def test_a_loss_that_ends_the_job_is_told_to_all(table: Table, mode: str, counts: dict[str, int], lost: str) -> None:
    cluster = cluster_of(mode, **counts)
    parties = all_of(table, cluster)
    parties.pop(lost).vanish()
    for party in parties.values():
        party.event(Lost, lost)
    returned = table(cluster, lost)
    assert isinstance(returned.error(), TaskLostError)
    assert "the job is running" in str(returned.error())


def test_a_lost_leader_is_told_to_all(table: Table) -> None:
    cluster = cluster_of("async", **ASYNC)
    parties = all_of(table, cluster)
    parties.pop("chief-0").vanish()
    for party in parties.values():
        party.event(Lost, "chief-0")


def test_silence_is_a_loss(table: Table) -> None:
    """A process that is frozen keeps its connections."""
    cluster = cluster_of(worker=3)
    parties = all_of(table, cluster, lost_after_secs=3)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(WAIT_SECS)

    parties["worker-1"].meeting._commands.put(freeze)
    try:
        for task in ("worker-0", "worker-2"):
            event = parties[task].event(Lost, "worker-1")
            assert event.why.startswith("silent for ") or task == "worker-2"
    finally:
        thaw.set()
    assert [event.task for event in parties["worker-2"].events()] == ["worker-1"]


def test_a_holder_that_is_silent_is_not_given_up_at_once(table: Table) -> None:
    """Its host may be gone, and this is the same task started again; or its link is cut for a moment."""
    cluster = cluster_of("async", **ASYNC)
    parties = all_of(table, cluster)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(WAIT_SECS)

    parties["worker-1"].meeting._commands.put(freeze)
    wait_for(lambda: _silence(parties["chief-0"], "worker-1") > 3.6)
    second = claimant(table, cluster, "worker-1")
    wait_for(lambda: "which has been silent for" in second.meeting._role.waiting_for)
    thaw.set()
    assert isinstance(second.error(), ClusterError)
    assert not any(party.events() for party in parties.values())


def _silence(leader: Party, task: str) -> float:
    members: dict[Task, Any] = leader.meeting._role._members  # type: ignore[attr-defined]
    (found,) = [member for member in members.values() if str(member.task) == task]
    return time.monotonic() - float(found.link.heard_at)


def test_a_leader_that_is_started_again_while_all_wait(table: Table) -> None:
    cluster = cluster_of(worker=3)
    first = table(cluster, "worker-0")
    one = table(cluster, "worker-1")
    wait_for(lambda: "to say go" in one.meeting._role.waiting_for or "worker-2" in one.meeting._role.waiting_for)
    first.vanish()
    wait_for(lambda: "connection refused" in one.meeting._role.waiting_for)
    for party in (table(cluster, "worker-0"), table(cluster, "worker-2"), one):
        party.go()


def test_a_leader_that_gives_up_says_why(table: Table) -> None:
    cluster = cluster_of(worker=3)
    leader, one = table(cluster, "worker-0"), table(cluster, "worker-1")
    wait_for(lambda: "worker-1" not in leader.meeting._role.waiting_for)
    leader.leave(TrainingError("no more patience"))
    assert isinstance(one.error(), TaskLostError)
    assert "worker-0 at localhost:" in str(one.error())
    assert "has ended: no more patience" in str(one.error())


@pytest.mark.parametrize("source", ["worker-0", "worker-2"], ids=["leader", "follower"])
def test_stop_and_end_reach_all(table: Table, source: str) -> None:
    parties = all_of(table, cluster_of(worker=3))
    first = parties.pop(source)
    first.meeting.stop(2)
    first.meeting.ended(3, "the loss is nan")
    first.leave()
    for party in parties.values():
        assert party.event(Stop, source).signum == 2
        assert party.event(Ended, source) == Ended(source, 3, "the loss is nan")
        assert not [event for event in party.events() if isinstance(event, Lost)]
