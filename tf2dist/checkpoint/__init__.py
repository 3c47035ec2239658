"""Checkpoints: a run at one step, stored completely or not at all."""
