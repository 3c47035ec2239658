"""Roles by rank: the cluster of an ordered list of addresses, for engines that number their tasks.

With parameter servers rank 0 is the chief, the next `cluster.num_ps` are the ps and all others workers; with mode=sync
every rank is a worker. Tasks whose port is not given get one from 12000 up, below those that the kernel gives to
outgoing connections, so that each of them can also be opened in a firewall.

The list and the rank are options, or stand in the environment.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tf2dist import linux
from tf2dist.cluster.addresses import canonical_host, control_port, ip_in
from tf2dist.cluster.spec import Place
from tf2dist.cluster.validation import read_tf_config, validated
from tf2dist.config.schema import PS_MODES, RunConfig
from tf2dist.errors import ClusterError

FIRST_PORT = 12_000
Names = tuple[str, str]  # what the list of addresses and the rank are called where they come from, for errors
OPTIONS: Names = ("cluster.addresses", "cluster.rank")
OWN: Names = ("TF2DIST_ADDRESSES", "TF2DIST_RANK")  # of the pods and containers that tf2dist.render asks for
# Those in which engines name the addresses, and the rank or the own address.
VARIABLES: tuple[Names, ...] = (
    OWN,
    ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"),
    ("DSTACK_NODES_IPS", "DSTACK_NODE_RANK"),
    ("SM_HOSTS", "SM_CURRENT_HOST"),
)


def find(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """The task with this process's rank, by the options, by TF_CONFIG or by the variables of an engine."""
    addresses, rank = list(config.cluster.addresses), config.cluster.rank
    if not addresses and rank is None:
        if environ.get("TF_CONFIG"):
            return place_of_rank(config, *_in_tf_config(environ), ("TF_CONFIG", "TF_CONFIG"))
        if names := _variables(environ):
            addresses = listed(environ[names[0]])
            return place_of_rank(config, addresses, _rank(environ, names, addresses), names)
    problems = []
    if not addresses:
        problems.append(
            "cluster.addresses ([]): with cluster=ranks every task must be told the addresses of all, in the same "
            f"order; give cluster.addresses=[host1,host2], or set {OWN[0]}"
        )
    if rank is None:
        problems.append(
            "cluster.rank (null): every task must be told its own; give cluster.rank=0, 1 and so on, or set "
            f"{OWN[1]} and {OWN[0]}"
        )
    if rank is None or problems:
        raise ClusterError("\n".join(problems))
    return place_of_rank(config, addresses, rank, OPTIONS)


def has_peers(environ: Mapping[str, str]) -> bool:
    """Whether an engine's variables make this process one of several."""
    names = _variables(environ)
    return names is not None and len(listed(environ[names[0]])) > 1


def _variables(environ: Mapping[str, str]) -> Names | None:
    """The names of the variables that are set."""
    return next((names for names in VARIABLES if environ.get(names[0])), None)


def listed(text: str) -> list[str]:
    """The addresses in a text: one a line, with commas or spaces between them, or a JSON list."""
    return [word for word in re.findall(r'[^\s,"]+', text) if word not in "[]"]


def _rank(environ: Mapping[str, str], names: Names, addresses: Sequence[str]) -> int:
    text = environ.get(names[1], "").strip()
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    if text not in addresses:
        raise ClusterError(
            f"{names[1]} ({' '.join(text.split()) or 'null'}): must be the rank of this task, from 0, or its address "
            f"in {names[0]}; start it with the engine that sets both"
        )
    return addresses.index(text)


def _in_tf_config(environ: Mapping[str, str]) -> tuple[Sequence[str], int]:
    """The workers of a TF_CONFIG that names nobody else, as those of Azure and Ray; their numbers are the ranks."""
    jobs, task = read_tf_config(environ)
    if (*jobs, task.get("type")) != ("worker", "worker"):
        raise ClusterError(
            f"TF_CONFIG: gives the jobs {', '.join(jobs)}, and with cluster=ranks all tasks must be workers in it; "
            "leave out cluster=ranks, or have the engine start nothing but workers"
        )
    cluster, own = validated("TF_CONFIG", jobs, task, "sync")
    return cluster.jobs["worker"], own.index


