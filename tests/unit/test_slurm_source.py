"""`cluster=slurm`: the place that SLURM's environment gives a task, in the form in which SLURM 22.05 has written it."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tf2dist.cluster import slurm
from tf2dist.cluster.addresses import control_address, split
from tf2dist.cluster.sources import find_place
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.load import load
from tf2dist.config.schema import ClusterConfig, RunConfig
from tf2dist.errors import ClusterError

STEP = {  # of task 3 of "srun -N2 -n4"
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "node2",
}
# What srun gave for -N4: the counts, SLURM_DISTRIBUTION, SLURM_DIST_PLANESIZE, and SLURM_GTIDS, the ranks on each node.
GIVEN = [
    ("10(x4)", "block", "", [range(10), range(10, 20), range(20, 30), range(30, 40)]),
    ("10(x4)", "cyclic", "", [range(first, 40, 4) for first in range(4)]),
    (
        *("10(x4)", "plane", "3"),
        [
            [*range(3 * n, 3 * n + 3), *range(3 * n + 12, 3 * n + 15), *range(3 * n + 24, 3 * n + 27), 36 + n]
            for n in range(4)
        ],
    ),
    (
        *("13,9(x3)", "plane", "4"),
        [
            [0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 39],
            [4, 5, 6, 7, 20, 21, 22, 23, 36],
            [8, 9, 10, 11, 24, 25, 26, 27, 37],
            [12, 13, 14, 15, 28, 29, 30, 31, 38],
        ],
    ),
    ("7,1(x3)", "", "", [range(7), [7], [8], [9]]),
    ("7,1(x3)", "block:cyclic", "", [range(7), [7], [8], [9]]),
    ("7,1(x3)", "block,nopack", "", [range(7), [7], [8], [9]]),
    ("7,1(x3)", "cyclic", "", [[0, 4, 5, 6, 7, 8, 9], [1], [2], [3]]),
    ("7,1(x3)", "cyclic:cyclic:block", "", [[0, 4, 5, 6, 7, 8, 9], [1], [2], [3]]),
    ("7,1(x3)", "plane", "2", [[0, 1, 5, 6, 7, 8, 9], [2], [3], [4]]),
]


def place(environ: Mapping[str, str | None], mode: str = "sync", num_ps: int = 1) -> Place:
    """The place in `STEP` with these variables instead; those that are None are not set."""
    config = RunConfig(mode=mode, cluster=ClusterConfig(kind="slurm", num_ps=num_ps))
    return find_place(config, {name: value for name, value in {**STEP, **environ}.items() if value is not None})


def test_the_roles_of_a_step() -> None:
    found = place({}, "async")
    assert found.task == Task("worker", 1)
    port = split(found.cluster.address(found.task))[1] - 1  # it is the second task of its node
    assert found.cluster.jobs == {
        "chief": (f"node1:{port}",),
        "ps": (f"node1:{port + 1}",),
        "worker": (f"node2:{port}", f"node2:{port + 1}"),
    }
    assert place({}).task == Task("worker", 3)
    assert place({}, "async", num_ps=2).cluster.num_ps == 2


def test_the_components_of_a_heterogeneous_job_follow_each_other() -> None:
    """What `srun -N1 -n2 ... : -N2 -n2 ...` gave: the variable is that of a component with one task a node."""
    common = {
        "SLURM_HET_SIZE": "2",
        "SLURM_STEP_NODELIST": "node[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    for rank, (node, local) in enumerate([(1, 0), (1, 1), (2, 0), (3, 0)]):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": f"node{node}"}
        assert place({**common, **own}).task == Task("worker", rank)
    with pytest.raises(ClusterError, match="but SLURM started it as task 0 of node2"):
        place({**common, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "node2"})


@pytest.mark.parametrize(("counts", "distribution", "plane", "ranks_of"), GIVEN)
def test_every_rank_is_where_srun_has_started_it(counts: str, distribution: str, plane: str, ranks_of: Any) -> None:
    common = {
        "SLURM_STEP_NODELIST": "node[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_DISTRIBUTION": distribution or None,
        "SLURM_DIST_PLANESIZE": plane or None,
    }
    found = {}
    clusters: set[str] = set()
    for node, its in enumerate(ranks_of, start=1):
        for local, rank in enumerate(its):
            own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": f"node{node}"}
            cluster, task = place({**common, **own})
            found[rank] = split(cluster.address(task))[0]
            clusters.add(str(cluster))
    assert found == {rank: f"node{node}" for node, its in enumerate(ranks_of, start=1) for rank in its}
    assert len(clusters) == 1, "all find the same cluster"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[9-11]", ["r9", "r10", "r11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("x,n[1,3-4],y[001-002,7]", ["x", "n1", "n3", "n4", "y001", "y002", "y7"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("a[1-2][3-4]", ["a13", "a14", "a23", "a24"]),
        ("c-1.rack[2-3]", ["c-1.rack2", "c-1.rack3"]),
    ],
)
def test_node_lists_as_scontrol_expands_them(text: str, names: list[str]) -> None:
    assert slurm.nodes_in(text) == names


def test_numbers_of_tasks() -> None:
    assert slurm.counts_in("2(x3),1") == [2, 2, 2, 1]
    assert slurm.counts_in("16") == [16]


def ports(cluster: Cluster) -> set[int]:
    own = {split(address)[1] for addresses in cluster.jobs.values() for address in addresses}
    return own | {control_address(f"a:{port}")[1] for port in own}


def test_neighbouring_jobs_and_steps_do_not_meet() -> None:
    """Each step of a hundred jobs in a row, with all its ports and control ports; the same job finds the same ones."""
    own: dict[str, str | None] = {
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_STEP_TASKS_PER_NODE": "16",
        "SLURMD_NODENAME": None,
    }
    own |= {"SLURM_PROCID": "0", "SLURM_LOCALID": None}
    found = [ports(place({**own, "SLURM_JOB_ID": str(job)}).cluster) for job in range(4_294_900, 4_295_000)]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(found, 2))
    steps = [ports(place({**own, "SLURM_STEP_ID": str(step)}).cluster) for step in range(4)]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(steps, 2))
    assert ports(place(own).cluster) == steps[0]


def test_a_node_with_many_tasks_has_a_port_for_each() -> None:
    many: dict[str, str | None] = {
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_STEP_TASKS_PER_NODE": "300",
        "SLURM_LOCALID": None,
    }
    many["SLURMD_NODENAME"] = None
    for job in range(1000, 1100):
        found = place({**many, "SLURM_JOB_ID": str(job)}).cluster
        assert len(ports(found)) == 600


def test_a_large_step_is_found_fast() -> None:
    """1,024 tasks on 64 nodes; no program is started, and no host is asked."""
    large = {"SLURM_STEP_NODELIST": "node[01-64]", "SLURM_STEP_TASKS_PER_NODE": "16(x64)"}
    large |= {"SLURM_PROCID": "1023", "SLURM_LOCALID": "15", "SLURMD_NODENAME": "node64"}
    secs = []
    for _ in range(5):
        begun = time.thread_time()
        assert place(large, "async").cluster.num_workers == 1022
        secs.append(time.thread_time() - begun)
    assert min(secs) < 0.05, secs


NOT_A_TASK = [
    ({"SLURM_JOB_ID": None}, "is in no SLURM job; start it with srun, as in srun --ntasks=4 python -m tf2dist"),
    # The script of sbatch, which has these four, and the shell of salloc, which has none of them.
    (
        dict.fromkeys(["SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]),
        "script or the shell of job 9",
    ),
    (dict.fromkeys(name for name in STEP if name != "SLURM_JOB_ID"), "not a task in it; start it with srun"),
    ({"SLURM_STEP_ID": "4294967290"}, "script or the shell of job 9"),  # a shell in an interactive step
    ({"OMPI_COMM_WORLD_RANK": "0"}, "mpirun has started this process"),
    ({"MPI_LOCALRANKID": "0", "SLURM_STEP_ID": None}, "start it with srun instead"),
]


@pytest.mark.parametrize(("environ", "words"), NOT_A_TASK)
def test_a_process_that_is_no_task_is_told_what_to_do(environ: dict[str, str | None], words: str) -> None:
    with pytest.raises(ClusterError, match=rf"^cluster \(slurm\): .*{words}.*$"):
        place(environ)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION (arbitrary): does not tell where each rank is; give"),
        ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE (null): must be a whole number"),
        # A script that sbatch has started from within another step has that step's variables.
        (
            {"SLURMD_NODENAME": "node3"},
            "SLURM_PROCID (3): by SLURM_STEP_NODELIST and SLURM_DISTRIBUTION this is task 1",
        ),
        (
            {"SLURM_LOCALID": "0"},
            "of node2, but SLURM started it as task 0 of node2; start it with srun --distribution=b",
        ),
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "1"}, "is task 0 of node2, but SLURM started it as task 1"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID (4): must be less than the 4 tasks of the step"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID (-1): must be a whole number"),
        ({"SLURM_JOB_ID": "9_1"}, "SLURM_JOB_ID (9_1): must be a whole number"),
        ({"SLURM_STEP_NODELIST": "node[1-2"}, "SLURM_STEP_NODELIST (node[1-2): must be a list such as"),
        ({"SLURM_STEP_NODELIST": "node[2-1]"}, "SLURM_STEP_NODELIST ([2-1]): must have ranges such as"),
        ({"SLURM_STEP_NODELIST": "bgl[000x133]"}, "SLURM_STEP_NODELIST ([000x133]): must have ranges"),
        (
            {"SLURM_STEP_NODELIST": "node[1-3]"},
            "SLURM_STEP_TASKS_PER_NODE (2(x2)): must have a count for each of the 3",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE (2(x): must be counts such as 2(x3),1"),
    ],
)
def test_each_mistake_is_named(environ: dict[str, str | None], words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        place(environ)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_too_few_tasks() -> None:
    words = r"SLURM_STEP_TASKS_PER_NODE: 4 are too few tasks for mode=async, which needs at least 5: .* start 5 or more"
    with pytest.raises(ClusterError, match=words):
        place({}, "async", num_ps=3)


def test_the_options_of_the_command_line() -> None:
    config = load(["cluster=slurm", "mode=async", "cluster.num_ps=2"], None)
    assert find_place(config, STEP).task == Task("worker", 0)


def test_a_step_of_one_task_has_no_peers() -> None:
    """There a call of `fit` uses the machine for a cluster of its own."""
    assert slurm.has_peers(STEP)
    assert not slurm.has_peers({**STEP, "SLURM_STEP_NUM_TASKS": "1"})
    assert not slurm.has_peers({"SLURM_JOB_ID": "9"})
    assert not slurm.has_peers({})
