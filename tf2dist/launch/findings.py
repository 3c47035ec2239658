"""Checks of the doctor: versions, processors, memory, folders, data, a private network, GPUs, plugins, TensorFlow.

None of them imports TensorFlow in this process. Those that need it import it in a process of their own: the checks of
GPUs, of plugins, and of an untested version.
"""

import json
import os
import platform
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from tf2dist import linux
from tf2dist.cluster.addresses import ips_of
from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.data import image_files, location
from tf2dist.data.known import IMAGES, ImageFiles
from tf2dist.errors import ConfigError, DataError
from tf2dist.files import is_path
from tf2dist.hosts.identity import PACKAGES
from tf2dist.launch.console import number_of
from tf2dist.linux import child_environment, code_command, import_limit
from tf2dist.tf_constants import KERAS_ON_TENSORFLOW, LOG_LEVEL, installed_version, tested_versions, untested

MEMORY_OF_TENSORFLOW_MB, MEMORY_OF_A_TASK_MB = 600, 250  # measured: 570 once, then 60 and MNIST in each task
RUN_DIR_MB = 200
ISOLATION_TIMEOUT_SECS = 20.0
# A process cannot leave a network namespace again, so the doctor does not enter one itself.
TRY_ISOLATION = "import sys; from tf2dist import linux; sys.exit(0 if linux.enter_private_network() else 3)"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output.

    Attributes:
        level: ok, warn or fail.
        fix: what to do about a warning or a failure.
    """

    level: str
    topic: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.topic}: {self.text}{'; ' if self.fix else ''}{self.fix}"


def versions() -> Iterator[Finding]:
    """Compares Python and the most important packages with the versions that this project requires."""
    try:
        tested = tested_versions()
    except metadata.PackageNotFoundError:
        yield Finding("warn", "versions", "tf2dist is not installed, so its requirements are unknown", "pip install .")
        return
    yield _version("python", platform.python_version(), tested["python"])
    for package in PACKAGES:
        try:
            yield _version(package, installed_version(package), tested.get(package, SpecifierSet()))
        except metadata.PackageNotFoundError:
            yield Finding("fail", "versions", f"{package} is not installed", "install tf2dist with its requirements")


def _version(name: str, installed: str, allowed: SpecifierSet) -> Finding:
    # By default a specifier matches no pre-release, not even one of a tested version.
    if allowed.contains(installed, prereleases=True):
        return Finding("ok", "versions", f"{name} {installed}")
    return Finding("fail", "versions", f"{name} {installed} is not {allowed}", f"install {name}{allowed}")


def processors(num_tasks: int, num_training: int) -> Iterator[Finding]:
    """Compares cores and memory with the tasks that this machine is to run."""
    # Those that this process may use: a container or taskset may allow fewer than the machine has.
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} cores for {num_training} {'task that computes' if num_training == 1 else 'tasks that compute'}"
    warning = Finding("warn", "cores", text, "fine for a trial; for speed use fewer workers or more hosts")
    yield warning if num_training > cores else Finding("ok", "cores", text)
    free, needed = linux.free_memory() >> 20, MEMORY_OF_TENSORFLOW_MB + MEMORY_OF_A_TASK_MB * num_tasks
    text = f"{free:,} MB free, about {needed:,} MB needed by {number_of(num_tasks, 'task')}"
    warning = Finding("warn", "memory", text, "use fewer tasks, or stop other programs")
    yield warning if free < needed else Finding("ok", "memory", text)


def run_folder(run_dir: str | None) -> Iterator[Finding]:
    """Whether the run's directory could be made, without making it."""
    target = Path(run_dir or "outputs").expanduser().absolute()
    try:
        is_text = is_path(str(target))
    except ConfigError as error:
        yield Finding("fail", "run_dir", *str(error).rsplit("; ", 1))
        return
    if not is_text:
        yield Finding("fail", "run_dir", f"{target} is not valid UTF-8", "name another directory with run_dir=")
        return
    # The nearest folder that exists; a broken link counts, since no directory can be made in its place.
    existing = next(folder for folder in (target, *target.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        yield Finding("fail", "run_dir", f"{existing} is not a directory", "name another directory with run_dir=")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("fail", "run_dir", f"{existing} cannot be written", "name another directory with run_dir=")
        return
    free = shutil.disk_usage(existing).free >> 20
    text = f"{target} can be written, {free:,} MB free"
    warning = Finding("warn", "run_dir", text, "make room, or name another directory with run_dir=")
    yield warning if free < RUN_DIR_MB else Finding("ok", "run_dir", text)


def training_data(config: DataConfig) -> Iterator[Finding]:
    """Whether the data is there or could be downloaded, without downloading it."""
    level = "fail" if config.offline == "fail" else "warn"
    if config.name == "digits":
        yield Finding("ok", "data", "digits comes with scikit-learn")
    elif config.name in location.MADE_UP:
        yield Finding("ok", "data", f"{config.name} is made up by each task")
    elif config.name not in IMAGES:
        # The function of a plugin may download, or take minutes.
        yield Finding("ok", "data", f"{config.name} comes from a plugin; its function is not called here")
    else:
        yield from _images(config, IMAGES[config.name], level)


def _images(config: DataConfig, images: ImageFiles, level: str) -> Iterator[Finding]:
    try:
        if found := image_files.find(config):
            for files in (found.train, found.test):
                image_files.check(config.name, files)
            yield Finding("ok", "data", f"{images.title} is in {found.folder}")
            return
        folder = image_files.tfds_dir(config)
    except DataError as error:
        yield Finding("fail" if found else level, "data", *str(error).rsplit("; ", 1))
        return
    if any(folder.glob(f"{config.name}/3.*")):
        yield Finding(level, "data", f"{images.title} in {folder} is incomplete", f"remove {folder / config.name}")
    # With a proxy it is the proxy that looks up the name, and this host need not know it.
    elif set(urllib.request.getproxies()) - {"no"} or ips_of(images.host):
        yield Finding("ok", "data", f"{images.title} is not in {folder} yet; the run downloads it from {images.host}")
    else:
        text = f"{images.title} is not in {folder}, and the name {images.host} cannot be resolved here"
        yield Finding(level, "data", text, images.way_out)


def isolation() -> Iterator[Finding]:
    """Whether a local cluster gets a network of its own."""
    command = code_command(TRY_ISOLATION)
    try:
        completed = subprocess.run(
            command, capture_output=True, timeout=ISOLATION_TIMEOUT_SECS, env=child_environment()
        )
        private = completed.returncode == 0
    except (OSError, subprocess.SubprocessError):
        private = False
    if private:
        yield Finding("ok", "isolation", "a local cluster gets a private network; nobody else can reach it")
        return
    text = "this system allows no private network: other hosts can reach the ports of a local cluster"
    yield Finding("warn", "isolation", text, "allow user namespaces, or close the ports in the firewall")


# These are for a TensorFlow that is compiled to byte code; see `import_limit`.
GPU_TIMEOUT_SECS = 60.0
PLUGINS_TIMEOUT_SECS = 60.0
INTERNALS_TIMEOUT_SECS = 40.0
# The process ends when the doctor ends, for whatever reason.
ENDS_WITH_DOCTOR = "import os; from tf2dist.linux import die_with_parent; die_with_parent(os.getppid())\n"
# The last line that each of these prints is what it has found, as JSON.
LIST_GPUS = """
import json
import tensorflow as tf
print(json.dumps([gpu.name for gpu in tf.config.list_physical_devices("GPU")]))
"""
TRY_INTERNALS = """
import json, os, sys
from tf2dist.tf_internals.probes import missing
print(json.dumps(missing()))
sys.stdout.flush()
os._exit(0)
"""
# Loads the plugins as a task does; the last line has the names of each group, or why a plugin cannot be loaded. The
# process ends by `os._exit`, because a plugin may have started threads that never end.
LOAD_PLUGINS = """
import json, os, sys
from tf2dist import registry
from tf2dist.data import loading
from tf2dist.model import builtin
from tf2dist.errors import RequestError, reason_of
for path in sys.argv[1:]:
    why = None
    try:
        registry.load_plugins([path])
    except RequestError as error:
        why = [str(error), ""]
    except ModuleNotFoundError as error:
        why = [f"it imports {error.name}, which is not installed", f"install it, or put {error.name}.py beside it"]
    except BaseException as error:
        why = [f"{type(error).__name__}: {reason_of(error)}", "correct the file"]
    if why:
        print(json.dumps({"path": path, "why": why}))
        break
else:
    named = {"model": registry.MODELS, "data": registry.DATA, "optimizer": registry.OPTIMIZERS}
    print(json.dumps({group: sorted(names) for group, names in named.items()}))
sys.stdout.flush()
os._exit(0)
"""
WITHOUT_GPUS = {
    "CUDA_VISIBLE_DEVICES": "-1",  # TensorFlow would take their memory, which a run may be using
    **KERAS_ON_TENSORFLOW,
    "PYTHONDONTWRITEBYTECODE": "1",  # the doctor leaves nothing behind, not even __pycache__
}


def _run(
    code: str, *arguments: str, timeout_secs: float, variables: dict[str, str]
) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Runs code that imports TensorFlow; returns what it has found, None if it did not come to that, and its end.

    Args:
        variables: of the environment.
    """
    environment = {**child_environment(), LOG_LEVEL: "3", **variables}
    command = code_command(ENDS_WITH_DOCTOR + code, *arguments)
    limit_secs = import_limit(timeout_secs)
    process = subprocess.run(command, capture_output=True, text=True, timeout=limit_secs, env=environment)
    try:
        return json.loads(process.stdout.strip().splitlines()[-1]), process  # libraries and plugins may print before it
    except (ValueError, IndexError):
        return None, process


def _why(process: subprocess.CompletedProcess[str]) -> str:
    """The exception with which a process has ended."""
    return (process.stderr.strip().splitlines() or ["no output"])[-1][:150]


def gpus(num_local_workers: int = 0) -> Iterator[Finding]:
    """The GPUs that TensorFlow finds, which takes some seconds, compared with those of the driver.

    Args:
        num_local_workers: the workers of a local cluster, which share them; 0 for another cluster.
    """
    # TensorFlow leaves out GPUs whose CUDA libraries it cannot load, and only its log says so.
    num_gpus = _driver_gpus()
    try:
        names, process = _run(LIST_GPUS, timeout_secs=GPU_TIMEOUT_SECS, variables={})
    except subprocess.TimeoutExpired as error:
        text = f"TensorFlow was not imported in {error.timeout:.0f} s"
        yield Finding("warn", "gpu", text, "try again when this machine is idle")
        return
    if names is None:
        yield Finding("fail", "gpu", f"TensorFlow cannot be imported ({_why(process)})", "install tf2dist again")
    elif num_gpus and not names:
        text = f"the driver has {num_gpus} GPUs and TensorFlow sees none"
        yield Finding("warn", "gpu", text, "pip install -e '.[gpu]', and look at CUDA_VISIBLE_DEVICES")
    else:
        text = f"TensorFlow sees {len(names)}" if names else "none; the CPUs do the work"
        yield Finding("ok", "gpu", text + (_sharing(len(names), num_local_workers) if names else ""))


def _sharing(num_gpus: int, num_workers: int) -> str:
    """How the workers of a local cluster, each of which gets one GPU, share them."""
    if not num_workers:
        return ""
    if num_workers <= num_gpus:
        unused = num_gpus - num_workers
        return "; each worker has one of its own" + (f", and {unused} are not used" if unused else "")
    return f"; {num_workers} workers share them in turn, up to {-(-num_workers // num_gpus)} on each"


def _driver_gpus() -> int:
    """How many GPUs nvidia-smi lists; 0 where there is no such program."""
    try:
        # The first nvidia-smi on the PATH may be any program, so it does not get the job token.
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, env=child_environment())
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def internals() -> Iterator[Finding]:
    """Whether the central ones of the private names that are used still exist; nothing for tested versions."""
    if not (packages := " and ".join(untested(["tensorflow", "keras"]))):
        return
    try:
        missing, process = _run(TRY_INTERNALS, timeout_secs=INTERNALS_TIMEOUT_SECS, variables=WITHOUT_GPUS)
    except subprocess.TimeoutExpired as error:
        text = f"{packages} could not be checked within {error.timeout:.0f} s"
        yield Finding("warn", "versions", text, "try again when this machine is idle")
        return
    if missing is None:
        yield Finding("fail", "versions", f"{packages} cannot be used ({_why(process)})", "install a tested version")
        return
    # Each line is an error message: the text, a semicolon, the way out.
    for line in missing:
        text, _, fix = line.rpartition("; ")
        yield Finding("fail", "versions", text, fix)
    if not missing:
        yield Finding("ok", "versions", f"{packages} has the internals on which most depends")


def plugins(config: RunConfig) -> Iterator[Finding]:
    """Whether the plugins can be loaded and register what is chosen; they run."""
    try:
        printed, process = _run(
            LOAD_PLUGINS, *config.plugins, timeout_secs=PLUGINS_TIMEOUT_SECS, variables=WITHOUT_GPUS
        )
    except subprocess.TimeoutExpired as error:
        text = f"not loaded within {error.timeout:.0f} s"
        yield Finding("warn", "plugins", text, "move slow code into the registered functions")
        return
    if printed is None:
        yield Finding(
            "fail", "plugins", f"loading them ends the process, exit code {process.returncode}", "correct them"
        )
        return
    if "why" in printed:
        yield Finding("fail", "plugins", f"{printed['path']}: {printed['why'][0]}", printed["why"][1])
        return
    # Without this a misspelt name would only be found after TensorFlow has started on every task.
    names = {"model": config.model["name"], "data": config.data.name, "optimizer": config.optimizer["name"]}
    for group, name in names.items():
        if name not in printed[group]:
            yield Finding(
                "fail",
                "plugins",
                f"{group} ({name}): no plugin registers it",
                f"choose one of {', '.join(printed[group])}",
            )
    yield Finding("ok", "plugins", f"{', '.join(config.plugins)}: can be loaded")
