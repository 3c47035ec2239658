"""What `fit` chooses for the devices from the model."""

import os
import platform
from pathlib import Path

import keras
import pytest

from tests.replica.test_fit_refusals import given_to_the_run
from tf2dist.launch.environment import ARENAS, ONEDNN

ON_X86 = True if platform.machine() == "x86_64" else None


@pytest.mark.parametrize(
    ("units", "options", "expected"),
    [
        ((512, 512), {}, (ON_X86, None)),
        ((512, 511), {}, (None, None)),
        ((512, 512), {"devices.onednn": False}, (False, None)),
        ((2048, 2048), {}, (ON_X86, 1)),
        ((2048, 2048), {"devices.malloc_arenas": 3}, (ON_X86, 3)),
    ],
)
def test_large_dense_layers_are_computed_with_onednn_and_huge_ones_leave_one_arena(
    units: tuple[int, ...],
    options: dict[str, bool | int],
    expected: tuple[bool | None, int | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for name in (ONEDNN, ARENAS):
        monkeypatch.delenv(name, raising=False)
    model = keras.Sequential([keras.Input([3]), *(keras.layers.Dense(each) for each in (*units, 1))])
    model.compile("sgd", "mse")
    config, _ = given_to_the_run(monkeypatch, model=model, options=options)
    assert (config.devices.onednn, config.devices.malloc_arenas) == expected
