"""Synchronous training: MultiWorkerMirroredStrategy, gradients all-reduced every step."""
