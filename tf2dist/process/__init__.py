"""What a task's own process owns: devices, strategies, signals, signs of life."""
