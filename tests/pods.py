"""What engines start, as processes on private hosts, and the pods of rendered manifests.

    with hosts(3) as made:
        run = Pods(made, folder, pods_of(text))
        run.start("tf2dist-0", place=0)
        run.start("tf2dist-1", place=1)

The hosts are the addresses that pods get; one that comes back gets another place.
"""

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.conftest import slowness
from tests.hosts import Hosts

WAIT_SECS = 120.0
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GLOBAL_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-global-index']"
# Sets the host name, replaces /etc/hosts, and becomes the command.
SCRIPT = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
IN_POD = ("unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", SCRIPT, "sh")


class Pod(NamedTuple):
    """One task of an engine, in a container.

    Attributes:
        name: of its host.
        address: its name for the others; "" if they know only its address.
        mounts: the paths of its volumes, by their names.
        rules: of the podFailurePolicy of its Job.
    """

    name: str
    address: str
    command: list[str]
    env: dict[str, str]
    mounts: dict[str, str]
    rules: Sequence[dict[str, Any]] = ()

    def action(self, code: int) -> str:
        """What the Job does when the container has ended with this code: a rule, or it counts as a failure."""
        for rule in self.rules:
            if code in rule["onExitCodes"]["values"]:
                return str(rule["action"])
        return "Count" if code else "Complete"


def manifests(text: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def jobs(text: str) -> Iterator[tuple[dict[str, Any], list[tuple[str, dict[str, str]]]]]:
    """The specification of each Job, and of its pods the host names and the fields from which variables come."""
    found = manifests(text)
    if "Job" in found:
        spec = found["Job"]["spec"]
        yield spec, [(f"tf2dist-{number}", {INDEX: str(number)}) for number in range(spec["completions"])]
    elif "TrainJob" in found:
        trainer = found["TrainJob"]["spec"]["trainer"]
        (child,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        (container,) = child["template"]["spec"]["template"]["spec"]["containers"]
        container["command"] = trainer["command"]
        count = trainer["numNodes"]
        yield child["template"]["spec"], [(f"tf2dist-node-0-{n}", {INDEX: str(n)}) for n in range(count)]
    else:
        before = 0
        for child in found["JobSet"]["spec"]["replicatedJobs"]:
            numbers = range(child["replicas"])
            pods = [(f"tf2dist-{child['name']}-{n}-0", {GLOBAL_INDEX: str(before + n)}) for n in numbers]
            before += child["replicas"]
            yield child["template"]["spec"], pods


def pods_of(text: str) -> list[Pod]:
    """All pods of the manifests of one run, by rank."""
    return [_pod(spec, name, fields) for spec, its in jobs(text) for name, fields in its]


def _pod(spec: dict[str, Any], name: str, fields: Mapping[str, str]) -> Pod:
    (container,) = spec["template"]["spec"]["containers"]
    env: dict[str, str] = {}
    for one in container["env"]:
        is_field = "valueFrom" in one
        env[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]] if is_field else one["value"]
    command = [expanded(word, env) for word in container["command"]]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    return Pod(name, f"{name}.tf2dist", command, env, mounts, spec["podFailurePolicy"]["rules"])


def expanded(word: str, env: Mapping[str, str]) -> str:
    """A word of a command as Kubernetes fills it in: $$ is $, and $(NAME) stays if there is no such variable."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else env.get(found[2], found[0]), word)


class Started:
    """The process of one pod; its output goes to a file, so that it never waits for a reader."""

    def __init__(self, pod: Pod, process: "subprocess.Popen[str]", output: Path) -> None:
        self.pod, self.process, self._output = pod, process, output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def __str__(self) -> str:
        return f"=== {self.pod.name}: exit code {self.process.poll()}\n{self.output}"


class Pods:
    """The pods of one run, their names and their volumes, which are folders."""

    def __init__(self, made: Hosts, folder: Path, pods: Sequence[Pod]) -> None:
        self.hosts, self.folder = made, folder
        self.pods = {pod.name: pod for pod in pods}
        self.running: dict[str, Started] = {}
        self._all: list[Started] = []
        self._addresses: dict[str, str] = {}
        for volume in ("runs", "token"):
            (folder / volume).mkdir()
        (folder / "token" / "token").touch(mode=0o440)
        (folder / "token" / "token").write_text("of sixteen or more characters")
        self._names = folder / "names"
        self._write_names()

    def start(self, name: str, place: int, *, stale: bool = False) -> Started:
        """Starts a pod at this place.

        Args:
            stale: leaves its name at its last address until `publish` is called, as the records of the name server are.
        """
        pod = self.pods[name]
        if not stale:
            self.publish(name, place)
        output = self.folder / f"{len(self._all)}-{name}.out"
        with output.open("w") as file:
            process = self.hosts[place].popen(
                [*IN_POD, name, str(self._names), *(self._in_folder(pod, word) for word in pod.command)],
                cwd=self.folder,
                env={**_image(), **{key: self._in_folder(pod, value) for key, value in pod.env.items()}},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.running[name] = Started(pod, process, output)
        self._all.append(self.running[name])
        return self.running[name]

    def start_all(self, first_place: int = 0) -> None:
        for number, name in enumerate(self.pods):
            self.publish(name, first_place + number)
        for number, name in enumerate(self.pods):
            self.start(name, first_place + number)

    def publish(self, name: str, place: int) -> None:
        """Makes the name of a pod lead to a place."""
        if not self.pods[name].address:
            return
        self._addresses[self.pods[name].address] = self.hosts[place].address
        self._write_names()

    def wait(self, what: str, condition: Callable[[], Any], timeout_secs: float = WAIT_SECS) -> None:
        deadline = time.monotonic() + timeout_secs * slowness()
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_secs:.0f} s: {what}\n{self}"
            time.sleep(0.1)  # the interval between two looks

    def codes(self, *names: str) -> dict[str, int]:
        """The exit codes of the pods that are named, or of all, as a container has them."""
        result = {}
        for name in names or self.running:
            process = self.running[name].process
            self.wait(f"{name} ends", functools.partial(_has_ended, process))
            result[name] = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return result

    def actions(self, codes: Mapping[str, int]) -> dict[str, str]:
        """What the Job of each of these pods does when it has ended with this code."""
        return {name: self.pods[name].action(code) for name, code in codes.items()}

    def _in_folder(self, pod: Pod, text: str) -> str:
        for volume, path in pod.mounts.items():
            text = text.replace(path, str(self.folder / volume))
        return text

    def _write_names(self) -> None:
        # In place, since the file is mounted.
        lines = [f"{address} {name}\n" for name, address in self._addresses.items()]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def __str__(self) -> str:
        logs = sorted(self.folder.glob("runs/*/logs/*.log"))
        return "\n".join(
            [*map(str, self._all), *(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)]
        )


def _has_ended(process: "subprocess.Popen[str]") -> bool:
    return process.poll() is not None


def _image() -> dict[str, str]:
    """The environment of the image: that of the tests, in which `python` is the one that runs them."""
    ours = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "TF2DIST_TOKEN")}
    return ours | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
