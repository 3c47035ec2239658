#!/bin/bash
#SBATCH --job-name=tf2dist
#SBATCH --ntasks=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
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
# The first start chooses the run directory, and restarts go on in it. Not by the job's number, which may come again.
link="$PWD/runs/job-$SLURM_JOB_ID"
if [ "$starts" -eq 0 ] || [ ! -L "$link" ]; then
    mkdir -p runs
    ln -sfn "$PWD/runs/tf2dist-$(date +%Y%m%d_%H%M%S)-$SLURM_JOB_ID" "$link"
fi
run_dir=$(readlink "$link")

# Only you can read the token. A new start has a new one.
unset TF2DIST_TOKEN
export TF2DIST_TOKEN_FILE="$PWD/.tf2dist-$SLURM_JOB_ID.token"
rm -f "$TF2DIST_TOKEN_FILE"
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$TF2DIST_TOKEN_FILE")

code=0
srun --kill-on-bad-exit=0 \
    env "TF2DIST_FIT_OPTIONS=mode=sync cluster=slurm run_dir='$run_dir'" python train.py --rate '1 2' || code=$?

# The script has no trap, so that scancel ends it here and the job does not come back.
case $code in
137|138|139|143)  # lost tasks, or saved after the signal above or a preemption: go on from the last checkpoint
    if [ "$starts" -lt 10 ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit "$code"
    fi
    echo "not started again after $starts restarts" >&2
    ;;
esac
rm -f "$TF2DIST_TOKEN_FILE"
exit "$code"
