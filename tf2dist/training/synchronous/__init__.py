"""The synchronous twin: MultiWorkerMirroredStrategy, gradients all-reduced every step."""
