#!/bin/bash
# @DIRECTIVES@
# Add what your site asks for. --line '#SBATCH --partition=gpu' puts a line here.
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
##SBATCH --time=24:00:00
set -eu

# Add what makes "python" the one that has tf2dist, on every node:
# module load python
# source "$HOME/tf2dist/.venv/bin/activate"

# All files here are on a file system that the nodes share.
starts=${SLURM_RESTART_COUNT:-0}
# @RUN_DIR@
# Only you can read the token. A new start has a new one.
unset TF2DIST_TOKEN
export TF2DIST_TOKEN_FILE="$PWD/.@NAME@-$SLURM_JOB_ID.token"
rm -f "$TF2DIST_TOKEN_FILE"
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$TF2DIST_TOKEN_FILE")

code=0
@SRUN@ || code=$?

# The script has no trap, so that scancel ends it here and the job does not come back.
case $code in
@CODES@)  # lost tasks, or saved after the signal above or a preemption: go on from the last checkpoint
    if [ "$starts" -lt @RESTARTS@ ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit "$code"
    fi
    echo "not started again after $starts restarts" >&2
    ;;
esac
rm -f "$TF2DIST_TOKEN_FILE"
exit "$code"
