"""A run at one step, whole or invisible."""
