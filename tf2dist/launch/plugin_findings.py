"""The doctor's check of plugins, which loads them in a process of their own."""

import json
import subprocess
from collections.abc import Iterator

from tf2dist.config.schema import RunConfig
from tf2dist.interpreter import child_environment, code_command
from tf2dist.launch.machine import Finding

PLUGINS_TIMEOUT_SECS = 60.0
# Loads the plugins as a task does; the last line has the names of each group, or why a plugin cannot be loaded. The
# process ends by `os._exit`, because a plugin may have started threads that never end.
LOAD_PLUGINS = """
import json, os, sys
from tf2dist.linux import die_with_parent
die_with_parent(os.getppid())
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


def run_with_tensorflow(code: str, *arguments: str, timeout_secs: float) -> subprocess.CompletedProcess[str]:
    """Runs code that imports TensorFlow and Keras, as a task does but without GPUs, in a process of its own.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time.
    """
    environment = {
        **child_environment(),
        "KERAS_BACKEND": "tensorflow",
        "KERAS_NNX_ENABLED": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",  # TensorFlow would take their memory, which a run may be using
        "PYTHONDONTWRITEBYTECODE": "1",  # the doctor leaves nothing behind, not even __pycache__
    }
    command = code_command(code, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_secs, env=environment)


def of_plugins(config: RunConfig) -> Iterator[Finding]:
    """Whether the plugins can be loaded and register what is chosen; they run, in a process of their own."""
    try:
        done = run_with_tensorflow(LOAD_PLUGINS, *config.plugins, timeout_secs=PLUGINS_TIMEOUT_SECS)
        printed = json.loads(done.stdout.strip().splitlines()[-1])  # plugins may print before it
    except subprocess.TimeoutExpired:
        text = f"not loaded within {PLUGINS_TIMEOUT_SECS:.0f} s"
        yield Finding("warn", "plugins", text, "move slow code into the registered functions")
        return
    except (ValueError, IndexError):
        yield Finding("fail", "plugins", f"loading them ends the process, exit code {done.returncode}", "correct them")
        return
    if "why" in printed:
        yield Finding("fail", "plugins", f"{printed['path']}: {printed['why'][0]}", printed["why"][1])
        return
    # Without this a misspelt name would only be found after TensorFlow has started on every task.
    chosen = {"model": config.model["name"], "data": config.data.name, "optimizer": config.optimizer["name"]}
    for group, name in chosen.items():
        if name not in printed[group]:
            yield Finding(
                "fail",
                "plugins",
                f"{group} ({name}): no plugin registers it",
                f"choose one of {', '.join(printed[group])}",
            )
    yield Finding("ok", "plugins", f"{', '.join(config.plugins)}: can be loaded")
