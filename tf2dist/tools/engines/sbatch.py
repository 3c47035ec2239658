"""A script for sbatch, with one srun that starts the command in every task."""

import shlex

from tf2dist.tools.engines.job_request import LOST, STOPPED, JobRequest, filled

# SLURM sends the signal up to 22 seconds early.
SIGNAL_SECS = 120


def render(request: JobRequest) -> str:
    """The script, in which SLURM restarts the job after losses and time limits."""
    own_run_dir = request.config.run_dir is not None
    command = shlex.join(request.command("cluster=slurm")) + ("" if own_run_dir else """ "run_dir='$run_dir'\"""")
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
        srun=f"{shlex.join(srun)} \\\n    {command}",
        codes="|".join(map(str, (*LOST, STOPPED))),
        restarts=request.restarts,
    )


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
