"""Roles and ports by rank: `cluster=ranks`, and the rule that other engines use."""

from typing import Any

import pytest

from tf2dist import linux
from tf2dist.cluster import ranks
from tf2dist.cluster.addresses import check_control_ports, control_address
from tf2dist.cluster.sources import find_place, of_engine
from tf2dist.cluster.spec import Place, Task
from tf2dist.config.load import load
from tf2dist.config.schema import CONTROL_PORT_SHIFT, ClusterConfig, RunConfig
from tf2dist.errors import ClusterError, ConfigError


@pytest.fixture
def ephemeral(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the ports that the kernel gives to outgoing connections."""
    return lambda first: monkeypatch.setattr(linux, "ephemeral_ports", lambda: range(first, 61_000))


def place(mode: str, addresses: list[str], rank: int | None, **options: Any) -> Place:
    cluster = ClusterConfig(kind="ranks", addresses=addresses, rank=rank, **options)
    return find_place(RunConfig(mode=mode, cluster=cluster), {})


def in_environment(mode: str = "sync", **environ: str) -> Place:
    return find_place(RunConfig(mode=mode, cluster=ClusterConfig(kind="ranks")), environ)


def test_ranks_give_the_roles() -> None:
    hosts = ["a", "b", "c", "d", "e"]
    cluster = place("async", hosts, 0, num_ps=2).cluster
    assert cluster.jobs == {"chief": ("a:12000",), "ps": ("b:12000", "c:12000"), "worker": ("d:12000", "e:12000")}
    tasks = [place("async", hosts, rank, num_ps=2).task for rank in range(5)]
    assert tasks == [Task("chief", 0), Task("ps", 0), Task("ps", 1), Task("worker", 0), Task("worker", 1)]
    assert not cluster.is_managed, "the tasks do not divide the cores of one host"
    assert place("sync_replicas", hosts, 4).task == Task("worker", 2)


def test_every_synchronous_rank_is_a_worker() -> None:
    assert [place("sync", ["a", "b"], rank).task for rank in (0, 1)] == [Task("worker", 0), Task("worker", 1)]
    found = place("sync", ["a"], 0)
    assert (found.cluster.num_workers, found.leads) == (1, True)


def test_every_rank_finds_the_same_cluster() -> None:
    hosts = ["a", "b", "a", "b:2222", "A."]
    assert len({str(place("async", hosts, rank).cluster) for rank in range(5)}) == 1


def test_the_tasks_of_a_host_have_ports_of_their_own() -> None:
    hosts = ["a", "b", "A.", "b:2222", "10.0.0.1", "fd00::1", "[FD00::1]", "b"]
    assert place("sync", hosts, 0).cluster.jobs["worker"] == (
        *("a:12000", "b:12000", "A.:12001", "b:2222"),
        *("10.0.0.1:12000", "[fd00::1]:12000", "[FD00::1]:12001", "b:12001"),
    )


@pytest.mark.parametrize("shift", [1, 7, CONTROL_PORT_SHIFT, 5000])
def test_no_control_port_meets_another_port(shift: int) -> None:
    """Many tasks on one host, for small shifts more than these are long."""
    count = min(ranks.num_ports(shift), 1500)
    found = place("sync", ["a"] * count, 0, control_port_shift=shift)
    check_control_ports(found.cluster, shift)
    ports = [control_address(address, shift)[1] for address in found.cluster.jobs["worker"]]
    assert len(set(ports)) == count
    assert max(ports) < linux.ephemeral_ports()[0]


@pytest.mark.parametrize(
    ("first", "count", "last"),
    [(32_768, 10_000, 31_999), (49_152, 10_000, 31_999), (15_200, 1_200, 15_199), (1024, 10_000, 31_999)],
)
def test_ports_end_below_those_of_outgoing_connections(ephemeral: Any, first: int, count: int, last: int) -> None:
    """Where nothing is left below them, the usual ones are used all the same."""
    ephemeral(first)
    assert ranks.num_ports(CONTROL_PORT_SHIFT) == count
    assert ranks.port_of(count - 1, CONTROL_PORT_SHIFT) + CONTROL_PORT_SHIFT == last


@pytest.mark.parametrize("first", [32_768, 49_152])
def test_too_many_tasks_for_the_ports(ephemeral: Any, first: int) -> None:
    """A host that has more ports finds the same as the others."""
    ephemeral(first)
    place("sync", ["a", "b"] * 768, 0, control_port_shift=20_000)
    with pytest.raises(
        ClusterError, match=r"control_port_shift \(20000\): leaves no port below 32768 for task 769 of a"
    ):
        place("sync", ["a"] * 769, 0, control_port_shift=20_000)


@pytest.mark.parametrize(
    ("mode", "addresses", "rank", "words"),
    [
        ("async", ["a", "b"], 0, "cluster.addresses: 2 are too few tasks for mode=async, which needs at least 3"),
        ("sync_replicas", ["a", "b"], 0, "1 ps (cluster.num_ps) and a worker; start 3 or more, or choose mode=sync"),
        ("sync", ["a", "b"], 2, "cluster.rank (2): must be from 0 to 1, since cluster.addresses has 2 tasks"),
        ("sync", ["a", "b"], None, "cluster.rank (null): every task must be told its own; give cluster.rank=0"),
        ("sync", [], 0, "cluster.addresses ([]): with cluster=ranks every task must be told the addresses of all"),
        ("sync", ["a", "b:x"], 0, "cluster.addresses: worker 1 (b:x): must be host:port"),
        ("sync", ["a", "b c"], 0, "cluster.addresses: worker 1 (b c:12000): must be host:port"),
        ("sync", ["a:1", "A:1"], 0, "worker 1 (A:1): the same address as worker 0 (a:1)"),
        ("sync", ["a", "a:12000"], 0, "worker 1 (a:12000): the same address as worker 0 (a:12000)"),
        ("sync", ["0.0.0.0", "b"], 0, "means all interfaces and not one host"),
    ],
)
def test_each_mistake_is_named(mode: str, addresses: list[str], rank: int | None, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        place(mode, addresses, rank)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_options_of_the_command_line() -> None:
    config = load(["cluster=ranks", "cluster.addresses=[a,b:2222,c,d]", "cluster.rank=3", "cluster.num_ps=2"], None)
    assert find_place(config, {}).task == Task("worker", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["cluster.addresses=[a,b]"], r"cluster\.addresses .*: is for cluster=ranks; add that"),
        (["cluster.rank=0"], r"cluster\.rank \(0\): is for cluster=ranks; add that"),
        (["cluster=ranks", "cluster.rank=-1"], r"cluster\.rank \(-1\): must be at least 0"),
        (["cluster=ranks", "task.index=0"], r"task\.index \(0\): is for cluster=hosts; add that"),
        (["cluster=ranks", "cluster.num_workers=7"], r"cluster\.num_workers \(7\): is not for cluster=ranks, which"),
        (["cluster=hosts", "cluster.num_ps=2"], r"cluster\.num_ps \(2\): is not for cluster=hosts, which says it"),
    ],
)
def test_options_of_other_clusters_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(options, None)


# The environment. What engines set is in test_recipes.py.


@pytest.mark.parametrize("text", ["a,b:2222,c", "a b:2222 c", "a\nb:2222\nc\n", '["a", "b:2222", "c"]'])
def test_the_addresses_in_a_variable(text: str) -> None:
    for rank in ("1", "b:2222"):
        cluster, task = in_environment("async", TF2DIST_ADDRESSES=text, TF2DIST_RANK=rank)
        assert cluster.jobs == {"chief": ("a:12000",), "ps": ("b:2222",), "worker": ("c:12000",)}
        assert task == Task("ps", 0)


def test_options_come_before_variables() -> None:
    cluster = ClusterConfig(kind="ranks", addresses=["x", "y"], rank=1)
    variables = {"TF2DIST_ADDRESSES": "a,b,c", "TF2DIST_RANK": "0"}
    place = find_place(RunConfig(mode="sync", cluster=cluster), variables)
    assert (place.cluster.num_workers, place.task) == (2, Task("worker", 1))


def test_an_engine_is_found_where_it_has_started_several_tasks() -> None:
    """There a call of `fit` joins the others."""
    assert of_engine({"TF2DIST_ADDRESSES": "a,b", "TF2DIST_RANK": "0"}) == "ranks"
    assert of_engine({"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}) is None
    assert of_engine({}) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, r"give cluster.addresses=\[host1,host2\], or set TF2DIST_ADDRESSES"),
        ({"TF2DIST_RANK": "0"}, r"cluster.rank \(null\): .* or set TF2DIST_RANK and TF2DIST_ADDRESSES"),
        (
            {"TF2DIST_ADDRESSES": "a,b"},
            r"^TF2DIST_RANK \(null\): must be the rank of this task, from 0, or its address",
        ),
        (
            {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"},
            r"^SM_CURRENT_HOST \(b\): .* address in SM_HOSTS; start it with",
        ),
        (
            {"TF2DIST_ADDRESSES": "a,b", "TF2DIST_RANK": "2"},
            r"^TF2DIST_RANK \(2\): must be from 0 to 1, since TF2DIST_A",
        ),
        ({"TF2DIST_ADDRESSES": "a,b c!", "TF2DIST_RANK": "0"}, r"^TF2DIST_ADDRESSES: worker 2 \(c!:12000\): must be"),
        (
            {"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}'},
            "^TF_CONFIG: gives the jobs chief, worker, and with cluster=ranks all .* leave out cluster=ranks, or",
        ),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'},
            r"^TF_CONFIG: task index \(1\)",
        ),
    ],
)
def test_each_mistake_in_the_environment_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        in_environment(**environ)


def test_the_workers_of_tf_config_are_ranks_if_that_is_asked_for() -> None:
    text = '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 1}}'
    config = load(["mode=async", "cluster=ranks"], text)
    cluster, task = find_place(config, {"TF_CONFIG": text})
    assert (cluster.jobs["ps"], task) == (("b:1",), Task("ps", 0))
    with pytest.raises(ClusterError, match="job chief: is missing"):
        find_place(load(["mode=async"], text), {"TF_CONFIG": text})
    with pytest.raises(ConfigError, match="or unset TF_CONFIG to use the lists given here"):
        load(["cluster=ranks", "cluster.addresses=[a,b]", "cluster.rank=0"], text)
