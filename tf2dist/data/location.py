"""Decides which data all tasks use and where it lies, before any of them starts, and has images downloaded.

The process that decides never imports TensorFlow. For a download it starts this module as a process of its own, with
the arguments NAME DIR PARENT_PID, in which tensorflow-datasets prepares the data. If that fails, the last line on
stdout is the reason.
"""

import os
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tf2dist.config import compose
from tf2dist.config.decode import to_dataclass
from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.data import image_files
from tf2dist.data.image_files import Found
from tf2dist.data.known import IMAGES, KNOWN
from tf2dist.errors import ConfigError, DataError, first_line
from tf2dist.files import is_folder
from tf2dist.linux import child_environment, die_with_parent, module_command
from tf2dist.tf_constants import LOG_LEVEL, NO_GOOGLE


def main() -> None:
    name, folder, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    # Otherwise TensorFlow asks metadata.google.internal for credentials, on machines that are not Google's, too.
    os.environ.setdefault(NO_GOOGLE, "true")
    import tensorflow_datasets as tfds

    # Without a network tensorflow-datasets retries for minutes. Behind a proxy the name may be unknown here.
    host = urllib.parse.urlparse(tfds.builder_cls(name).URL).hostname
    if host and not set(urllib.request.getproxies()) - {"no"}:
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            print(f"no network: the name {host} is unknown")
            sys.exit(1)
    # By default tensorflow-datasets accepts a file for which it has no checksum.
    config = tfds.download.DownloadConfig(verify_ssl=True, force_checksums_validation=True)
    try:
        # Otherwise a prepared copy is looked for first, on another host than the one that the doctor names.
        with tfds.testing.disable_gcs_access():
            tfds.builder(name, data_dir=folder).download_and_prepare(download_config=config)
    except Exception as error:
        print(f"{type(error).__name__}: {first_line(str(error))}")
        sys.exit(1)


NUM_TRAIN = {name: known.num_train for name, known in KNOWN.items() if known.num_train}
DEFAULT_EPOCHS = {name: known.epochs for name, known in KNOWN.items() if known.epochs}
MADE_UP = tuple(name for name, known in KNOWN.items() if not known.num_train)  # these have no classes, either


def digits_file() -> Path:
    """scikit-learn's file; found without importing a package of it, which takes longer than training on it."""
    package = find_spec("sklearn")
    folder, *_ = (package and package.submodule_search_locations) or ["sklearn"]
    return Path(folder, "datasets", "data", "digits.csv.gz")


def check(config: DataConfig) -> None:
    """Raises ConfigError if `data.dir` does not exist, or `data.offline` asks for a fallback that there is not."""
    if config.dir is not None and not is_folder(config.dir):
        raise ConfigError(
            f"data.dir ({config.dir}): there is no such directory; create it, or leave the option out to use "
            "TFDS_DATA_DIR or ~/tensorflow_datasets"
        )
    images = IMAGES.get(config.name)
    if images and not images.has_fallback and config.offline != "fail":
        raise ConfigError(f"data.offline ({config.offline}): data={config.name} has no fallback; leave it out")


def resolve(config: DataConfig, warn: Callable[[str], None]) -> DataConfig:
    """The data that every task will use: what was asked for, or `digits` with a warning.

    If a data set of images is missing, it is downloaded here, by one process, within `download_timeout_secs`.

    Raises:
        ConfigError: `data.dir` is given and does not exist, or the data has no fallback.
        DataError: the data is missing, cannot be downloaded and `data.offline` is fail; or it is damaged.
    """
    check(config)
    if config.name not in IMAGES:
        return config
    if not (found := image_files.find(config)):
        try:
            found = _downloaded(config)
        except DataError as error:
            if config.offline == "fail":
                raise
            problem, _, _ = str(error).rpartition("; ")
            warn(f"{problem}; training on data=digits instead")
            return to_dataclass(DataConfig, compose.values("data", "digits"))
    for files in (found.train, found.test):
        image_files.check(config.name, files)
    # The tasks get the folder that was found and checked here: they do not look for one again.
    return replace(config, dir=str(found.folder))


def check_batch_size(config: RunConfig, num_workers: int) -> None:
    """Checks, for data of known size, that every worker's share of the training set fills at least one batch."""
    total, taken = NUM_TRAIN.get(config.data.name), config.data.num_validation
    if total is not None and taken >= total:
        raise ConfigError(
            f"data.num_validation ({taken}): data={config.data.name} has {total} examples to train on; give fewer"
        )
    if total is not None:
        check_shard(config.train.batch_size_per_worker, total - taken, num_workers)


def check_shard(batch_size: int, num_examples: int, num_workers: int) -> None:
    """Raises ConfigError if a worker's share of the training set does not fill a batch."""
    share = num_examples // num_workers
    if batch_size > share:
        way_out = f"give at most {share}" if share else "use fewer workers"
        raise ConfigError(
            f"train.batch_size_per_worker ({batch_size}): each of {num_workers} workers has only {share} of the "
            f"{num_examples} training examples; {way_out}"
        )


def _downloaded(config: DataConfig) -> Found:
    """A data set of images, downloaded with a progress bar. Raises DataError if that fails."""
    folder, images = image_files.tfds_dir(config).resolve(), IMAGES[config.name]
    print(
        f"Downloading {images.title} to {folder} (at most {config.download_timeout_secs:g} s) ...",
        file=sys.stderr,
        flush=True,
    )
    reason = _download(config.name, folder, config.download_timeout_secs)
    if not reason and (found := image_files.find(config)):
        return found
    reason = reason or f"the folder is incomplete: remove {folder / config.name}"
    raise DataError(f"data ({config.name}): not in {folder}, and the download failed: {reason}; {images.way_out}")


def _download(name: str, folder: Path, timeout_secs: float) -> str:
    """Has tensorflow-datasets prepare a data set; returns why that failed, or ""."""
    # In a process of its own: it imports TensorFlow, and can be killed at the deadline whatever it is doing.
    environment = {**child_environment(), LOG_LEVEL: "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(
        module_command("tf2dist.data.location", name, str(folder), str(os.getpid())),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else subprocess.DEVNULL,  # the progress bar
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"not done after {timeout_secs:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:120] if lines else f"exit code {process.returncode}"
