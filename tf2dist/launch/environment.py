"""The environment variables of the processes that run TensorFlow, set before it is imported."""

from collections.abc import Mapping

from tf2dist.config.schema import DevicesConfig

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # 1 and below print the cluster's configuration on every task
    "GRPC_FAIL_FAST": "use_caller",  # a call to a task that is gone fails instead of waiting for it
    "KERAS_BACKEND": "tensorflow",
    "KERAS_NNX_ENABLED": "0",  # a keras.json may enable it; it is for JAX and needs another package
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi
    "grpc_proxy": "",  # otherwise gRPC connects the tasks through a proxy
    "http_proxy": "",
    "https_proxy": "",
}


def environment_of(devices: DevicesConfig) -> Mapping[str, str]:
    """The variables for a run with these options."""
    if devices.onednn is None:
        return ENVIRONMENT
    # TensorFlow reads it once, while it is imported.
    return ENVIRONMENT | {"TF_ENABLE_ONEDNN_OPTS": str(int(devices.onednn))}
