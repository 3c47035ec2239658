"""A TrainJob of Kubeflow Trainer 2 for mode=sync, with the runtime for TensorFlow that the Trainer does not bring."""

from tf2dist.tools.engines import pods
from tf2dist.tools.engines.request import JobRequest, check_mode

API = "trainer.kubeflow.org"
NODE = "node"  # what the Trainer calls the child Job and its container, to which it gives the size and the command


def render(request: JobRequest) -> str:
    """The TrainJob with everything that it needs; its JobSet makes the Service.

    Raises:
        ConfigError: the tasks are of several kinds, which the nodes of a TrainJob are not.
    """
    check_mode(request, needs_ps=False, other="jobset")
    manifests = [pods.claim(request), pods.network_policy(request), runtime(request), train_job(request)]
    return pods.to_text(request, manifests)


def container(request: JobRequest) -> pods.Manifest:
    hosts = [f"{request.name}-{NODE}-0-{index}.{request.name}" for index in range(len(request.tasks))]
    return pods.container(request, NODE, "worker", hosts)


def runtime(request: JobRequest) -> tuple[str, pods.Manifest]:
    """The pods, without what the Trainer takes from the TrainJob."""
    child = {
        "completionMode": "Indexed",
        "backoffLimit": request.restarts * len(request.tasks),
        "podFailurePolicy": pods.pod_failure_policy(NODE),
        "template": pods.pod(request, _without(container(request), "command", "resources")),
    }
    template = {"metadata": {"labels": {f"{API}/trainjob-ancestor-step": "trainer"}}, "spec": child}
    job_set = {
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": NODE, "template": template}],
    }
    spec = {"mlPolicy": {"numNodes": len(request.tasks)}, "template": {"spec": job_set}}
    comment = "Fill in an image that your nodes can pull, here and below."
    meta = pods.metadata(request)
    meta["labels"][f"{API}/framework"] = "tensorflow"
    return comment, {"apiVersion": f"{API}/v1alpha1", "kind": "TrainingRuntime", "metadata": meta, "spec": spec}


def train_job(request: JobRequest) -> tuple[str, pods.Manifest]:
    its = container(request)
    trainer = {"numNodes": len(request.tasks), "image": its["image"], "command": its["command"]}
    spec = {
        "runtimeRef": {"apiGroup": API, "kind": "TrainingRuntime", "name": request.name},
        "trainer": trainer | {"resourcesPerNode": its["resources"]},
    }
    meta = pods.metadata(request, queued=True)
    return "The run.", {"apiVersion": f"{API}/v1alpha1", "kind": "TrainJob", "metadata": meta, "spec": spec}


def _without(tree: pods.Manifest, *names: str) -> pods.Manifest:
    return {name: value for name, value in tree.items() if name not in names}
