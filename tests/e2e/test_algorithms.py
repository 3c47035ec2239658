"""The algorithms of asynchronous training, as a user asks for them."""

import json
from collections.abc import Callable

import pytest

from tests.conftest import Command


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["staleness_aware", "delay_compensated"])
def test_a_run_with_another_algorithm(command: Command, algorithm: str) -> None:
    finished = command(f"algorithm={algorithm}", "cluster=local2", "data=digits", "model=softmax", "train.steps=300")
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["algorithm"] == algorithm
    assert summary["global_step"] == summary["updates_applied"] == 300
    assert summary["test_accuracy"] > 0.8
    assert f"kind: {algorithm}" in (finished.run_dir / "config.yaml").read_text()
