"""Decides which data all tasks use and where it lies, before any of them starts, and has MNIST downloaded.

The process that decides never imports TensorFlow. For MNIST it starts this module as a process of its own, with the
arguments DIR PARENT_PID, in which tensorflow-datasets prepares the data. If that fails, the last line on stdout is the
reason.
"""

import json
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
from tf2dist.errors import ConfigError, DataError, first_line
from tf2dist.files import expand, is_folder
from tf2dist.linux import child_environment, die_with_parent, module_command
from tf2dist.tf_constants import LOG_LEVEL, NO_GOOGLE


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    # Otherwise TensorFlow asks metadata.google.internal for credentials, on machines that are not Google's, too.
    os.environ.setdefault(NO_GOOGLE, "true")
    import tensorflow_datasets as tfds

    # Without a network tensorflow-datasets retries for minutes. Behind a proxy the name may be unknown here.
    host = urllib.parse.urlparse(tfds.builder_cls("mnist").URL).hostname
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
            tfds.builder("mnist", data_dir=sys.argv[1]).download_and_prepare(download_config=config)
    except Exception as error:
        print(f"{type(error).__name__}: {first_line(str(error))}")
        sys.exit(1)


NUM_TRAIN = {"mnist": 60_000, "digits": 1_437}  # the validation examples, taken from these, included
MADE_UP = ("parabola", "clicks")  # the data sets that have no classes, either
MNIST_HOST = "storage.googleapis.com"  # from where tensorflow-datasets downloads it
DEFAULT_EPOCHS = {"mnist": 5.0, "digits": 100.0}


def _digits() -> DataConfig:
    """The fallback without MNIST, which needs no network."""
    return to_dataclass(DataConfig, compose.values("data", "digits"))


def digits_file() -> Path:
    """scikit-learn's file; found without importing a package of it, which takes longer than training on it."""
    package = find_spec("sklearn")
    folder, *_ = (package and package.submodule_search_locations) or ["sklearn"]
    return Path(folder, "datasets", "data", "digits.csv.gz")


def mnist_dir(config: DataConfig) -> Path:
    """The folder in which tensorflow-datasets keeps its data sets."""
    asked = config.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    if folder := expand(asked):
        return folder
    raise DataError(f"data (mnist): this user has no home directory for {asked}; set TFDS_DATA_DIR or data.dir")


def mnist_files(folder: Path) -> tuple[Path, Path] | None:
    """The TFRecord files of the training and test set of the newest whole MNIST below `folder`; None without one."""
    if not os.path.isdir(folder):  # false, too, for a folder that this user may not enter, where `glob` would fail
        return None
    for info in sorted(folder.glob("mnist/3.*/dataset_info.json"), reverse=True):
        files = [next(info.parent.glob(f"mnist-{split}.tfrecord*"), None) for split in ("train", "test")]
        if files[0] and files[1]:
            return files[0], files[1]
    return None


def num_examples(file: Path) -> int:
    """How many examples a TFRecord file of MNIST holds, as recorded by tensorflow-datasets beside it."""
    return _split_info(file)[0]


def check_mnist(file: Path) -> None:
    """Checks a TFRecord file as far as that is possible without reading all of it."""
    _, num_bytes = _split_info(file)
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise damaged(file, f"cannot be read: {error.strerror}") from None
    # The recorded size leaves out the headers of the records, so a whole file is larger.
    if size < num_bytes:
        raise damaged(file, f"has {size:,} bytes of at least {num_bytes:,}")


def damaged(file: Path, why: str) -> DataError:
    return DataError(
        f"data (mnist): {file} {why}; put a whole one there, or remove {file.parents[1]} to have it downloaded again"
    )


def _split_info(file: Path) -> tuple[int, int]:
    """The number of examples in a file, and of their bytes without the record headers; 0 if that is not known."""
    about, name = file.parent / "dataset_info.json", file.name.split(".")[0].partition("-")[2]
    try:
        # JSON of protocol buffers has numbers of 64 bits as strings; a size of 0, which means unknown, is left out.
        (split,) = (each for each in json.loads(about.read_bytes())["splits"] if each["name"] == name)
        return sum(map(int, split["shardLengths"])), int(split.get("numBytes", 0))
    except OSError as error:
        raise damaged(about, f"cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise damaged(about, f"does not say how many examples the split {name} has") from None


def check_dir(config: DataConfig) -> None:
    """Raises ConfigError if `data.dir` is given and does not exist."""
    if config.dir is not None and not is_folder(config.dir):
        raise ConfigError(
            f"data.dir ({config.dir}): there is no such directory; create it, or leave the option out to use "
            "TFDS_DATA_DIR or ~/tensorflow_datasets"
        )


def resolve(config: DataConfig, warn: Callable[[str], None]) -> DataConfig:
    """The data that every task will use: what was asked for, or `digits` with a warning.

    If MNIST is missing, it is downloaded here, by one process, within `download_timeout_secs`.

    Raises:
        ConfigError: `data.dir` is given and does not exist.
        DataError: the data is missing, cannot be downloaded and `data.offline` is fail; or it is damaged.
    """
    check_dir(config)
    if config.name != "mnist":
        return config
    try:
        folder = mnist_dir(config).resolve()
    except DataError as error:
        if config.offline == "fail":
            raise
        warn(f"{error}; training on data=digits instead")
        return _digits()
    if not mnist_files(folder):
        reason = _download(folder, config.download_timeout_secs)
        if reason and config.offline == "fail":
            raise DataError(f"data (mnist): not in {folder}, and the download failed: {reason}; or use data=digits")
        if reason:
            warn(f"MNIST is not in {folder} and could not be downloaded ({reason}); training on data=digits instead")
            return _digits()
    for file in mnist_files(folder) or ():
        check_mnist(file)
    # The tasks get the folder that was found and checked here: they do not look for one again.
    return replace(config, dir=str(folder))


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
    share = max(0, num_examples) // num_workers
    if batch_size > share:
        way_out = f"give at most {share}" if share else "use fewer workers"
        raise ConfigError(
            f"train.batch_size_per_worker ({batch_size}): each of {num_workers} workers has only {share} of the "
            f"{max(0, num_examples)} training examples; {way_out}"
        )


def _download(folder: Path, timeout_secs: float) -> str:
    """Downloads MNIST with a progress bar; returns why that failed, or ""."""
    print(f"Downloading MNIST to {folder} (at most {timeout_secs:g} s) ...", file=sys.stderr, flush=True)
    # In a process of its own: it imports TensorFlow, and can be killed at the deadline whatever it is doing.
    environment = {**child_environment(), LOG_LEVEL: "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(
        module_command("tf2dist.data.location", str(folder), str(os.getpid())),
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
        return "" if mnist_files(folder) else f"the folder is incomplete: remove {folder / 'mnist'}"
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:120] if lines else f"exit code {process.returncode}"
