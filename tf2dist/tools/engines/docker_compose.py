"""A file for Docker Compose: one container for each task, all on one machine."""

from typing import Any

from tf2dist.cluster import ranks
from tf2dist.cluster.spec import Task
from tf2dist.tools.engines.job_request import JobRequest
from tf2dist.tools.engines.kubernetes import dump

HEADER = """\
# Fill in an image of this machine. Compose restarts a container after every exit code but 0, also of wrong options.
# The token comes from your environment:
#   export TF2DIST_TOKEN=$(openssl rand -hex 32)
"""


def render(request: JobRequest) -> str:
    services = {str(task): service(request, rank, task) for rank, task in enumerate(request.tasks)}
    return HEADER + dump({"name": request.name, "services": services, "volumes": {"runs": {}}})


def service(request: JobRequest, rank: int, task: Task) -> dict[str, Any]:
    hosts = [str(each) for each in request.tasks]
    return {
        "image": request.image,
        "hostname": str(task),
        "entrypoint": [escaped(word) for word in request.container_command()],
        "environment": {
            ranks.OWN[0]: request.addresses(hosts),
            ranks.OWN[1]: str(rank),
            "TF2DIST_TOKEN": "${TF2DIST_TOKEN:?make one with openssl rand -hex 32}",
        },
        "volumes": [f"runs:{escaped(str(request.mounted_run_dir.parent))}"],
        # To Docker, on-failure:0 has no limit.
        "restart": f"on-failure:{request.restarts}" if request.restarts else "no",
        "stop_grace_period": f"{request.stop_secs}s",
        **limits(request, task),
    }


def escaped(text: str) -> str:
    """Compose fills in variables, and takes $$ for $."""
    return text.replace("$", "$$")


def limits(request: JobRequest, task: Task) -> dict[str, Any]:
    """Limits of what a worker may use; every worker has GPUs of its own."""
    if task.job != "worker":
        return {}
    first = request.gpus * task.index
    gpus = [str(number) for number in range(first, first + request.gpus)]
    devices = {"devices": [{"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}]}
    return {
        **({"cpus": request.cpus} if request.cpus else {}),
        **({"mem_limit": request.memory.replace("i", "").lower()} if request.memory else {}),
        **({"shm_size": "1gb"} if request.gpus > 1 else {}),  # NCCL connects GPUs through it, and 64 MB do not do
        **({"deploy": {"resources": {"reservations": devices}}} if gpus else {}),
    }
