"""The environment variables of the processes that run TensorFlow, set before it is imported."""

import itertools
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tf2dist.config.schema import RunConfig

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
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
LARGE_KERNEL = 1 << 18  # weights; the products of smaller matrices gain nothing by oneDNN, or lose


def environment_of(config: RunConfig) -> Mapping[str, str]:
    """The variables for a run with these options."""
    onednn = config.devices.onednn
    if onednn is None:
        onednn = suggested_onednn(_known_kernels(config.model))
    # TensorFlow reads it once, while it is imported.
    return ENVIRONMENT if onednn is None else ENVIRONMENT | {ONEDNN: str(int(onednn))}


def _known_kernels(model: Mapping[str, Any]) -> Iterator[int]:
    """The weights between the hidden layers of model=dnn; other models are not known before they are built."""
    units = model.get("hidden_units")
    # A plugin may have another model of this name.
    if model["name"] == "dnn" and isinstance(units, list) and all(isinstance(each, int) for each in units):
        yield from (before * after for before, after in itertools.pairwise(units))


def suggested_onednn(kernel_sizes: Iterable[int]) -> bool | None:
    """Whether to compute with oneDNN on CPUs; None to leave it to TensorFlow.

    TensorFlow chooses it by the processor alone: on one without AVX512-VNNI not even for large products of matrices.

    Args:
        kernel_sizes: the weights of the dense layers, as far as they are known.
    """
    is_for_it = platform.machine() == "x86_64" and any(size >= LARGE_KERNEL for size in kernel_sizes)
    return True if is_for_it and ONEDNN not in os.environ else None
