"""A script for sbatch, with one srun that starts the command in every task."""

import shlex

from tf2dist.tools.engines.job_request import LOST, STOPPED, JobRequest

# SLURM sends the signal up to 22 seconds early.
SIGNAL_SECS = 120

SCRIPT = """\
#!/bin/bash
{directives}
# Add what your site asks for. --line '#SBATCH --partition=gpu' puts a line here.
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
##SBATCH --time=24:00:00
set -eu

# Add what makes "python" the one that has tf2dist, on every node:
# module load python
# source "$HOME/tf2dist/.venv/bin/activate"

# All files here are on a file system that the nodes share.
starts=${{SLURM_RESTART_COUNT:-0}}
{run_dir}
# Only you can read the token. A new start has a new one.
unset TF2DIST_TOKEN
export TF2DIST_TOKEN_FILE="$PWD/.{name}-$SLURM_JOB_ID.token"
rm -f "$TF2DIST_TOKEN_FILE"
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "$TF2DIST_TOKEN_FILE")

code=0
{srun} || code=$?

# The script has no trap, so that scancel ends it here and the job does not come back.
case $code in
{codes})  # lost tasks, or saved after the signal above or a preemption: go on from the last checkpoint
    if [ "$starts" -lt {restarts} ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit "$code"
    fi
    echo "not started again after $starts restarts" >&2
    ;;
esac
rm -f "$TF2DIST_TOKEN_FILE"
exit "$code"
"""
# The number of the job alone does not do: SLURM may begin again at 1.
NEW_RUN_DIR = """\
# The first start chooses the run directory, and restarts go on in it. Not by the job's number, which may come again.
link="$PWD/runs/job-$SLURM_JOB_ID"
if [ "$starts" -eq 0 ] || [ ! -L "$link" ]; then
    mkdir -p runs
    ln -sfn "$PWD/runs/{name}-$(date +%Y%m%d_%H%M%S)-$SLURM_JOB_ID" "$link"
fi
run_dir=$(readlink "$link")
"""


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
    return SCRIPT.format(
        directives="\n".join(directives(request)),
        name=request.name,
        run_dir="" if own_run_dir else NEW_RUN_DIR.format(name=request.name),
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
