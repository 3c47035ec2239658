"""`python -m tf2dist.render`: the text for each engine, and that its tasks find the places that it gives them."""

import ast
import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from tests.conftest import BLOCKS, REPOSITORY
from tests.pods import jobs, manifests, pods_of
from tf2dist import linux, render
from tf2dist.cluster.addresses import split
from tf2dist.cluster.ranks import distinct_addresses
from tf2dist.cluster.sources import find_place, of_engine
from tf2dist.cluster.spec import Cluster
from tf2dist.config import for_fit
from tf2dist.config.load import load
from tf2dist.tools.engines import kubernetes
from tf2dist.tools.engines.job_request import JobRequest

RENDERED = Path(__file__).parent / "rendered"
TEMPLATES = sorted((REPOSITORY / "tf2dist/tools/engines/templates").glob("*.sh"))
ASYNC = ("mode=async", "cluster.num_workers=3", "cluster.num_ps=2", "train.steps=1000")
SYNC = ("mode=sync", "cluster.num_workers=2", "model=cnn", "optimizer.learning_rate=0.01")
PODS = ("--gpus", "1", "--cpus", "4", "--memory", "16Gi", "--image", "registry.example/tf2dist:1", "--queue", "team")
SHARED = "run_dir=/shared/runs/mine"
CASES = {
    "slurm.sh": ("slurm", *ASYNC, "--cpus", "4", "--line", "#SBATCH --partition=gpu"),
    "slurm_gpus.sh": ("slurm", *SYNC, "run_dir=runs/mine", "--gpus", "2", "--restarts", "3", "--name", "mine"),
    "kubernetes.yaml": ("kubernetes", *SYNC, *PODS, "--gpus", "2"),
    "jobset.yaml": ("jobset", *ASYNC, *PODS),
    "trainjob.yaml": ("trainjob", *SYNC, *PODS),
    "ray_job.py": ("ray", *ASYNC, SHARED, "--gpus", "1", "--cpus", "4", "--restarts", "3", "grace_secs=20"),
    "slurm_command.sh": ("slurm", "mode=sync", "cluster.num_workers=2", "--command", "python train.py --rate '1 2'"),
    "compose.yaml": ("compose", *ASYNC, "--gpus", "1", "--memory", "4Gi", "grace_secs=20"),
}
OF_PODS = ("kubernetes.yaml", "jobset.yaml", "trainjob.yaml")
SCRIPTS = ("slurm.sh", "slurm_gpus.sh", "slurm_command.sh")
SECRET = "a-secret-of-sixteen-characters"


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert render.run(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_as_it_was(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """To write the files anew: TF2DIST_RENDER=1 pytest tests/unit/test_render.py -k as_it_was."""
    monkeypatch.setenv("TF2DIST_TOKEN", SECRET)
    text = rendered(capsys, *CASES[name])
    assert SECRET not in text
    if os.environ.get("TF2DIST_RENDER"):
        (RENDERED / name).write_text(text, encoding="utf-8")
    assert text == (RENDERED / name).read_text(encoding="utf-8")


# SLURM


# What a template lacks until it is filled in: a number, and the variables of the script of which one is a part.
TEMPLATE_CODES = "SC2034,SC2154,SC2170"


@pytest.mark.parametrize("path", [*(RENDERED / name for name in SCRIPTS), *TEMPLATES], ids=lambda path: path.name)
def test_scripts_are_sound(path: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    subprocess.run(["bash", "-n", path], check=True)
    if not program:
        pytest.skip("shellcheck is not installed")
    codes = [f"--exclude={TEMPLATE_CODES}"] if path in TEMPLATES else []
    done = subprocess.run([program, "--shell=bash", *codes, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


SRUN = """#!/bin/bash
printf '%s\\n' "$@" > command
stat -c %a "$TF2DIST_TOKEN_FILE" >> modes
cat "$TF2DIST_TOKEN_FILE" >> tokens; echo >> tokens
exit $CODE
"""


def start(folder: Path, script: str, code: int, restarts: int = 0) -> tuple[int, list[str], bool]:
    """Runs a script as SLURM does, with such a step: its exit code, srun's arguments, and whether it requeues."""
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/bash\necho "$@" > requeued\n'}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    (folder / "requeued").unlink(missing_ok=True)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7"}
    env |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(["bash", RENDERED / script], cwd=folder, env=env, timeout=30, capture_output=True, text=True)
    with contextlib.suppress(FileNotFoundError):
        assert (folder / "requeued").read_text() == "requeue 7\n"
    return done.returncode, (folder / "command").read_text().splitlines(), (folder / "requeued").exists()


@pytest.mark.parametrize("code", [137, 138, 139, 143])
def test_the_script_starts_lost_tasks_again_but_not_for_ever(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, "slurm_gpus.sh", code)[::2] == (code, True)
    assert start(tmp_path, "slurm_gpus.sh", code, restarts=2)[::2] == (code, True)
    assert start(tmp_path, "slurm_gpus.sh", code, restarts=3)[::2] == (code, False)


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_script_does_not_repeat_what_is_done_or_wrong(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, "slurm_gpus.sh", code)[::2] == (code, False)
    assert not list(tmp_path.glob(".*.token")), "the token is gone"


def test_every_start_has_a_token_of_its_own_that_only_the_user_can_read(tmp_path: Path) -> None:
    start(tmp_path, "slurm.sh", 143)
    start(tmp_path, "slurm.sh", 0, restarts=1)
    assert (tmp_path / "modes").read_text().split() == ["600", "600"]
    tokens = (tmp_path / "tokens").read_text().split()
    assert len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)


def test_a_restart_goes_on_in_the_run_directory_and_another_job_of_the_number_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "of a user, with=signs [and more]"  # no colon, which ends a folder in PATH
    folder.mkdir()

    def run_dir(restarts: int) -> str | None:
        command = start(folder, "slurm.sh", 143, restarts)[1]
        return load(command[command.index("tf2dist") + 1 :], None).run_dir

    first = run_dir(0)
    assert first
    assert first.startswith(f"{folder}/runs/tf2dist-")
    assert run_dir(1) == run_dir(2) == first
    time.sleep(1.1)  # the directory has the second in its name
    again = run_dir(0)
    assert again != first
    assert run_dir(1) == again


def test_the_tasks_of_the_step_find_their_places(tmp_path: Path) -> None:
    words = start(tmp_path, "slurm.sh", 0)[1]
    assert words[:3] == ["--kill-on-bad-exit=0", "--cpus-per-task=4", "python"]
    config = load(words[words.index("tf2dist") + 1 :], None)
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[1-6]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
    }
    places = [find_place(config, step | {"SLURM_PROCID": str(rank)}) for rank in range(6)]
    assert [str(place.task) for place in places] == ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]
    assert "#SBATCH --ntasks=6\n" in (RENDERED / "slurm.sh").read_text()


# Kubernetes and Compose


@pytest.mark.parametrize("name", OF_PODS)
def test_every_pod_finds_its_place_at_its_own_name(name: str) -> None:
    seen: list[tuple[Cluster, str]] = []
    for pod in pods_of((RENDERED / name).read_text()):
        assert pod.command[:3] == ["python", "-m", "tf2dist"]
        config = load(pod.command[3:], None)
        cluster, task = find_place(config, pod.env)
        assert split(cluster.address(task)) == (pod.address, 12000)
        assert str(Path(str(config.run_dir)).parent) == pod.mounts["runs"]
        assert pod.env["TF2DIST_TOKEN_FILE"] == f"{pod.mounts['token']}/token"
        assert config.startup_timeout_secs == 600
        assert of_engine(pod.env) == "ranks", "for calls of fit"
        seen.append((cluster, str(task)))
    expected = ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]
    assert [task for _, task in seen] == (expected if name == "jobset.yaml" else ["worker-0", "worker-1"])
    assert all(cluster == seen[0][0] for cluster, _ in seen)


@pytest.mark.parametrize("name", OF_PODS)
def test_what_the_api_server_and_the_controllers_ask_for(name: str) -> None:
    """The rules that no schema has."""
    found = manifests(text := (RENDERED / name).read_text())
    for spec, _ in jobs(text):
        pod, rules = spec["template"]["spec"], spec["podFailurePolicy"]["rules"]
        assert pod["restartPolicy"] == "Never", "the only one with a podFailurePolicy"
        names = [container["name"] for container in pod["containers"]]
        assert {rule["onExitCodes"]["containerName"] for rule in rules} <= set(names)
        actions = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
        assert actions == {"FailJob": [1, 2, 3], "Ignore": [143], "Count": [137, 138, 139]}
        assert spec["completionMode"] == "Indexed"
        assert pod["terminationGracePeriodSeconds"] > 10, "grace_secs"
        labels = spec["template"]["metadata"]["labels"].items()
        assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels
        (rule,) = found["NetworkPolicy"]["spec"]["ingress"]
        assert rule["from"] == [{"podSelector": found["NetworkPolicy"]["spec"]["podSelector"]}]
        (claim,) = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert claim["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
        (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
        assert f"kubectl create secret generic {secret['secretName']} " in text
        assert not secret["defaultMode"] & (stat.S_IROTH | stat.S_IWOTH)
        assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    if name == "kubernetes.yaml":
        service = found["Service"]
        assert pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= labels
        assert spec["backoffLimit"] == 20, "restarts times tasks"
    else:
        runtime = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
        assert runtime["network"]["subdomain"] == "tf2dist", "that of the addresses"
        assert runtime["network"]["enableDNSHostnames"]


@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        ((), True),
        (("task.on_term=stop",), False),
        (("++task.on_term=stop",), False),
        (("mode=sync_replicas",), False),
    ],
    ids=["async", "stop", "plus", "replicas"],
)
def test_an_asynchronous_worker_leaves_alone(
    options: tuple[str, ...], leaves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = rendered(capsys, "jobset", "cluster.num_workers=2", *options)
    (job_set,) = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "JobSet"]
    for child in job_set["spec"]["replicatedJobs"]:
        (container,) = child["template"]["spec"]["template"]["spec"]["containers"]
        assert ("task.on_term=leave" in container["command"]) is (leaves and child["name"] == "worker")


def test_only_workers_have_gpus() -> None:
    of_pods = {
        child["name"]: child["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]
        for child in manifests((RENDERED / "jobset.yaml").read_text())["JobSet"]["spec"]["replicatedJobs"]
    }
    assert {job: "limits" in its for job, its in of_pods.items()} == {"chief": False, "ps": False, "worker": True}
    services = yaml.safe_load((RENDERED / "compose.yaml").read_text())["services"]
    numbers = {
        name: its["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, its in services.items()
        if "deploy" in its
    }
    assert numbers == {"worker-0": ["0"], "worker-1": ["1"], "worker-2": ["2"]}


def test_the_gpus_of_a_container_can_be_connected() -> None:
    """NCCL does so through /dev/shm."""
    (pod, *_) = pods_of((RENDERED / "kubernetes.yaml").read_text())
    assert pod.mounts["shm"] == "/dev/shm"
    assert "shm" not in pods_of((RENDERED / "jobset.yaml").read_text())[-1].mounts, "of one GPU"


def test_a_lost_worker_of_a_job_set_returns_alone() -> None:
    spec = manifests((RENDERED / "jobset.yaml").read_text())["JobSet"]["spec"]
    assert spec["failurePolicy"]["rules"][1:] == [
        {"name": "lostWorker", "action": "RestartJob", "targetReplicatedJobs": ["worker"]}
    ]
    assert {child["template"]["spec"]["backoffLimit"] for child in spec["replicatedJobs"]} == {0}


@pytest.mark.parametrize("name", OF_PODS)
@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
def test_the_schemas_of_kubernetes_accept_it(name: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for kind, document in manifests(text := (RENDERED / name).read_text()).items():
        if kind not in ("JobSet", "TrainJob", "TrainingRuntime"):  # not Kubernetes' own
            validator.validate(document, version, strict=True)
    for spec, _ in jobs(text):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "its"}, "spec": spec}
        validator.validate(job, version, strict=True)


MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_job_set_and_trainer_know_every_field(name: str) -> None:
    """The models of their API let unknown ones pass by themselves."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    documents = manifests((RENDERED / name).read_text())
    own = {kind: document for kind, document in documents.items() if kind in MODELS}
    assert own
    for kind, document in own.items():
        assert list(unknown_fields(getattr(models, MODELS[kind]), document)) == []
    document["spec"]["typo"] = 1
    assert list(unknown_fields(getattr(models, MODELS[kind]), document)) == ["typo"]


def unknown_fields(model: Any, tree: dict[str, Any]) -> Iterator[str]:
    """The names in a document that no field of a pydantic model has, at any depth."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, value in tree.items():
        if name not in fields:
            yield name
            continue
        inner = model_in(fields[name].annotation)
        # A quantity, such as 2Gi, is a number or a text to the API.
        for one in value if isinstance(value, list) else [value]:
            if inner and isinstance(one, dict) and "actual_instance" not in inner.model_fields:
                yield from unknown_fields(inner, one)


def model_in(annotation: Any) -> Any:
    """The model in an annotation such as list[Model] | None; None without one."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def test_every_service_of_compose_finds_its_place() -> None:
    services = yaml.safe_load((RENDERED / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        words = [word.replace("$$", "$") for word in service["entrypoint"]]
        cluster, task = find_place(load(words[3:], None), service["environment"])
        assert str(task) == name == service["hostname"]
        assert split(cluster.address(task)) == (name, 12000)
        assert service["stop_grace_period"] == "50s", "grace_secs=20, and more"


def test_compose_restarts_no_container_with_0_and_mounts_the_folder_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Docker takes on-failure:0 for any number."""
    arguments = ("compose", "mode=sync", "cluster.num_workers=1", "run_dir=/runs/a$b/y")
    for restarts, policy in (("0", "no"), ("3", "on-failure:3")):
        text = rendered(capsys, *arguments, "--restarts", restarts)
        (service,) = yaml.safe_load(text)["services"].values()
        assert service["restart"] == policy
        assert service["volumes"] == ["runs:/runs/a$$b"]
        assert "run_dir=/runs/a$$b/y" in service["entrypoint"]


@pytest.mark.parametrize("option", ["startup_timeout_secs=60", "++startup_timeout_secs=60"])
def test_pods_start_in_the_time_that_the_user_gives(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    (pod, *_) = pods_of(rendered(capsys, "kubernetes", "mode=sync", "++cluster.num_workers=3", option))
    assert [word for word in pod.command if "startup_timeout_secs" in word] == [option]
    assert pod.env["TF2DIST_ADDRESSES"].count(",") == 2, "three workers"


# Ray


def command_of(text: str) -> list[str]:
    """What the tasks of a script for Ray run."""
    (found,) = re.findall(r"^COMMAND = (\[.*?^\])$", text, re.M | re.S)
    words: list[str] = ast.literal_eval(found)
    return words


def test_every_worker_of_ray_finds_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_train = pytest.importorskip("tf2dist.tools.engines.ray_gang", reason="ray is not installed")
    monkeypatch.setattr(ray_train.ray, "get_gpu_ids", list)
    words = command_of((RENDERED / "ray_job.py").read_text())
    assert words[:3] == ["python", "-m", "tf2dist"]
    # Of those on one node, a port must be neither the port of another task nor its control port.
    offers = [("10.0.0.1", [20000, 21000, 22500, 30000])] * 3 + [(host, [20000]) for host in ("10.0.0.2", "fd00::3")]
    addresses = distinct_addresses([*offers, ("10.0.0.4", [20000])], 1000)
    assert addresses[:3] == ["10.0.0.1:20000", "10.0.0.1:22500", "10.0.0.1:30000"]
    assert addresses[3:] == ["10.0.0.2:20000", "[fd00::3]:20000", "10.0.0.4:20000"]
    places = []
    for rank in range(6):
        environ = {"TF_CONFIG": "of Ray", "PATH": os.environ["PATH"]}
        monkeypatch.setattr(os, "environ", environ)
        ray_train.take_place(addresses, rank, SECRET)
        places.append(find_place(load(words[3:], environ.get("TF_CONFIG")), environ))
        assert of_engine(environ) == "ranks", "for calls of fit"
        assert environ["TF2DIST_TOKEN"] == SECRET
    assert [str(place.task) for place in places] == ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]
    assert [place.cluster.address(place.task) for place in places] == addresses
    assert "ScalingConfig(num_workers=6, " in (RENDERED / "ray_job.py").read_text()


def test_a_task_of_ray_gets_free_ports_that_ray_does_not_use_itself() -> None:
    ray_train = pytest.importorskip("tf2dist.tools.engines.ray_gang", reason="ray is not installed")
    _, ports = ray_train.offer_ports(1000)
    assert len(set(ports)) == 64
    assert min(ports) >= 20000 or linux.ephemeral_ports()[0] < 22000
    assert all(linux.is_free(port) and linux.is_free(port + 1000) for port in ports[:5])


def test_a_control_port_lies_below_its_port_where_the_sum_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distinct_addresses([("a", [60000]), ("a", [40000, 30000])], 10_000) == ["a:60000", "a:30000"]
    ray_train = pytest.importorskip("tf2dist.tools.engines.ray_gang", reason="ray is not installed")
    # The kernel may be set so that outgoing connections have the highest ports alone.
    monkeypatch.setattr(linux, "ephemeral_ports", lambda: (65_000, 65_535))
    _, ports = ray_train.offer_ports(30_000)
    assert max(ports) > 35_535


# The command


@pytest.mark.parametrize("engine", ["slurm", "jobset", "compose", "ray"])
def test_options_arrive_as_the_user_has_written_them(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["run_dir='/runs/a b'", "init_layers='hidden$(1)|$HOME|$$|`x`|\"|\\w|#'", f"init_from={tmp_path}"]
    text = rendered(capsys, engine, *options)
    assert [word for word in words_of(engine, text) if word in options] == options


def test_an_experiment_on_this_machine_can_run_on_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of("slurm", rendered(capsys, "slurm", "experiment=staleness", "cluster.num_workers=9"))
    config = load(words[words.index("tf2dist") + 1 :], None)
    assert (config.cluster.kind, len(config.simulate.delay_secs)) == ("slurm", 9)


def words_of(engine: str, text: str) -> list[str]:
    """The command of the first task in what is printed, as the engine runs it."""
    if engine == "slurm":
        line = text[text.index("srun --kill") : text.index(" || code=$?")]
        line = line.replace("--kill-on-bad-exit=0", "")
        script = f"run_dir=/shared/runs/its\nsrun() {{ printf '%s\\n' \"$@\"; }}\n{line}"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    if engine == "compose":
        return [word.replace("$$", "$") for word in yaml.safe_load(text)["services"]["worker-0"]["entrypoint"]]
    return command_of(text) if engine == "ray" else pods_of(text)[0].command


@pytest.mark.parametrize("engine", render.ENGINES)
def test_a_program_of_the_user_gets_the_options(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one variable, of which `fit` makes its configuration."""
    sync = engine in ("kubernetes", "trainjob")
    options = ["mode=sync"] if sync else ["mode=async", "cluster.num_ps=2"]
    given = ["grace_secs=20", "run_dir='/shared/runs/a b'"]
    command = "OMP_NUM_THREADS=1 python train.py '$HOME' --rate '1 2'"
    words = words_of(engine, rendered(capsys, engine, *options, *given, "--command", command))
    assert words[0] == "env"
    assert words[2:] == ["OMP_NUM_THREADS=1", "python", "train.py", "$HOME", "--rate", "1 2"]
    name, _, value = words[1].partition("=")
    assert name == for_fit.VARIABLE
    found = for_fit.listed(value)
    assert found[: len(options) + 2] == [*options, *given]
    assert found[-1] == ("cluster=slurm" if engine == "slurm" else "cluster=ranks")
    for_fit.check(found, "the variable", for_fit.OF_JOB)
    assert load(found, None).run_dir == "/shared/runs/a b"


@pytest.mark.parametrize("engine", render.ENGINES)
def test_a_run_directory_under_the_name_of_hydra_is_the_only_one(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["mode=sync"] if engine in ("kubernetes", "trainjob") else ["mode=async", "cluster.num_ps=2"]
    words = words_of(engine, rendered(capsys, engine, *options, "hydra.run.dir=/shared/runs/a"))
    assert load(words[words.index("tf2dist") + 1 :], None).run_dir == "/shared/runs/a"


def test_a_program_of_the_user_gets_the_run_directory_of_the_job(tmp_path: Path) -> None:
    words = start(tmp_path, "slurm_command.sh", 0)[1]
    config = load(for_fit.listed(words[2].partition("=")[2]), None)
    assert str(config.run_dir).startswith(f"{tmp_path}/runs/tf2dist-")


def shown() -> Iterator[tuple[str, str]]:
    """The blocks of the page that show text, each with the options of the command above it."""
    options = ""
    for block in BLOCKS:
        if block.page != "docs/engines.md":
            continue
        text = block.text.replace("\\\n", "")  # the command goes on in the next line
        if command := re.search(r"^(?:\$ )?python -m tf2dist\.render (.*)$", text, re.MULTILINE):
            options = re.sub(r" --(out \S+|submit)", "", command[1])
        elif block.language in ("text", "yaml"):
            yield options, block.text


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = list(shown())
    assert len(blocks) == 5
    for options, block in blocks:
        text = rendered(capsys, *shlex.split(options))
        for part in block.split("...\n"):
            assert part in text


def test_the_image_is_for_the_user_of_the_manifests() -> None:
    """And has the files that installing the package needs."""
    text = (REPOSITORY / "Containerfile").read_text()
    assert re.findall(r"^USER (\d+)$", text, re.MULTILINE) == [str(kubernetes.USER)]
    copied = [name for line in re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert all((REPOSITORY / name).exists() for name in copied), copied
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "setup.py", "README.md", *project["license-files"]} <= set(copied)
    assert f"--tag {JobRequest.image} " in text
