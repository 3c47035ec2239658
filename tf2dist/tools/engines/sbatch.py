"""A script for sbatch, with one srun that starts the command in every task."""

import re
import shlex

from tf2dist.tools.engines.job_request import LOST, STOPPED, JobRequest, filled

# SLURM sends the signal up to 22 seconds early.
SIGNAL_SECS = 120
RUN_DIR = "\0"  # in a word, for the variable of the script that holds the run directory


def render(request: JobRequest) -> str:
    """The script, in which SLURM restarts the job after losses and time limits."""
    own_run_dir = request.config.run_dir is not None
    command = request.command("cluster=slurm", *([] if own_run_dir else [f"run_dir='{RUN_DIR}'"]))
    cpus = f"--cpus-per-task={request.cpus}"
    srun = [
        "srun",
        "--kill-on-bad-exit=0",
        *([cpus] if request.cpus else []),
    ]  # srun takes no --cpus-per-task of sbatch
    return filled(
        "sbatch.sh",
        directives="\n".join(directives(request)),
        name=request.name,
        # The number of the job alone does not do: SLURM may begin again at 1.
        run_dir="" if own_run_dir else filled("sbatch_run_dir.sh", name=request.name),
        srun=f"{shlex.join(srun)} \\\n    {' '.join(map(in_shell, command))}",
        codes="|".join(map(str, (*LOST, STOPPED))),
        restarts=request.restarts,
    )


def in_shell(word: str) -> str:
    """A word as a shell reads it; the run directory is filled in by the script."""
    if RUN_DIR not in word:
        return shlex.quote(word)
    escaped = re.sub(r'([\\"`$])', r"\\\1", word)
    return f'"{escaped}"'.replace(RUN_DIR, "$run_dir")


def directives(request: JobRequest) -> list[str]:
    """The lines for sbatch. SLURM has no memory of a task, and sites differ in what they allow: --line adds that."""
    options = [
        f"--job-name={request.name}",
        f"--ntasks={len(request.tasks)}",
        *([f"--cpus-per-task={request.cpus}"] if request.cpus else []),
        *([f"--gpus-per-task={request.gpus}"] if request.gpus else []),
        "--requeue",
        "--open-mode=append",
        # To the tasks, and not to the script, which would die of it.
        f"--signal=TERM@{max(SIGNAL_SECS, request.stop_secs)}",
    ]
    return [*(f"#SBATCH {option}" for option in options), *request.lines]
