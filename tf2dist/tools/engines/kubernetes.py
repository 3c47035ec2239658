"""An Indexed Job of Kubernetes for mode=sync: one pod for each worker, whose index is its rank."""

from tf2dist.tools.engines import pods
from tf2dist.tools.engines.request import JobRequest, check_mode


def render(request: JobRequest) -> str:
    """The Job with everything that it needs.

    Raises:
        ConfigError: the tasks are of several kinds, which one Job cannot have.
    """
    check_mode(request, needs_ps=False, other="jobset")
    manifests = [pods.claim(request), pods.network_policy(request), pods.service(request), job(request)]
    return pods.to_text(request, manifests)


def job(request: JobRequest) -> tuple[str, pods.Manifest]:
    count = len(request.tasks)
    hosts = [f"{request.name}-{index}.{request.name}" for index in range(count)]
    template = pods.pod(request, pods.container(request, "worker", "worker", hosts))
    template["spec"]["subdomain"] = request.name  # that of the Service
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # A loss ends all pods, and each of them counts.
        "backoffLimit": request.restarts * count,
        "podFailurePolicy": pods.pod_failure_policy("worker"),
        "template": template,
    }
    meta = pods.metadata(request, queued=True)
    return "Fill in an image that your nodes can pull.", {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": spec,
    }
