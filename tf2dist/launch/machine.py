"""The doctor's checks of this machine: versions, processors, memory, folders, data, a private network.

None of them imports TensorFlow; see `tensorflow_findings`.
"""

import os
import platform
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tf2dist import linux
from tf2dist.cluster.addresses import ips_of
from tf2dist.config.schema import DataConfig
from tf2dist.data import location
from tf2dist.errors import ConfigError, DataError
from tf2dist.files import is_path
from tf2dist.interpreter import child_environment, code_command
from tf2dist.requirements import installed_version, tested_versions

PACKAGES = ("tensorflow", "keras", "numpy")
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
    tasks = "1 task" if num_tasks == 1 else f"{num_tasks} tasks"
    text = f"{free:,} MB free, about {needed:,} MB needed by {tasks}"
    warning = Finding("warn", "memory", text, "use fewer tasks, or stop other programs")
    yield warning if free < needed else Finding("ok", "memory", text)


def run_folder(run_dir: str | None) -> Iterator[Finding]:
    """Whether the run's directory could be made, without making it."""
    target = Path(run_dir or "outputs").expanduser().absolute()
    try:
        is_path(str(target))
    except ConfigError as error:
        yield Finding("fail", "run_dir", *str(error).rsplit("; ", 1))
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
    elif config.name != "mnist":
        # The function of a plugin may download, or take minutes.
        yield Finding("ok", "data", f"{config.name} comes from a plugin; its function is not called here")
    else:
        yield from _mnist(config, level)


def _mnist(config: DataConfig, level: str) -> Iterator[Finding]:
    try:
        folder = location.mnist_dir(config)
    except DataError as error:
        yield Finding(level, "data", *str(error).rsplit("; ", 1))
        return
    if files := location.mnist_files(folder):
        try:
            for file in files:
                location.check_mnist(file)
            yield Finding("ok", "data", f"MNIST is in {folder}")
        except DataError as error:
            yield Finding("fail", "data", *str(error).rsplit("; ", 1))
    elif any(folder.glob("mnist/3.*")):
        yield Finding(level, "data", f"MNIST in {folder} is incomplete", f"remove {folder / 'mnist'}")
    # With a proxy it is the proxy that looks up the name, and this host need not know it.
    elif set(urllib.request.getproxies()) - {"no"} or ips_of(location.MNIST_HOST):
        yield Finding("ok", "data", f"MNIST is not in {folder} yet; the run downloads it from {location.MNIST_HOST}")
    else:
        text = f"MNIST is not in {folder}, and the name {location.MNIST_HOST} cannot be resolved here"
        yield Finding(level, "data", text, "set TFDS_DATA_DIR to where it is, or give data=digits")


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
