"""Requests to Kubernetes: an Indexed Job, a JobSet or a TrainJob, with all that its pods need.

kubernetes    an Indexed Job, for mode=sync: one pod for each worker, whose index is its rank
jobset        a JobSet, for the modes with parameter servers: a child Job for each task, so that a lost worker returns
              alone
trainjob      a TrainJob of Kubeflow Trainer 2, for mode=sync, with the runtime for TensorFlow that the Trainer does not
              bring
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from tf2dist.cluster import ranks
from tf2dist.config.compose import name_of
from tf2dist.config.schema import RunConfig
from tf2dist.tools.engines.job_request import FAILED_FOR_GOOD, LOST, STOPPED, JobRequest, check_mode

Manifest = dict[str, Any]
TOKEN_DIR = "/etc/tf2dist"
USER = 1000  # of the image
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"  # the field of a pod with its rank in a Job
SHM = {"name": "shm", "mountPath": "/dev/shm"}  # through which NCCL connects GPUs; runtimes give it 64 MB otherwise
START_SECS = 600  # in which all pods must have started: some may wait for a node, and a node for the image
MEMORY = "2Gi"  # what a task needs at least, with TensorFlow
# Counts the child Jobs in the order of their kinds below, which is that of the ranks.
GLOBAL_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-global-index']"
TRAINER_API = "trainer.kubeflow.org"
NODE = "node"  # what the Trainer calls the child Job and its container, to which it gives the size and the command


def to_text(request: JobRequest, manifests: Sequence[tuple[str, Manifest]]) -> str:
    """The manifests as YAML, each with the comment before it, and before all of them how to make the Secret."""
    text = (
        f"# The pods wait for their token, which stands in no file. Make it once:\n"
        f"#   kubectl create secret generic {request.name}-token --from-literal=token=$(openssl rand -hex 32)\n"
    )
    for comment, manifest in manifests:
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        text += f"---\n{lines}{dump(manifest)}"
    return text


def dump(tree: Manifest) -> str:
    text: str = yaml.dump(tree, Dumper=_WithoutAliases, sort_keys=False, width=1_000_000, allow_unicode=True)
    return text


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def manifest(api: str, kind: str, meta: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": meta, "spec": spec}


def metadata(request: JobRequest, suffix: str = "", *, queued: bool = False) -> Manifest:
    queue = {"kueue.x-k8s.io/queue-name": request.queue} if queued and request.queue else {}
    return {"name": request.name + suffix, "labels": labels(request) | queue}


def labels(request: JobRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tf2dist", "app.kubernetes.io/instance": request.name}


def claim(request: JobRequest) -> tuple[str, Manifest]:
    """The volume of the run directory, which the pods of all nodes mount."""
    comment = "Fill in a storageClassName whose volumes several nodes can mount, unless the default one is such."
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}}
    return comment, manifest("v1", "PersistentVolumeClaim", metadata(request, "-runs"), spec)


def network_policy(request: JobRequest) -> tuple[str, Manifest]:
    """Lets only the pods of the job reach each other."""
    own = {"matchLabels": labels(request)}
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    comment = "TensorFlow's servers have no password. Your network must be one that enforces policies."
    return comment, manifest("networking.k8s.io/v1", "NetworkPolicy", metadata(request), spec)


def service(request: JobRequest) -> tuple[str, Manifest]:
    """Gives every pod of the job a name, also before it is ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(request)}
    return "The names of the pods.", manifest("v1", "Service", metadata(request), spec)


def pod_failure_policy(container: str) -> Manifest:
    """An error ends the job, a lost task counts, and one that has saved after SIGTERM starts again without counting."""
    actions = {"FailJob": FAILED_FOR_GOOD, "Ignore": (STOPPED,), "Count": LOST}
    return {
        "rules": [
            {
                "action": action,
                "onExitCodes": {"containerName": container, "operator": "In", "values": list(codes)},
            }
            for action, codes in actions.items()
        ]
    }


def pod(request: JobRequest, container: Manifest) -> Manifest:
    """The template of a pod with this container, for namespaces of the level "restricted", too."""
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.stop_secs,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{request.name}-runs"}},
            {"name": "token", "secret": {"secretName": f"{request.name}-token", "defaultMode": 0o440}},
            *([{"name": "shm", "emptyDir": {"medium": "Memory"}}] if SHM in container["volumeMounts"] else []),
        ],
    }
    return {"metadata": {"labels": labels(request)}, "spec": spec}


def container(request: JobRequest, name: str, job: str, hosts: Sequence[str], rank: str = INDEX) -> Manifest:
    """The container of the tasks of one job.

    Args:
        hosts: the names of all pods, by rank.
        rank: the field of the pod that holds its rank.
    """
    return {
        "name": name,
        "image": request.image,
        "command": command(request),
        "env": [
            {"name": ranks.OWN[0], "value": request.addresses(hosts)},
            {"name": ranks.OWN[1], "valueFrom": {"fieldRef": {"fieldPath": rank}}},
            {"name": "TF2DIST_TOKEN_FILE", "value": f"{TOKEN_DIR}/token"},
        ],
        "resources": resources(request, job),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "runs", "mountPath": str(request.mounted_run_dir.parent)},
            {"name": "token", "mountPath": TOKEN_DIR, "readOnly": True},
            *([SHM] if job == "worker" and request.gpus > 1 else []),
        ],
    }


