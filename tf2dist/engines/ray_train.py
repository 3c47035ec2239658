"""The parts of a job of Ray, under the name by which the scripts of `tf2dist.render` import them."""

from tf2dist.tools.engines.ray_gang import Gang, run_command, train

__all__ = ["Gang", "run_command", "train"]
