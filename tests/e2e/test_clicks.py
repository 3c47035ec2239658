"""Tables of users and items learn from made-up clicks, up to what their true probabilities allow."""

import json
import re
from collections.abc import Callable

import keras
import numpy as np
import pytest

import tf2dist
from tests.conftest import Command
from tf2dist.data.loading import area_under_curve, make_impressions

NUM_USERS, NUM_ITEMS = 20_000, 500  # the table of users is large enough to travel by rows
OPTIONS = (
    *("experiment=clicks", "cluster=local2", f"data.num_users={NUM_USERS}", f"data.num_items={NUM_ITEMS}"),
    *("data.num_impressions=200000", "data.num_validation=10000", "train.batch_size_per_worker=250"),
)


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_clicks_are_learned(command: Command, mode: str) -> None:
    finished = command(f"mode={mode}", *OPTIONS)
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    x, y, probabilities = make_impressions(10_000, NUM_USERS, NUM_ITEMS, sample=1)
    best = area_under_curve(y, probabilities)
    noted = re.search(r"true probabilities is (\S+) on the validation set, (\S+) on the test set", finished.stderr)
    assert noted, finished
    assert float(noted[2]) == pytest.approx(best, abs=1e-4)
    assert best - 0.08 < summary["test_auc"] < best, finished
    assert summary["test_examples"] == len(y)
    assert f"auc {summary['test_auc']:.4f} over 10,000 examples" in finished.stdout

    model = tf2dist.load_model(finished.run_dir)
    # Keras sums the area over 200 thresholds.
    assert area_under_curve(y, model.predict(x, 1000, verbose=0)) == pytest.approx(summary["test_auc"], abs=1e-3)
    assert isinstance(model.optimizer, keras.optimizers.Adagrad)
    assert int(model.optimizer.iterations.numpy()) == summary["global_step"]
    seen = np.bincount(make_impressions(200_000, NUM_USERS, NUM_ITEMS)[0]["user"][10_000:], minlength=NUM_USERS) > 0
    accumulated = next(slot for slot in model.optimizer.variables if tuple(slot.shape) == (NUM_USERS, 16)).numpy()
    np.testing.assert_array_equal(accumulated.max(axis=1) > np.float32(1e-6), seen)