def gives(request: JobRequest, name: str) -> bool:
    """Whether the user has given an option, perhaps with the value that is its default."""
    return any(name_of(argument) == name for argument in request.arguments)


def command(request: JobRequest) -> list[str]:
    is_chosen = request.config.startup_timeout_secs != RunConfig().startup_timeout_secs  # in a file, for example
    options = [] if is_chosen or gives(request, "startup_timeout_secs") else [f"startup_timeout_secs={START_SECS}"]
    # Kubernetes takes $$ for $, and fills in $(NAME).
    return [word.replace("$", "$$") for word in request.container_command(*options)]


def resources(request: JobRequest, job: str) -> Manifest:
    """The resources that the tasks of a job need; chief and ps compute nothing on GPUs."""
    if job != "worker":
        return {"requests": {"cpu": "1", "memory": MEMORY}}
    limits = {"memory": request.memory} if request.memory else {}
    gpus: dict[str, Any] = {"nvidia.com/gpu": request.gpus} if request.gpus else {}
    requests = {"cpu": str(request.cpus or 1), "memory": request.memory or MEMORY}
    return {"requests": requests} | ({"limits": limits | gpus} if limits or gpus else {})


def render_job(request: JobRequest) -> str:
    """The Job with everything that it needs."""
    check_mode(request, needs_ps=False, other="jobset")
    manifests = [claim(request), network_policy(request), service(request), job(request)]
    return to_text(request, manifests)


def job(request: JobRequest) -> tuple[str, Manifest]:
    count = len(request.tasks)
    hosts = [f"{request.name}-{index}.{request.name}" for index in range(count)]
    template = pod(request, container(request, "worker", "worker", hosts))
    template["spec"]["subdomain"] = request.name  # that of the Service
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # A loss ends all pods, and each of them counts.
        "backoffLimit": request.restarts * count,
        "podFailurePolicy": pod_failure_policy("worker"),
        "template": template,
    }
    return "Fill in an image that your nodes can pull.", manifest(
        "batch/v1", "Job", metadata(request, queued=True), spec
    )


def render_job_set(request: JobRequest) -> str:
    """The JobSet with everything that it needs; it makes the Service by itself."""
    check_mode(request, needs_ps=True, other="kubernetes")
    return to_text(request, [claim(request), network_policy(request), job_set(request)])


def job_set(request: JobRequest) -> tuple[str, Manifest]:
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
    return comment, manifest("jobset.x-k8s.io/v1alpha2", "JobSet", metadata(request, queued=True), spec)


def child(request: JobRequest, job: str, count: int, hosts: list[str]) -> Manifest:
    """The child Jobs of one kind, of one pod each; it is the JobSet that starts them again."""
    # A pod that is evicted makes room for another one of its Job, and the others can do without a worker meanwhile.
    if job == "worker" and request.config.mode == "async" and not gives(request, "task.on_term"):
        request = replace(request, arguments=[*request.arguments, "task.on_term=leave"])
    spec = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(job),
        "template": pod(request, container(request, job, job, hosts, GLOBAL_INDEX)),
    }
    return {"name": job, "replicas": count, "template": {"spec": spec}}


def render_train_job(request: JobRequest) -> str:
    """The TrainJob with everything that it needs; its JobSet makes the Service."""
    check_mode(request, needs_ps=False, other="jobset")
    manifests = [claim(request), network_policy(request), runtime(request), train_job(request)]
    return to_text(request, manifests)


def node_container(request: JobRequest) -> Manifest:
    hosts = [f"{request.name}-{NODE}-0-{index}.{request.name}" for index in range(len(request.tasks))]
    return container(request, NODE, "worker", hosts)


def runtime(request: JobRequest) -> tuple[str, Manifest]:
    """The pods, without what the Trainer takes from the TrainJob."""
    remaining = {name: value for name, value in node_container(request).items() if name not in ("command", "resources")}
    child = {
        "completionMode": "Indexed",
        "backoffLimit": request.restarts * len(request.tasks),
        "podFailurePolicy": pod_failure_policy(NODE),
        "template": pod(request, remaining),
    }
    template = {"metadata": {"labels": {f"{TRAINER_API}/trainjob-ancestor-step": "trainer"}}, "spec": child}
    job_set = {
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": NODE, "template": template}],
    }
    spec = {"mlPolicy": {"numNodes": len(request.tasks)}, "template": {"spec": job_set}}
    comment = "Fill in an image that your nodes can pull, here and below."
    meta = metadata(request)
    meta["labels"][f"{TRAINER_API}/framework"] = "tensorflow"
    return comment, manifest(f"{TRAINER_API}/v1alpha1", "TrainingRuntime", meta, spec)


def train_job(request: JobRequest) -> tuple[str, Manifest]:
    its = node_container(request)
    trainer = {"numNodes": len(request.tasks), "image": its["image"], "command": its["command"]}
    spec = {
        "runtimeRef": {"apiGroup": TRAINER_API, "kind": "TrainingRuntime", "name": request.name},
        "trainer": trainer | {"resourcesPerNode": its["resources"]},
    }
    return "The run.", manifest(f"{TRAINER_API}/v1alpha1", "TrainJob", metadata(request, queued=True), spec)
