"""A script for Ray Train, whose workers run the command, one worker for each task."""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from tf2dist.errors import ConfigError
from tf2dist.tools.engines.job_request import JobRequest, filled

FILE = "job.py"


def render(request: JobRequest) -> str:
    """The script."""
    run_dir = request.config.run_dir
    if run_dir is None or not PurePosixPath(run_dir).is_absolute():
        raise ConfigError(
            f"run_dir ({run_dir or 'null'}): after a loss another node may go on; give the path of a directory that "
            "all nodes share, as in run_dir=/shared/runs/mine"
        )
    return filled(
        "ray_job.py",
        file=FILE,
        command="\n    ".join(f"{_literal(word)}," for word in request.command("cluster=ranks")),
        gang=_keywords(
            {"control_port_shift": request.config.cluster.control_port_shift, "stop_secs": request.stop_secs}
        ),
        scaling=_keywords(scaling(request)),
        restarts=request.restarts,
    )


def scaling(request: JobRequest) -> dict[str, object]:
    gpus = {"use_gpu": True} if request.gpus else {}
    resources = {"CPU": request.cpus or 1} | ({"GPU": request.gpus} if request.gpus else {})
    return {"num_workers": len(request.tasks), **gpus, "resources_per_worker": resources}


def _keywords(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in values.items())


def _literal(value: object) -> str:
    """The value in Python, with the double quotes that most people write."""
    text = json.dumps(value, ensure_ascii=False)
    return text if not isinstance(value, bool) and text.isprintable() else repr(value)
