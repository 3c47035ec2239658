"""Runs on hosts of their own, whose links are slower than this machine: network namespaces with a token bucket each."""

import contextlib
import tempfile
from pathlib import Path

from tests.bench.contenders import ContenderError, OurRun
from tests.hosts import hosts
from tests.jobs import Job

TIMEOUT_SECS = 400.0


def rate_over_links(
    mode: str, num_workers: int, num_ps: int, megabytes_per_sec: int, steps: int, *options: str
) -> float:
    """Global steps per second, after as many steps; every task is on a host of its own, with such a link each way.

    Raises:
        ContenderError: the run has failed, or hosts cannot be made here.
    """
    names = tuple(f"worker-{index}" for index in range(num_workers))
    if mode != "sync":
        names = ("chief-0", *(f"ps-{index}" for index in range(num_ps)), *names)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts(len(names)))
        made.limit(megabytes_per_sec * 1_000_000)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        job = Job(made, folder, mode, names)
        stack.callback(job.close)
        job.start("optimizer=sgd", "figure=false", f"train.steps={2 * steps}", *options)
        if job.code(job.leader, TIMEOUT_SECS):
            raise ContenderError(str(job))
        return OurRun(job.leader.run_dir, 0.0, 0.0).rate(steps)
