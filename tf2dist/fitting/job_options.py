"""The options that a job gives to the calls of `fit` in its script, in a variable that ``tf2dist.render`` sets."""

import itertools
from collections.abc import Mapping

from tf2dist.config import for_fit
from tf2dist.config.compose import name_of
from tf2dist.errors import FitError

_run_dirs = itertools.count(1)


def of_job(environ: Mapping[str, str], mode: str) -> list[str]:
    """The options of the job, for a call in this mode.

    Raises:
        FitError: they are not for `fit`, or the job is one of another mode.
    """
    overrides = for_fit.listed(environ.get(for_fit.VARIABLE, ""))
    for_fit.check(overrides, for_fit.VARIABLE, for_fit.OF_JOB)
    for override in overrides:
        name, _, value = override.partition("=")
        if name == "mode" and value != mode:
            raise FitError(f"mode ({mode!r}): the job was requested with mode={value}; give both the same")
    return [override for override in overrides if name_of(override) != "mode"]


def next_run_dir(run_dir: str) -> str:
    """The directory of the job for the next call without one: a second call must not resume the run of the first."""
    number = next(_run_dirs)
    return run_dir if number == 1 else f"{run_dir}-{number}"
