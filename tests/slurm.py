"""A real SLURM for tests, where it is installed: its controller and each of its nodes on a private host of their own.

    with slurm(4, folder) as cluster:
        done = cluster.run("srun", "-N2", "-n2", sys.executable, "-m", "tf2dist", "cluster=slurm", ...)

The nodes are host0, host1 and so on; each believes that it has 8 cores and 4 GPUs.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import slowness
from tests.hosts import Host, Hosts, hosts

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "munged")
START_SECS = 60.0
CONF = """\
ClusterName=tests
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={0.name} NodeAddr={0.address} NodeHostname={0.name} CPUs=8 RealMemory=8000 Gres=gpu:4 State=UNKNOWN\n"


class Slurm:
    """The controller, on the last of the hosts, and the nodes on all others."""

    def __init__(self, made: Hosts, count: int, folder: Path) -> None:
        self._nodes, self._controller, self._folder = [made[index] for index in range(count)], made[count], folder
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._write_files()
        self._daemons = [self._start(self._controller, "munged", *self._munge_options())]
        self._wait("munged listens", lambda: (folder / "munge" / "socket").exists())
        self._daemons.append(self._start(self._controller, "slurmctld", "-D"))
        mount = f'mount --bind {folder}/hosts /etc/hosts && exec "$@"'
        in_own_mounts = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
        self._daemons += [self._start(node, *in_own_mounts, "slurmd", "-D", "-N", node.name) for node in self._nodes]
        idle = f"{count}\n"
        self._wait("all nodes are idle", lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout == idle)

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout_secs: float = 120.0
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command beside the controller, as on a login node; both outputs are in `stdout`."""
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self._controller.popen([*command], env={**self._env, **(env or {})}, cwd=self._folder, **streams)
        try:
            stdout, _ = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"not done in {timeout_secs} s: {command}\n{process.communicate()[0]}\n{self}")
        return subprocess.CompletedProcess(command, process.returncode, stdout)

    def lose(self, index: int) -> None:
        """A node is gone: its daemon and the tasks that run there end by SIGKILL."""
        node = self._nodes[index]
        for pid in node.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends all jobs and daemons."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        with contextlib.suppress(AssertionError):
            self._wait("all jobs have ended", lambda: not self.run("squeue", "-h").stdout)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)

    def _write_files(self) -> None:
        folder = self._folder
        (folder / "state").mkdir()
        # munged wants to be the only one who can write here.
        (folder / "munge").mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        nodes = "".join(NODE.format(node) for node in self._nodes)
        (folder / "slurm.conf").write_text(nodes + CONF.format(controller=self._controller, folder=folder))
        names = [f"{host.address} {host.name}\n" for host in (*self._nodes, self._controller)]
        # SLURM takes any files for the devices of GPUs.
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
        for number in range(4):
            (folder / f"gpu{number}").touch()
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))

    def _munge_options(self) -> list[str]:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        named = [f"--{option}={self._folder}/munge/{name}" for option, name in files.items()]
        return ["--foreground", "--force", *named]  # --force: it may run as root

    def _start(self, host: Host, *command: str) -> "subprocess.Popen[str]":
        name = f"{command[0]}-{host.name}.out"
        with (self._folder / name).open("w") as output:
            return host.popen([*command], env=self._env, stdout=output, stderr=subprocess.STDOUT)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECS
        while not condition():
            assert time.monotonic() < deadline, f"not within {START_SECS:.0f} s: {what}\n{self}"
            time.sleep(0.2)  # the interval between two checks

    def __str__(self) -> str:
        logs = sorted([*self._folder.glob("*.log"), *self._folder.glob("*.out")])
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)


@contextlib.contextmanager
def slurm(count: int, folder: Path) -> Iterator[Slurm]:
    """A SLURM of so many nodes; skips the test where there can be none."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"SLURM is not installed (no {missing[0]}); Debian and Ubuntu have it in slurm-wlm and munge")
    if os.geteuid():
        pytest.skip("a SLURM of the tests' own can only be started by root")
    with hosts(count + 1) as made:
        cluster = Slurm(made, count, folder)
        try:
            yield cluster
        finally:
            cluster.close()


SMALL = ("data=digits", "model=softmax", "figure=false", "devices.onednn=false")


def submit(nodes: Slurm, folder: Path, *options: str, common: Sequence[str] = SMALL) -> str:
    """Submits what `tf2dist.render` prints for these options; the output is in the folder. Returns the job's number."""
    lines = [f"--line=#SBATCH {line}" for line in (f"--chdir={folder}", f"--output={folder}/out")]
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    render = (sys.executable, "-m", "tf2dist.render", "slurm", "--submit", *lines)
    done = nodes.run(*render, *common, *options, env=env)
    found = re.search(r"^Submitted batch job (\d+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


def wait_for(what: str, folder: Path, condition: Callable[[], bool], secs: float = 100.0) -> None:
    """Waits for something that a job of `submit` does."""
    deadline = time.monotonic() + secs * slowness()
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}\n{(folder / 'out').read_text()}"
        time.sleep(0.5)  # the interval between two looks
