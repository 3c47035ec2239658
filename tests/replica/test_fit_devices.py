"""What `fit` chooses for the devices from the model."""

import platform
from pathlib import Path

import keras
import pytest

from tests.replica.test_fit_refusals import given_to_the_run
from tf2dist.tf_constants import ONEDNN

ON_X86 = True if platform.machine() == "x86_64" else None


@pytest.mark.parametrize(
    ("units", "options", "expected"),
    [
        ((512, 512), {}, ON_X86),
        ((512, 511), {}, None),
        ((512, 512), {"devices.onednn": False}, False),
    ],
)
def test_large_dense_layers_are_computed_with_onednn(
    units: tuple[int, ...],
    options: dict[str, bool],
    expected: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ONEDNN, raising=False)
    model = keras.Sequential([keras.Input([3]), *(keras.layers.Dense(each) for each in (*units, 1))])
    model.compile("sgd", "mse")
    config, _ = given_to_the_run(monkeypatch, model=model, options=options)
    assert config.devices.onednn == expected
