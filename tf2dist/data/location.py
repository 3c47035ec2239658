"""Where the data is, decided once and before any task starts. Never imports TensorFlow."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tf2dist.config import DataConfig, RunConfig
from tf2dist.errors import ConfigError, DataError

NUM_TRAIN = {"mnist": 60_000, "digits": 1_437}  # before the validation examples are taken off
MNIST_HOST = "storage.googleapis.com"  # from where tensorflow-datasets downloads it
DEFAULT_EPOCHS = {"mnist": 5.0, "digits": 100.0}


def mnist_dir(config: DataConfig) -> Path:
    """The folder in which tensorflow-datasets keeps its data sets."""
    return Path(config.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def mnist_files(folder: Path) -> tuple[Path, Path] | None:
    """The newest whole MNIST below `folder`: the TFRecord files of its training and its test set."""
    for info in sorted(folder.glob("mnist/3.*/dataset_info.json"), reverse=True):
        files = [next(info.parent.glob(f"mnist-{split}.tfrecord*"), None) for split in ("train", "test")]
        if files[0] and files[1]:
            return files[0], files[1]
    return None


def check_dir(config: DataConfig) -> None:
    """Raises ConfigError if `data.dir` is given and does not exist."""
    if config.dir is not None and not Path(config.dir).expanduser().is_dir():
        raise ConfigError(
            f"data.dir ({config.dir}): there is no such directory; create it, or leave the option out to use "
            "TFDS_DATA_DIR or ~/tensorflow_datasets"
        )


def resolve(config: DataConfig, warn: Callable[[str], None]) -> DataConfig:
    """The data that will really be used, by every task: as asked, or `digits` with a warning.

    MNIST that is missing is downloaded here, by one process, within `download_timeout_secs`.

    Raises:
        ConfigError: `data.dir` is given and does not exist.
        DataError: the data cannot be had and `data.offline` is fail.
    """
    check_dir(config)
    if config.name != "mnist":
        return config
    folder = mnist_dir(config).resolve()
    if not mnist_files(folder):
        reason = _download(folder, config.download_timeout_secs)
        if reason and config.offline == "fail":
            raise DataError(f"data (mnist): not in {folder}, and the download failed: {reason}; or use data=digits")
        if reason:
            warn(f"MNIST is not in {folder} and could not be downloaded ({reason}); training on data=digits instead")
            return DataConfig(name="digits", offline="fail", num_validation=180)
    return replace(config, dir=str(folder))


def check_batch_size(config: RunConfig, num_workers: int) -> None:
    """Every worker's share of the training set must fill at least one batch.

    Raises:
        ConfigError: it does not.
    """
    total, taken = NUM_TRAIN.get(config.data.name), config.data.num_validation
    if total is not None and taken >= total:
        raise ConfigError(
            f"data.num_validation ({taken}): data={config.data.name} has {total} examples to train on; give fewer"
        )
    if total is not None:
        check_shard(config.train.batch_size_per_worker, total - taken, num_workers)


def check_shard(batch_size: int, num_examples: int, num_workers: int) -> None:
    share = max(0, num_examples) // num_workers
    if batch_size > share:
        way_out = f"give at most {share}" if share else "use fewer workers"
        raise ConfigError(
            f"train.batch_size_per_worker ({batch_size}): each of {num_workers} workers has only {share} of the "
            f"{max(0, num_examples)} training examples; {way_out}"
        )


def _download(folder: Path, timeout_secs: float) -> str:
    """Downloads MNIST with a progress bar. Returns the reason if that failed."""
    print(f"Downloading MNIST to {folder} (at most {timeout_secs:g} s) ...", file=sys.stderr, flush=True)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tf2dist.download", str(folder), str(os.getpid())],
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
        return "" if mnist_files(folder) else f"what is there is not whole: remove {folder / 'mnist'}"
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:120] if lines else f"exit code {process.returncode}"
