"""The cluster of a SLURM job step: the tasks of one srun, found in the environment that SLURM gives each of them.

The places of all ranks are computed, without asking SLURM's controller: thousands of tasks would ask it at once, and
the programs that ask are not in every container.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tf2dist.cluster.ranks import num_ports, place_of_rank
from tf2dist.cluster.spec import Place
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ClusterError

START = "srun --ntasks=4 python -m tf2dist cluster=slurm"
JOB, STEP, RANK = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"
NODES, COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
DISTRIBUTION, PLANE = "SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE"
COMPONENTS = "SLURM_HET_SIZE"
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")  # of Open MPI's mpirun, and of those of MPICH and Intel
# What SLURM calls the steps of batch scripts and of interactive shells, and two that run no command.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
MAX_TASKS = 10**6  # of a node
PORTS_OF_A_STEP = 16  # on each node; more where a node has more tasks
STEPS_APART = 61  # jobs with successive numbers, and the first steps of each, have different ports


def find(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """The place of this process among the tasks of its step."""
    if why := why_no_task(environ):
        raise ClusterError(f"cluster (slurm): {why}")
    nodes, counts = nodes_in(environ[NODES]), counts_in(environ[COUNTS])
    if len(nodes) != len(counts):
        _refuse(COUNTS, environ[COUNTS], f"must have a count for each of the {len(nodes)} nodes")
    by_rank = spread_tasks(nodes, counts, _tasks_in_a_row(environ))
    rank = _number(RANK, environ)
    _check_node(by_rank, rank, environ)
    first_number = _first_number(environ, max(counts), num_ports(config.cluster.control_port_shift))
    return place_of_rank(config, by_rank, rank, (COUNTS, RANK), first_number)


def why_no_task(environ: Mapping[str, str]) -> str:
    """Why this process is not one task of a SLURM job step, and what to do; "" if it is one."""
    if any(name in environ for name in MPI_RANKS):
        return "mpirun has started this process, of whose ranks SLURM knows nothing; start it with srun instead"
    job = environ.get(JOB)
    if not job:
        return f"this process is in no SLURM job; start it with srun, as in {START}, or choose another cluster"
    is_in_step = all(environ.get(name) for name in (STEP, RANK, NODES, COUNTS))
    if not is_in_step or _number(STEP, environ) >= FIRST_SPECIAL_STEP:
        return f"this is the script or the shell of job {job}, not a task in it; start it with srun, as in {START}"
    return ""


def has_peers(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a SLURM job step."""
    return not why_no_task(environ) and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def nodes_in(text: str) -> list[str]:
    """The names in a node list such as "login,gpu[08-11,20]-rack[1-2]"."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        _refuse(NODES, text, "must be a list such as node[01-04,07],gpu1")
    return [name for part in parts for name in _expanded(part)]


def _expanded(part: str) -> list[str]:
    """The names of one part of a node list, whose last brackets count fastest."""
    pieces = re.split(r"\[(.*?)\]", part)
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    """The numbers in brackets such as "08-11,20", each as long as the first of its range."""
    numbers = []
    for text in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
        if not match or int(match[1]) > int(match[2] or match[1]):
            _refuse(NODES, f"[{ranges}]", "must have ranges such as 01-04,07")
        numbers += [f"{number:0{len(match[1])}}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def counts_in(text: str) -> list[int]:
    """The numbers of tasks in a text such as "2(x3),1", one for each node."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not match:
            _refuse(COUNTS, text, "must be counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def spread_tasks(nodes: Sequence[str], counts: Sequence[int], in_a_row: int) -> list[str]:
    """The node of each rank: round after round, every node gets so many in a row until it has its count."""
    left = list(counts)
    by_rank: list[str] = []
    while any(left):
        for index, node in enumerate(nodes):
            taken = min(in_a_row, left[index])
            by_rank += [node] * taken
            left[index] -= taken
    return by_rank


def _tasks_in_a_row(environ: Mapping[str, str]) -> int:
    """How many successive ranks the distribution of this step gives to a node before the next one gets some."""
    # Behind the colon and the comma stands how tasks are bound to the sockets and cores of a node. Without the option
    # SLURM takes block, or cyclic where no node has two tasks, which is the same.
    text = environ.get(DISTRIBUTION) or "block"
    # In a heterogeneous job each component deals its own tasks, and the variable has the word of one of them. Unless a
    # component asks for something else, which `_check_node` finds, that comes to the same as block for all.
    if environ.get(COMPONENTS, "1") != "1":
        text = "block"
    kind = re.split("[:,]", text)[0]
    if kind == "plane":
        return max(1, _number(PLANE, environ))
    if kind not in ("block", "*", "cyclic"):
        _refuse(DISTRIBUTION, text, "does not tell where each rank is; give srun --distribution=block")
    return 1 if kind == "cyclic" else MAX_TASKS


def _check_node(by_rank: Sequence[str], rank: int, environ: Mapping[str, str]) -> None:
    """Compares what was computed for this rank with what SLURM says about it."""
    if rank >= len(by_rank):
        _refuse(RANK, str(rank), f"must be less than the {len(by_rank)} tasks of the step; start it with srun")
    node = by_rank[rank]
    computed = (node, str(by_rank[:rank].count(node)))
    given = (environ.get("SLURMD_NODENAME", node), environ.get("SLURM_LOCALID", computed[1]))
    if computed != given:
        raise ClusterError(
            f"SLURM_PROCID ({rank}): by SLURM_STEP_NODELIST and SLURM_DISTRIBUTION this is task {computed[1]} of "
            f"{computed[0]}, but SLURM started it as task {given[1]} of {given[0]}; start it with srun "
            "--distribution=block, which replaces these variables"
        )


def _first_number(environ: Mapping[str, str], most_tasks: int, count: int) -> int:
    """Where the ports of this step begin, so that it does not meet other jobs and steps on its nodes."""
    size = max(PORTS_OF_A_STEP, 1 << (most_tasks - 1).bit_length())
    number = _number(JOB, environ) + STEPS_APART * _number(STEP, environ)
    return number % max(1, count // size) * size


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not re.fullmatch("[0-9]{1,10}", text):
        _refuse(name, text or "null", "must be a whole number; start it with srun, which sets it")
    return int(text)


def _refuse(name: str, value: str, must: str) -> NoReturn:
    raise ClusterError(" ".join(f"{name} ({value}): {must}".split()))
