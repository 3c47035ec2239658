"""Clusters that are described from outside: their checks, whoever describes them, and the text of TF_CONFIG."""

import ipaddress
import json
import re
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tf2dist.cluster.addresses import canonical_host, ip_in, split
from tf2dist.cluster.spec import ALL_JOBS, JOBS, Cluster, Place, Task
from tf2dist.config.schema import PS_MODES, RunConfig
from tf2dist.errors import ClusterError

EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
BROADCAST = ipaddress.IPv4Address("255.255.255.255")


def validated(source: str, jobs: dict[str, Any], task: dict[str, Any], mode: str) -> Place:
    """The cluster of these lists of addresses, and the task in it.

    Args:
        source: who says so, for errors.
        task: "type", which is the job, and "index".

    Raises:
        ClusterError: one line for each mistake that can be found without contacting other tasks.
    """
    problems = [*_job_problems(jobs, mode), *_address_problems(jobs)]
    # The counts need lists, and would only repeat what is said about a misspelled job.
    if not problems:
        problems += _count_problems(jobs, mode)
    problems += _task_problems(task, jobs)
    if problems:
        # Values may hold line breaks; each message stays on one line.
        raise ClusterError("\n".join(" ".join(f"{source}: {problem}".split()) for problem in problems))
    cluster = Cluster(mode, {job: tuple(addresses) for job, addresses in jobs.items() if addresses})
    return Place(cluster, Task(task["type"], int(task["index"])))


def _job_problems(jobs: dict[str, Any], mode: str) -> list[str]:
    problems = []
    for job, addresses in jobs.items():
        if job == "ps" and mode == "sync":
            problems.append("job ps: mode=sync has no parameter servers; remove it, or choose mode=async")
        elif job not in JOBS[mode]:
            problems.append(f"job {job}: there is no such job in mode={mode}; the jobs are {', '.join(JOBS[mode])}")
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            problems.append(f'job {job} ({addresses}): must be a list of "host:port" strings')
    return problems


def _address_problems(jobs: dict[str, Any]) -> list[str]:
    problems = []
    # By canonical address: the task that was the first to have it.
    first_tasks: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses if isinstance(addresses, list) else []):
            name = f"{job} {index} ({address})"
            # At most 9 digits, since `int` refuses very long numbers with an error of its own.
            match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,9})", str(address))
            if not match or not _is_host(match[1]):
                problems.append(f"{name}: must be host:port, such as host1:2222")
            elif reason := _why_not_one_host(match[1]):
                problems.append(f"{name}: must be host:port, and {match[1]} {reason}")
            elif not 1 <= int(match[2]) <= 65535:
                problems.append(f"{name}: the port must be from 1 to 65535")
            else:
                spelling = canonical(str(address))
                if spelling in first_tasks:
                    problems.append(f"{name}: the same address as {first_tasks[spelling]}; every task needs its own")
                first_tasks.setdefault(spelling, f"{job} {index} ({address})")
    return problems


def _is_host(host: str) -> bool:
    """Whether a text has the form of a name or of an address."""
    if ip_in(host):
        return True
    # The limits of DNS: 253 characters in all, 63 for each label.
    labels = host.removesuffix(".").split(".")
    return not host.startswith("[") and len(host) <= 253 and all(0 < len(label) <= 63 for label in labels)


def _why_not_one_host(host: str) -> str:
    """Why a name or an address does not identify one host, with the way out; "" if it does."""
    ip = ip_in(host)
    if ip is None:
        try:  # 0, 127.1, 0x7f000001 and 010.0.0.1 are not names: the system reads them as numbers
            ip_text = socket.inet_ntoa(socket.inet_aton(host))
        except OSError:
            return ""
        return f"is another way to write {ip_text}; give the address in full, or a name"
    if ip.is_unspecified:
        return "means all interfaces and not one host; give the address by which the others reach it"
    if ip.is_multicast or ip == BROADCAST:
        return "is an address of many hosts (multicast); give the task's own"
    return ""


def canonical(address: str) -> str:
    """One text for all spellings of the same "host:port", without looking up names.

    TensorFlow's servers listen on all interfaces, so all loopback addresses with one port count as the same.
    """
    return f"{canonical_host(address)}:{split(address)[1]}"


