"""Asynchronous training: ParameterServerStrategy driven by a ClusterCoordinator."""
