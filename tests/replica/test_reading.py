"""What the variables on the ps hold at one moment, however large they are and however late it is fetched."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.replica.test_placement import placed
from tf2dist.errors import NotFiniteError
from tf2dist.training.hooks import CallbackEffects
from tf2dist.training.parameter_server import reading

MakeLoop = Callable[..., Any]


def in_a_thread(fetch: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fetch()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [pytest.param("round_robin", "adam", marks=pytest.mark.thorough), ("partitioned", "momentum")],
)
def test_a_frozen_run_is_fetched_while_the_training_goes_on(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, kind: str, optimizer: str
) -> None:
    """The values of the moment when it was frozen, although every variable has been changed in place since."""
    monkeypatch.setattr(reading, "MAX_PACKED_BYTES", 100)
    loop = async_loop(placed(kind, optimizer))
    assert loop.read_all()._kept
    assert not loop.read_all()._packed
    loop.train(20)
    frozen, before = loop.freeze(), loop.freeze()()
    loop.train(60)
    late = in_a_thread(frozen)
    assert late.step == before.step == 20
    assert list(late.arrays) == list(before.arrays)
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(late.arrays[name], array, err_msg=name)
    after = loop.freeze()()
    for name in loop.arrays():
        assert not np.array_equal(after.arrays[name], before.arrays[name]), f"{name} was not trained"


def test_a_frozen_run_that_is_not_finite(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_PACKED_BYTES", 100)
    loop = async_loop(placed("round_robin"))
    loop.apply(CallbackEffects(arrays={"model/hidden1/kernel": np.full([784, 30], np.nan, np.float32)}))
    frozen = loop.freeze()
    with pytest.raises(NotFiniteError, match="model/hidden1/kernel is not finite any more"):
        frozen()
