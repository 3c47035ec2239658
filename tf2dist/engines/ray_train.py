"""What a job of Ray runs, under the name that the scripts of `tf2dist.render` have."""

from tf2dist.tools.engines.ray_gang import Gang, run_command, train

__all__ = ["Gang", "run_command", "train"]
