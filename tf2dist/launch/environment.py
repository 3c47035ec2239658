"""The environment variables of the processes that run TensorFlow, set before it is imported."""

import itertools
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tf2dist.config.schema import DevicesConfig, RunConfig
from tf2dist.tf_constants import FAIL_FAST, KERAS_ON_TENSORFLOW, LOG_LEVEL, ONEDNN, PRIMITIVE_MEMORY

ENVIRONMENT = {
    LOG_LEVEL: "2",  # 1 and below print the cluster's configuration on every task
    FAIL_FAST: "use_caller",  # a call to a task that is gone fails instead of waiting for it
    **KERAS_ON_TENSORFLOW,
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi
    "grpc_proxy": "",  # otherwise gRPC connects the tasks through a proxy
    "http_proxy": "",
    "https_proxy": "",
}
LARGE_KERNEL = 1 << 18  # weights; the products of smaller matrices gain nothing by oneDNN, or lose
# By default TensorFlow has oneDNN prepare the backward pass of each convolution again in every step, an eighth of the
# processor time of MobileNetV2. What is prepared takes a few megabytes for each thread that computes.
KEPT_PRIMITIVES = (PRIMITIVE_MEMORY, "0")


def environment_of(config: RunConfig) -> Mapping[str, str]:
    """The variables for a run with these options."""
    onednn = completed(config.devices, _known_kernels(config.model)).onednn
    variables = ENVIRONMENT if onednn is None else ENVIRONMENT | {ONEDNN: str(int(onednn))}
    name, value = KEPT_PRIMITIVES
    return variables if name in os.environ else variables | {name: value}


def _known_kernels(model: Mapping[str, Any]) -> Iterator[int]:
    """The weights between the hidden layers of model=dnn; other models are not known before they are built."""
    units = model.get("hidden_units")
    # A plugin may have another model of this name.
    if model["name"] == "dnn" and isinstance(units, list) and all(isinstance(size, int) for size in units):
        yield from (num_inputs * num_outputs for num_inputs, num_outputs in itertools.pairwise(units))


def completed(devices: DevicesConfig, kernel_sizes: Iterable[int]) -> DevicesConfig:
    """The options with oneDNN where it suits a model, and neither they nor this process's environment say anything.

    TensorFlow chooses oneDNN by the processor alone: on one without AVX512-VNNI not even for large products of
    matrices.

    Args:
        kernel_sizes: the weights of the dense layers, as far as they are known.
    """
    is_open = devices.onednn is None and ONEDNN not in os.environ and platform.machine() == "x86_64"
    if is_open and max(kernel_sizes, default=0) >= LARGE_KERNEL:
        return replace(devices, onednn=True)
    return devices
