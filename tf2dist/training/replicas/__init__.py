"""Synchronous replicas on parameter servers, as the old `SyncReplicasOptimizer`: a step is the mean of K gradients."""
