"""The state of a run by name, and who looks at what was saved of it."""

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.replica.small_runs import run_config
from tf2dist import data
from tf2dist.errors import NotFiniteError
from tf2dist.evaluator import Evaluator
from tf2dist.saving import Checkpoints
from tf2dist.snapshot import Snapshot
from tf2dist.state import differences, values


def test_bfloat16_that_is_not_finite_is_not_saved() -> None:
    variable = keras.Variable([1.5, 2.5], dtype="bfloat16")
    assert values({"model/own": [variable]})["model/own"].tolist() == [1.5, 2.5]
    variable.assign([1.5, np.nan])
    with pytest.raises(NotFiniteError, match="model/own is not finite"):
        values({"model/own": [variable]})


def test_differences_name_what_is_missing_extra_or_of_another_shape() -> None:
    found: dict[str, tuple[int, ...]] = {"a": (1, 2), "b": (3,), "c": ()}
    assert differences(found, found) == []
    assert differences(found, {"a": (1, 3), "b": (3,), "d": ()}) == [
        "missing: d",
        "extra: c",
        "a is [1, 2] there and [1, 3] here",
    ]
    many: dict[str, tuple[int, ...]] = {f"v{i}": (1,) for i in range(9)}
    assert differences(many, {}) == ["extra: v0, v1, v2, v3, v4, v5 and 3 more"]


def test_an_evaluator_waits_for_what_follows_a_damaged_checkpoint(tmp_path: Path) -> None:
    checkpoints, warned, config = Checkpoints(tmp_path, 3), list[str](), run_config()
    evaluator = Evaluator(config, data.load(config.data), warned.append)
    assert evaluator.newest(checkpoints, -1) is None
    for step in (5, 9):
        checkpoints.save(Snapshot(step, {"model/a": np.zeros(3)}, {"target_step": 20}))
        found = evaluator.newest(checkpoints, -1)
        assert found
        assert found.step == step
    assert evaluator.newest(checkpoints, 9) is None
    (checkpoints.paths()[-1] / "arrays.npz").write_bytes(b"damaged")
    assert evaluator.newest(checkpoints, -1) is evaluator.newest(checkpoints, -1) is None
    Checkpoints(tmp_path, 3).save(Snapshot(9, {"model/a": np.ones(3)}, {"target_step": 20}))  # by another process
    saved_again = evaluator.newest(checkpoints, -1)
    assert saved_again
    assert saved_again.step == 9
    (text,) = warned
    assert "checkpoint step-0000000009 is damaged (arrays.npz has 7 bytes instead of" in text
