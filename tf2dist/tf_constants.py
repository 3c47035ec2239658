"""Facts about TensorFlow and Keras as text: modules, environment variables, settings, texts of errors, tested versions.

This module imports neither, so that every part of the package can use it. Together with `tf_internals` it is what
depends on more than the public interface of the two; tests/replica/probes.py tries each of these texts.

The versions of other packages that this project is tested with are those that its installation names.
"""

import contextlib
import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

# Parts of Keras that a task does not use and that take long to import; see `linux.import_lazily`. The public
# packages, the second pair of them which TensorFlow uses, and one that another part of Keras imports.
UNUSED_MODULES = (
    "keras.wrappers",
    "keras.visualization",
    "keras._tf_keras.keras.wrappers",
    "keras._tf_keras.keras.visualization",
    "keras.src.visualization",
)
# The file of Keras that is imported last, after TensorFlow: where this one is compiled to byte code, so are the others.
IMPORTED_LAST = ("keras", "saving/__init__.py")
# The module that calls Python functions from graphs, and what the names of AutoGraph's files have in them: its versions
# of functions, be they the user's or a library's.
PYTHON_FUNCTIONS = "tensorflow.python.ops.script_ops"
CALLS_PYTHON = f"{PYTHON_FUNCTIONS.replace('.', '/')}.py"
AUTOGRAPH_FILE = "__autograph_generated_file"

# Environment variables, which are read when TensorFlow is imported or first does what they are about.
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
FAIL_FAST = "GRPC_FAIL_FAST"
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
PRIMITIVE_MEMORY = "TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE"
GPU_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
CALL_THREADS = "TF_NUM_INTEROP_THREADS"
NO_GOOGLE = "NO_GCE_CHECK"
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
# A keras.json may name another backend, and enable NNX, which is for JAX and needs another package.
KERAS_ON_TENSORFLOW = {"KERAS_BACKEND": "tensorflow", "KERAS_NNX_ENABLED": "0"}
KERAS_HOME = "KERAS_HOME"

# The settings in keras.json that make another model of the same code, with Keras's defaults.
KERAS_DEFAULTS: dict[str, Any] = {"floatx": "float32", "image_data_format": "channels_last", "epsilon": 1e-7}

# In the texts of errors: the nodes of a graph, as {{function_node ...}}; the first line of an error in traced code; the
# colours of Keras, and what it puts before the reason.
NODES = re.compile(r"\{\{.*?\}\}\s*")
TRACED = "in user code:"
COLOURS = re.compile(r"\x1b\[[\d;]*m")
# An error of a graph that runs: the nodes that failed, each with the places that led to it; then the reason, and below
# it where it comes from. Several errors at once are numbered.
GRAPH_ERROR = "Graph execution error:"
FAILED_NODE = re.compile(
    r"^Detected at node '?(\S+?)'? defined at \(most recent call last\):\n(?: *File .*\n|\s*\n)*", re.MULTILINE
)
FIRST_OF_SEVERAL = re.compile(r"^\s*\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+:\s*")
BELOW_REASON = re.compile(r"\n\s*\[\[|\s+Label values:|\nAdditional GRPC error information")
# The name of a node in a layer begins with a scope for each layer whose call led to it. It ends in a number, since
# Keras opened one without when it built the layer. Other scopes look alike; the places of such a node have this file.
LAYER_SCOPE = re.compile(r"^(.+)_\d+$")
LAYER_FILE = "keras/src/layers/layer.py"
LOSS_SCOPE = re.compile(r"(?:^|/)compile_loss/([^/]+)/")
# What a layer says of an id that is not in its table; Keras has added the number of rows to a negative one.
EMBEDDING_FILE = "keras/src/layers/core/embedding.py"
NO_SUCH_ROW = re.compile(r"^indices\S* = (-?\d+) is not in \[0, (\d+)\)$")
KERAS_FRAME = re.compile(r"^Exception encountered when calling|Error encountered:$|^Exception encountered:$")


def tested_versions() -> dict[str, SpecifierSet]:
    """By package; "python" is among them.

    Raises:
        importlib.metadata.PackageNotFoundError: this project is not installed.
    """
    about = metadata.metadata("tf2dist")
    requirements = [Requirement(line) for line in metadata.requires("tf2dist") or []]
    tested = {
        requirement.name: requirement.specifier
        for requirement in requirements
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    }
    return {"python": SpecifierSet(about["Requires-Python"] or ""), **tested}


def installed_version(module: str) -> str:
    """The version of the package that a module comes from, which may have another name, as keras-nightly has.

    Raises:
        importlib.metadata.PackageNotFoundError: there is none.
    """
    try:
        version = metadata.version(module)
    except metadata.PackageNotFoundError:
        others = metadata.packages_distributions().get(module)
        if not others:
            raise
        version = metadata.version(others[0])
    return version or "unknown"  # None where the metadata is damaged


def untested(packages: Iterable[str]) -> list[str]:
    """The packages that are installed in another version than the tested ones, such as "keras 3.16.0"."""
    untested_packages = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        tested = tested_versions()
        for package in packages:
            version = installed_version(package)
            if not tested[package].contains(version, prereleases=True):
                untested_packages.append(f"{package} {version}")
    return untested_packages
