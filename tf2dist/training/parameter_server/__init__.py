"""Training with parameter servers, which a ClusterCoordinator drives: asynchronous, or with synchronous replicas."""
