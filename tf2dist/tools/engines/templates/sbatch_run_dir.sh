# The first start chooses the run directory, and restarts go on in it. Not by the job's number, which may come again.
link="$PWD/runs/job-$SLURM_JOB_ID"
if [ "$starts" -eq 0 ] || [ ! -L "$link" ]; then
    mkdir -p runs
    ln -sfn "$PWD/runs/@NAME@-$(date +%Y%m%d_%H%M%S)-$SLURM_JOB_ID" "$link"
fi
run_dir=$(readlink "$link")
