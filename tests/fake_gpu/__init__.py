"""GPUs on machines without one: a library for TensorFlow, compiled once; see `fake_gpu.cc`."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_gpu.cc")
COMPILER = os.environ.get("CXX", "g++")
# Those of TensorFlow's own build, on which the layout of its classes depends. The kernels' private members are read.
FLAGS = "-O1 -std=c++17 -shared -fPIC -w -fno-access-control -DEIGEN_MAX_ALIGN_BYTES=64 -D_GLIBCXX_USE_CXX11_ABI=1"

LOCAL = "/job:localhost/"  # how the names of devices begin that no cluster knows


def why_not() -> str:
    """Why there can be no fake GPUs here; "" if there can."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return f"fake GPUs are for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    return "" if shutil.which(COMPILER) else f"fake GPUs need a C++ compiler, and there is no {COMPILER}"


def library() -> Path:
    """The compiled library; tests that run side by side compile it once."""
    found = hashlib.sha256(SOURCE.read_bytes() + f"{COMPILER} {FLAGS} {version('tensorflow')}".encode()).hexdigest()
    path = Path(tempfile.gettempdir(), f"tf2dist-fake-gpu-{os.getuid()}", f"{found[:16]}.so")
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _compile(path)
    return path


def _compile(path: Path) -> None:
    # Found without importing TensorFlow, which takes seconds.
    spec = find_spec("tensorflow")
    package = (spec.submodule_search_locations or [""])[0] if spec else ""
    made = path.with_suffix(f".{os.getpid()}")
    command = [COMPILER, *FLAGS.split(), "-o", str(made), str(SOURCE), f"-I{package}/include", f"-L{package}"]
    done = subprocess.run([*command, "-l:libtensorflow_framework.so.2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    made.rename(path)  # a process beside this one sees the whole library or none


class FakeGpus:
    """Fake GPUs for commands, and what those have done with them.

    Attributes:
        env: the variables of the commands.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.env = {
            "FAKE_GPUS": str(count),
            "FAKE_GPU_LOG": str(folder),
            "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": str(library()),
        }

    def _lines(self, kind: str) -> Iterator[list[str]]:
        for path in self._folder.glob("*.log"):
            lines = (line.split() for line in path.read_text().splitlines())
            yield from (words[1:] for words in lines if words[0] == kind)

    def devices(self) -> dict[str, tuple[int, float, bool]]:
        """The devices of tasks by name, as "worker-0/GPU:1": the GPU's number, its fraction, whether it grows."""
        found = {}
        for name, number, fraction, grows in self._lines("device"):
            if not name.startswith(LOCAL):
                found[_short(name)] = int(number), round(float(fraction), 3), grows == "1"
        return found

    def numbers(self) -> set[int]:
        """The numbers of the GPUs that any process has used, in a cluster or not."""
        return {int(number) for _, number, *_ in self._lines("device")}

    def num_processes(self) -> int:
        """How many processes have made a device."""
        return len(list(self._folder.glob("*.log")))

    def kernels(self) -> dict[str, Counter[str]]:
        """How many kernels of each operation were made, by device."""
        found: dict[str, Counter[str]] = {}
        for name, operation in self._lines("kernel"):
            found.setdefault(_short(name), Counter())[operation] += 1
        return found


def _short(name: str) -> str:
    job, _, task, device = (part.partition(":")[2] for part in name.strip("/").split("/"))
    return f"{job}-{task}/{device.removeprefix('device:')}"
