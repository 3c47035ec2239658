"""A JobSet for the modes with parameter servers: a child Job for each task, so that a lost worker returns alone."""

from dataclasses import replace

from tf2dist.tools.engines import pods
from tf2dist.tools.engines.request import JobRequest, check_mode

# Counts the child Jobs in the order of their kinds below, which is that of the ranks.
GLOBAL_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-global-index']"


def render(request: JobRequest) -> str:
    """The JobSet with everything that it needs; it makes the Service by itself.

    Raises:
        ConfigError: there are no parameter servers.
    """
    check_mode(request, needs_ps=True, other="kubernetes")
    return pods.to_text(request, [pods.claim(request), pods.network_policy(request), job_set(request)])


def job_set(request: JobRequest) -> tuple[str, pods.Manifest]:
    tasks = request.tasks
    hosts = [f"{request.name}-{task.job}-{task.index}-0.{request.name}" for task in tasks]
    counts = {task.job: task.index + 1 for task in tasks}
    comment = "Needs JobSet 0.12 or later, for RestartJob. Fill in an image that your nodes can pull."
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        # A worker that is just coming back when the chief is done has nothing left to do.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
        "failurePolicy": {
            "maxRestarts": request.restarts * len(tasks),
            "rules": [
                {"name": "error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                {"name": "lostWorker", "action": "RestartJob", "targetReplicatedJobs": ["worker"]},
            ],
        },
        "replicatedJobs": [child(request, job, count, hosts) for job, count in counts.items()],
    }
    meta = pods.metadata(request, queued=True)
    return comment, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec}


def child(request: JobRequest, job: str, count: int, hosts: list[str]) -> pods.Manifest:
    """The child Jobs of one kind, of one pod each; it is the JobSet that starts them again."""
    # A pod that is evicted makes room for another one of its Job, and the others can do without a worker meanwhile.
    is_given = any(argument.startswith("task.on_term=") for argument in request.arguments)
    if job == "worker" and request.config.mode == "async" and not is_given:
        request = replace(request, arguments=[*request.arguments, "task.on_term=leave"])
    spec = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "podFailurePolicy": pods.pod_failure_policy(job),
        "template": pods.pod(request, pods.container(request, job, job, hosts, GLOBAL_INDEX)),
    }
    return {"name": job, "replicas": count, "template": {"spec": spec}}
