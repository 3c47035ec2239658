"""The parts of a task's own process: devices, strategies, signals, signs of life."""
