"""The doctor's checks that import TensorFlow, each in a process of its own: GPUs, plugins, an untested version."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from tf2dist.config.schema import RunConfig
from tf2dist.interpreter import child_environment, code_command
from tf2dist.launch.machine import Finding
from tf2dist.requirements import untested
from tf2dist.tf_constants import KERAS_ON_TENSORFLOW, LOG_LEVEL

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
from tf2dist.process import tf_internals
print(json.dumps(tf_internals.missing()))
sys.stdout.flush()
os._exit(0)
"""
# Loads the plugins as a task does; the last line has the names of each group, or why a plugin cannot be loaded. The
# process ends by `os._exit`, because a plugin may have started threads that never end.
LOAD_PLUGINS = """
import json, os, sys
from tf2dist import registry
from tf2dist.data import loading
from tf2dist.model import models
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

    Raises:
        subprocess.TimeoutExpired: it has not ended in time.
    """
    environment = {**child_environment(), LOG_LEVEL: "3", **variables}
    command = code_command(ENDS_WITH_DOCTOR + code, *arguments)
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_secs, env=environment)
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
    except subprocess.TimeoutExpired:
        text = f"TensorFlow was not imported in {GPU_TIMEOUT_SECS:.0f} s"
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
    """Whether the private names that are used still exist; nothing for tested versions, in which they do."""
    if not (packages := " and ".join(untested(["tensorflow", "keras"]))):
        return
    try:
        missing, process = _run(TRY_INTERNALS, timeout_secs=INTERNALS_TIMEOUT_SECS, variables=WITHOUT_GPUS)
    except subprocess.TimeoutExpired:
        text = f"{packages} could not be checked within {INTERNALS_TIMEOUT_SECS:.0f} s"
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
        yield Finding("ok", "versions", f"{packages} has all internals that tf2dist uses")


def plugins(config: RunConfig) -> Iterator[Finding]:
    """Whether the plugins can be loaded and register what is chosen; they run."""
    try:
        printed, process = _run(
            LOAD_PLUGINS, *config.plugins, timeout_secs=PLUGINS_TIMEOUT_SECS, variables=WITHOUT_GPUS
        )
    except subprocess.TimeoutExpired:
        text = f"not loaded within {PLUGINS_TIMEOUT_SECS:.0f} s"
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
