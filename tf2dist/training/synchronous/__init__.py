"""Synchronous training: MultiWorkerMirroredStrategy, with gradients that are all-reduced in every step."""
