"""The environment variables of the processes that run TensorFlow, set before it is imported."""

import itertools
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tf2dist.config.schema import DevicesConfig, RunConfig

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
ARENAS = "MALLOC_ARENA_MAX"
# Weights. Each thread that frees a tensor leaves its memory to the arena of glibc that it came from. With tensors this
# large that is more memory than all else in a task. With smaller ones, or with many threads, a single arena costs more
# time than it is worth; measured on two cores.
HUGE_KERNEL, FEW_CORES = 1 << 22, 4

# By default TensorFlow has oneDNN prepare the backward pass of each convolution anew in every step, an eighth of the
# processor time of MobileNetV2. What is prepared takes a few megabytes for each thread that computes.
KEPT_PRIMITIVES = ("TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", "0")


def environment_of(config: RunConfig) -> Mapping[str, str]:
    """The variables for a run with these options."""
    devices = completed(config.devices, _known_kernels(config.model))
    # TensorFlow reads the one while it is imported, glibc the other when the process begins.
    chosen = {ONEDNN: devices.onednn, ARENAS: devices.malloc_arenas}
    found = ENVIRONMENT | {name: str(int(value)) for name, value in chosen.items() if value is not None}
    name, value = KEPT_PRIMITIVES
    return found if name in os.environ else found | {name: value}


def _known_kernels(model: Mapping[str, Any]) -> Iterator[int]:
    """The weights between the hidden layers of model=dnn; other models are not known before they are built."""
    units = model.get("hidden_units")
    # A plugin may have another model of this name.
    if model["name"] == "dnn" and isinstance(units, list) and all(isinstance(each, int) for each in units):
        yield from (before * after for before, after in itertools.pairwise(units))


def completed(devices: DevicesConfig, kernel_sizes: Iterable[int]) -> DevicesConfig:
    """The options with what suits a model, where neither they nor the environment of this process say anything.

    TensorFlow chooses oneDNN by the processor alone: on one without AVX512-VNNI not even for large products of
    matrices.

    Args:
        kernel_sizes: the weights of the dense layers, as far as they are known.
    """
    largest = max(kernel_sizes, default=0)
    onednn, arenas = devices.onednn, devices.malloc_arenas
    if onednn is None and ONEDNN not in os.environ and platform.machine() == "x86_64" and largest >= LARGE_KERNEL:
        onednn = True
    has_few_cores = len(os.sched_getaffinity(0)) <= FEW_CORES
    if arenas is None and ARENAS not in os.environ and has_few_cores and largest >= HUGE_KERNEL:
        arenas = 1
    return replace(devices, onednn=onednn, malloc_arenas=arenas)
