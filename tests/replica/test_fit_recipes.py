"""The streams of docs/fit_recipes.md: each worker reads its own part, and all of them together everything once."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.e2e.test_docs import PROGRAMS

NUM_WORKERS = 3


def parts(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[tf.Tensor, tf.Tensor]]]:
    """The batches of each worker, in the first pass over the stream of a program of the page."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(tf2dist, "fit", lambda build, **arguments: calls.append(arguments))
    monkeypatch.chdir(folder)
    (folder / program).write_text(PROGRAMS["docs/fit_recipes.md", program])
    runpy.run_path(program)
    shards = [tf2dist.Shard(index, NUM_WORKERS, 0, calls[0]["batch_size"]) for index in range(NUM_WORKERS)]
    return [list(calls[0]["data"](shard)) for shard in shards]


def rows(batches: list[tuple[tf.Tensor, tf.Tensor]]) -> np.ndarray:
    """x and y beside each other, in the order of x[0]."""
    table = np.concatenate([np.column_stack([x, y]) for x, y in batches])
    return table[table[:, 0].argsort()]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    found = parts("parquet.py", tmp_path, monkeypatch)
    assert [[len(y) for _, y in batches] for batches in found] == [[100] * 10] * NUM_WORKERS
    x = np.concatenate([np.random.default_rng(part).normal(size=(1000, 2)).astype("float32") for part in range(3)])
    np.testing.assert_array_equal(rows([batch for batches in found for batch in batches]), rows([(x, x.sum(axis=1))]))


def test_py_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parts("py_dataset.py", tmp_path, monkeypatch)
    x = [np.random.default_rng(number).normal(size=(100, 4)).astype("float32") for number in range(30)]
    for index, batches in enumerate(found):
        np.testing.assert_array_equal([batch for batch, _ in batches], x[index::NUM_WORKERS])