def place_of_rank(config: RunConfig, addresses: Sequence[str], rank: int, names: Names, first_number: int = 0) -> Place:
    """The place of a rank in an ordered list of addresses.

    Args:
        addresses: host or host:port of each task, in the same order for all of them. Several may have one host.
        first_number: the number, for `port_of`, of the first task without a port on each host.

    Raises:
        ClusterError: they do not suit the options; one line for each mistake.
    """
    _check_counts(config, len(addresses), rank, names)
    given = with_ports(addresses, config.cluster.control_port_shift, first_number)
    if config.mode in PS_MODES:
        first_worker = 1 + config.cluster.num_ps
        jobs: dict[str, Any] = {"chief": given[:1], "ps": given[1:first_worker], "worker": given[first_worker:]}
    else:
        jobs = {"worker": given}
    # The ranks of a job are consecutive, in the order of the jobs here.
    ranks = [(job, index) for job, its in jobs.items() for index in range(len(its))]
    job, index = ranks[rank]
    return validated(names[0], jobs, {"type": job, "index": index}, config.mode)


def _check_counts(config: RunConfig, count: int, rank: int, names: Names) -> None:
    num_ps = config.cluster.num_ps
    needed = 2 + num_ps if config.mode in PS_MODES else 1
    if count < needed:
        raise ClusterError(
            f"{names[0]}: {count} are too few tasks for mode={config.mode}, which needs at least {needed}: a chief, "
            f"{num_ps} ps (cluster.num_ps) and a worker; start {needed} or more, or choose mode=sync"
        )
    if not 0 <= rank < count:
        raise ClusterError(
            f"{names[1]} ({rank}): must be from 0 to {count - 1}, since {names[0]} has {count} tasks; give all tasks "
            "the same list, and each its own rank"
        )


def with_ports(addresses: Sequence[str], control_port_shift: int, first: int = 0) -> list[str]:
    """The same as "host:port"; the tasks of a host that have no port get the next ports, in the order of the list."""
    ready = []
    count = num_ports(control_port_shift)
    on_host: Counter[str] = Counter()
    for address in addresses:
        # An IPv6 address has colons, but no port unless it is in brackets.
        is_ipv6 = ip_in(address) is not None and ":" in address
        if ":" in address and not is_ipv6:
            ready.append(address)
            continue
        host = f"[{address.strip('[]')}]" if is_ipv6 else address
        name = canonical_host(f"{host}:0")
        number = first + on_host[name]
        on_host[name] += 1
        if number >= count:
            raise ClusterError(
                f"cluster.control_port_shift ({control_port_shift}): leaves no port below {_end_of_ports()} for task "
                f"{on_host[name]} of {address}; give another one, the same to every task, or give each task its port"
            )
        ready.append(f"{host}:{port_of(number, control_port_shift)}")
    return ready


def distinct_addresses(offers: Iterable[tuple[str, Sequence[int]]], control_port_shift: int) -> list[str]:
    """An address for each task, of which no port or control port is one of another task.

    Args:
        offers: the host of each task, and ports that are free there, as are their control ports.
    """
    taken: set[tuple[str, int]] = set()
    addresses = []
    for host, ports in offers:
        pairs = ([(host, port), (host, control_port(port, control_port_shift))] for port in ports)
        pair = next(pair for pair in pairs if taken.isdisjoint(pair))
        taken.update(pair)
        port = pair[0][1]
        addresses.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return addresses


def port_of(number: int, control_port_shift: int) -> int:
    """The port of one of a host's tasks, of which no control port is the port of another one."""
    # In turns: as many ports as the shift is long, then their control ports.
    turn, place = divmod(number, control_port_shift)
    return FIRST_PORT + 2 * control_port_shift * turn + place


def num_ports(control_port_shift: int) -> int:
    """How many tasks of a host `port_of` has ports for."""
    turns, rest = divmod(_end_of_ports() - FIRST_PORT, 2 * control_port_shift)
    return turns * control_port_shift + max(0, rest - control_port_shift)


def _end_of_ports() -> int:
    """The first port that the kernel may give to an outgoing connection."""
    usual = linux.DEFAULT_EPHEMERAL_PORTS[0]
    first = (linux.ephemeral_ports() or linux.DEFAULT_EPHEMERAL_PORTS)[0]
    # Every host must find the same. The usual range is the limit where one has a higher or, leaving nothing, a lower
    # one; of the second the doctor warns.
    return min(first, usual) if first > FIRST_PORT else usual
