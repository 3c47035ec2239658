"""The asynchronous twin: ParameterServerStrategy driven by a ClusterCoordinator."""
