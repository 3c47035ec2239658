"""Trains on a Ray cluster: each worker of Ray Train is a task of tf2dist.

On a machine of the cluster: python @FILE@. From elsewhere: ray job submit --working-dir . -- python @FILE@
All nodes need tf2dist in the Python that runs Ray, and a file system in common for run_dir.
"""

import sys

import ray
from ray.train import FailureConfig, ScalingConfig

from tf2dist.engines.ray_train import Gang, run_command, train

# What every task runs; it finds its rank and the addresses of all in its environment.
COMMAND = [
    # @COMMAND@
]


def train_loop() -> None:
    """One task."""
    run_command(COMMAND)


ray.init(address="auto")
sys.exit(
    train(
        train_loop,
        Gang("@GANG@"),
        # Ray starts all tasks together. Add what your site asks for, such as accelerator_type.
        ScalingConfig("@SCALING@"),
        # After a loss all tasks go on from the last checkpoint. Exit codes 1, 2 and 3 end the job.
        FailureConfig(max_failures="@RESTARTS@"),
    )
)
