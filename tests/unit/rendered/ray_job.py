"""Trains on a Ray cluster: each worker of Ray Train is a task of tf2dist.

On a machine of the cluster: python job.py. From elsewhere: ray job submit --working-dir . -- python job.py
All nodes need tf2dist in the Python that runs Ray, and a file system in common for run_dir.
"""

import sys

import ray
from ray.train import FailureConfig, ScalingConfig

from tf2dist.engines.ray_train import Gang, run_command, train

# What every task runs; it finds its rank and the addresses of all in its environment.
COMMAND = [
    "python",
    "-m",
    "tf2dist",
    "mode=async",
    "cluster.num_ps=2",
    "train.steps=1000",
    "run_dir=/shared/runs/mine",
    "grace_secs=20",
    "cluster=ranks",
]


def train_loop() -> None:
    """One task."""
    run_command(COMMAND)


ray.init(address="auto")
sys.exit(
    train(
        train_loop,
        Gang(control_port_shift=1000, stop_secs=50),
        # Ray starts all tasks together. Add what your site asks for, such as accelerator_type.
        ScalingConfig(num_workers=6, use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 1}),
        # After a loss all tasks go on from the last checkpoint. Exit codes 1, 2 and 3 end the job.
        FailureConfig(max_failures=3),
    )
)