def _count_problems(jobs: dict[str, Any], mode: str) -> list[str]:
    # Of all jobs, since those that a mode does not have are refused before.
    counts = {job: len(jobs.get(job, [])) for job in ALL_JOBS}
    problems = []
    if counts["chief"] > 1:
        problems.append(f"job chief: has {counts['chief']} tasks; give at most one")
    if mode in PS_MODES:
        if counts["chief"] < 1:
            problems.append(f"job chief: is missing; mode={mode} needs one task as the coordinator")
        for job in ("ps", "worker"):
            if counts[job] < 1:
                problems.append(f"job {job}: is missing; mode={mode} needs at least one {job}")
    elif counts["chief"] + counts["worker"] < 1:
        problems.append("job worker: is missing; mode=sync needs at least one worker")
    return problems


def _task_problems(task: dict[str, Any], jobs: dict[str, Any]) -> list[str]:
    job, index = task.get("type"), task.get("index")
    # TensorFlow's documentation, TFJob and Vertex AI leave the evaluator out of the cluster, which it is no part of.
    is_unlisted = job == "evaluator" and not jobs.get(job)
    if not isinstance(job, str) or (job not in jobs and not is_unlisted):
        return [f"task type ({job}): must be one of the cluster's jobs: {', '.join(jobs)}"]
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index):
        index = int(index)  # TensorFlow accepts "0" too
    # In Python `true` would be the index 1.
    number = index if isinstance(index, int) and not isinstance(index, bool) else -1
    if is_unlisted:
        return [] if number >= 0 else [f"task index ({index}): must be a whole number, 0 or more"]
    if not isinstance(jobs[job], list):
        return []  # said of the job already
    count = len(jobs[job])
    if not 0 <= number < count:
        return [f"task index ({index}): job {job} has {count} tasks, so it must be from 0 to {max(0, count - 1)}"]
    return []


def find_in_tf_config(config: RunConfig, environ: Mapping[str, str]) -> Place:
    """The place that TF_CONFIG gives this process. Raises ClusterError, with one line for each mistake."""
    return validated("TF_CONFIG", *read_tf_config(environ), config.mode)


def read_tf_config(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The jobs and the task in TF_CONFIG, both not yet checked. Raises ClusterError if they are not there."""
    text = environ.get("TF_CONFIG")
    if not text:
        raise ClusterError(
            f"cluster (tf_config): the environment variable TF_CONFIG is not set; set it, for example to {EXAMPLE}"
        )
    try:
        parsed = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 12) : error.pos + 12]
        raise ClusterError(
            f"TF_CONFIG: not valid JSON at character {error.pos + 1} (near {near!r}): {error.msg}; "
            f"it looks like {EXAMPLE}"
        ) from None
    except (ValueError, RecursionError) as error:  # for example a number of 5,000 digits, or 100,000 brackets
        raise ClusterError(f"TF_CONFIG: cannot be read ({error}); it looks like {EXAMPLE}") from None
    if isinstance(parsed, dict) and "sparseCluster" in parsed:
        raise ClusterError(
            'TF_CONFIG: "sparseCluster" lists this task and its ps alone, and every task needs the whole "cluster"; '
            "leave enableDynamicWorker out of the TFJob"
        )
    for key in ("cluster", "task"):
        if not isinstance(parsed, dict) or not isinstance(parsed.get(key), dict):
            raise ClusterError(f'TF_CONFIG: "{key}" is missing or not an object; it looks like {EXAMPLE}')
    return _with_chief(parsed["cluster"], parsed["task"])


def _with_chief(jobs: dict[str, Any], task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The cluster and the task with "chief" for its old name "master", which TensorFlow and TFJob still accept."""
    if "master" in jobs and "chief" in jobs:
        raise ClusterError("TF_CONFIG: job master: is the old name of chief, which is given too; keep one")
    jobs = {"chief" if job == "master" else job: addresses for job, addresses in jobs.items()}
    return jobs, task | {"type": "chief"} if task.get("type") == "master" and "chief" in jobs else task


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses duplicate names, of which Python would silently take the last."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ClusterError(f'TF_CONFIG: "{name}" occurs {count} times; keep one')
    return dict(pairs)
