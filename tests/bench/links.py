"""Runs on hosts of their own, which are network namespaces: what crosses their links, and what slow links cost."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.contenders import ContenderError, OurRun
from tests.hosts import Hosts, hosts
from tests.jobs import Job

SOCKETS = Path(__file__).with_name("sockets.py")
TIMEOUT_SECS = 500.0
BYTES_PER_SEC = 100_000_000  # about a gigabit


@contextlib.contextmanager
def finished_job(
    mode: str, num_workers: int, num_ps: int, bytes_per_sec: int, *options: str
) -> Iterator[tuple[Hosts, OurRun]]:
    """A run that has ended, with each task on a host of its own: the leader first, the last worker last.

    Args:
        bytes_per_sec: of each host's link, each way.

    Raises:
        ContenderError: the run has failed.
    """
    names = tuple(f"worker-{index}" for index in range(num_workers))
    if mode != "sync":
        names = ("chief-0", *(f"ps-{index}" for index in range(num_ps)), *names)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts(len(names)))
        made.limit(bytes_per_sec)
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        job = Job(made, Path(folder), mode, names)
        stack.callback(job.close)
        job.start("optimizer=sgd", "figure=false", f"plugins=[{SOCKETS}]", *options)
        try:
            code = job.code(job.leader, TIMEOUT_SECS)
        except AssertionError as error:
            raise ContenderError(str(error)) from None
        if code:
            raise ContenderError(str(job))
        yield made, OurRun(job.leader.run_dir, 0.0, 0.0)


def rate_over_links(
    mode: str, num_workers: int, num_ps: int, steps: int, *options: str, bytes_per_sec: int = BYTES_PER_SEC
) -> float:
    """Global steps per second, after as many steps, with links of `bytes_per_sec`."""
    length = f"train.steps={2 * steps}"
    with finished_job(mode, num_workers, num_ps, bytes_per_sec, length, *options) as (_, run):
        return run.rate(steps)


def megabytes_of_a_step(mode: str, num_workers: int, steps: int, *options: str, num_ps: int = 1) -> float:
    """What a worker sends and receives in each of its steps."""
    totals = []
    # Without a limit a busy kernel drops packets between the hosts and sends them again, which would count twice.
    limit = 2 * BYTES_PER_SEC
    for length in (steps, 3 * steps):
        with finished_job(mode, num_workers, num_ps, limit, f"train.steps={length}", *options) as (made, _):
            last = num_workers - 1 if mode == "sync" else num_workers + num_ps
            totals.append(made[last].transferred())
    return (totals[1] - totals[0]) / (2 * steps) / 1e6
