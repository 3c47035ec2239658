"""The functions that the forked tasks of these tests run, without TensorFlow."""

import ctypes
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tf2dist.config.schema import DataConfig
from tf2dist.messages import ResultMessage, ToLauncher, ToTask, unpack


def succeed(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    print("hello from", payload["name"], flush=True)
    to_launcher.send(ResultMessage({"name": payload["name"]}))
    return 0


def use_wrappers(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Reports what has been imported before and after two parts of Keras are used; scikit-learn's digits are none."""
    import keras

    from tf2dist.data.loading import load

    heavy = ("matplotlib", "sklearn")
    load(DataConfig(name="digits"))
    before = [name for name in heavy if name in sys.modules]
    keras.wrappers.SKLearnClassifier(keras.Sequential([keras.layers.Dense(1)]))
    keras.visualization.plot_image_gallery  # noqa: B018
    to_launcher.send(ResultMessage({"before": before, "after": [name for name in heavy if name in sys.modules]}))
    return 0


def generate(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Has AutoGraph write a file, and reports what is in the folder for temporary files."""
    import tensorflow as tf

    def doubled(x: Any) -> Any:
        return x + x if x > 0 else x

    tf.function(doubled)(tf.constant(1.0))
    to_launcher.send(ResultMessage({"pid": os.getpid(), "files": os.listdir(tempfile.gettempdir())}))
    if payload["waits"]:
        threading.Event().wait()
    return 0


def fail(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    raise RuntimeError("this target is broken")


def leave(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    sys.exit(7)


def wait(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Reports that it runs, with a child of its own, and waits without end."""
    if payload.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    to_launcher.send(ResultMessage({"pid": os.getpid(), "child": child}))
    threading.Event().wait()
    return 0


def listen(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Listens on every interface, as TensorFlow's servers do."""
    server = socket.create_server(("", payload["port"]))
    interfaces = [name for _, name in socket.if_nameindex()]
    to_launcher.send(ResultMessage({"interfaces": interfaces}))
    server.accept()
    return 0


def hear(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Waits for one line from the launcher and reports the task that it names."""
    to_launcher.send(ResultMessage({}))
    to_launcher.send(ResultMessage({"heard": unpack(sys.stdin.readline().encode(), ToTask).task}))
    return 0


def surroundings(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Reports which variables with the job token this task and the fork server have."""
    server = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode().split("\0")
    names = [name for name in [*os.environ, *server] if name.startswith("TF2DIST_TOKEN")]
    to_launcher.send(ResultMessage({"names": names}))
    return 0


def where(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Reports what this process has of its launcher, and a number that no seed determines."""
    draw = float(sys.modules["numpy"].random.rand())
    to_launcher.send(ResultMessage({"cwd": os.getcwd(), "TF_CONFIG": os.environ["TF_CONFIG"], "draw": draw}))
    return 0


def leave_traces(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Reports what an earlier task has changed in its process, and changes the same."""
    to_launcher.send(ResultMessage({"left": [os.environ.get("LEFT"), "left" in sys.modules]}))
    os.environ["LEFT"], sys.modules["left"] = "1", os
    return 0


def exhaust(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Allocates more memory than a limit allows, in C++, like TensorFlow, which does not handle the failure."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL("libstdc++.so.6")._Znwm(ctypes.c_size_t(1 << 40))  # operator new
    return 0


def compute(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Needs more processor time than a limit allows."""
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1 << 20))
    while True:
        pass


def stand(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Never returns from user code, which includes this file, under the watchdog of a task."""
    from tf2dist.process import heartbeat

    heartbeat.LONG_CALL_EVERY_SECS, heartbeat.START_SECS = 1.0, 2.5
    heartbeat.start(to_launcher, 0.5)
    never_returns()
    return 0


def never_returns() -> None:
    threading.Event().wait()


def abort(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Ends with SIGABRT, as a library does after a failed check, without mentioning a limit."""
    print("now", flush=True)
    os.abort()
