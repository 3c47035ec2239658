"""What the tasks find in their environment."""

import platform
from typing import Any

import pytest

from tf2dist.config.load import load
from tf2dist.config.schema import RunConfig
from tf2dist.launch.launcher import KEPT_PRIMITIVES, ONE_ARENA, environment_of
from tf2dist.tf_constants import ONEDNN

LARGE = "model.hidden_units=[512,512]"


def found(*overrides: str, name: str = ONEDNN) -> str | None:
    return environment_of(load([*overrides], None)).get(name)


@pytest.fixture(autouse=True)
def _on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv(ONEDNN, raising=False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model=dnn", LARGE], "1"),
        (["model=dnn", "model.hidden_units=[512,511]"], None),
        (["model=dnn", "model.hidden_units=[]"], None),
        (["model=dnn"], None),
        (["model=cnn"], None),
        (["model=dnn", LARGE, "devices.onednn=false"], "0"),
        (["model=cnn", "devices.onednn=true"], "1"),
    ],
)
def test_large_dense_layers_are_computed_with_onednn(overrides: list[str], expected: str | None) -> None:
    assert found(*overrides) == expected


@pytest.mark.parametrize("units", [128, None, "small", ["a", "b"], [512, 512]])
@pytest.mark.parametrize("name", ["wide", "dnn"])
def test_a_model_of_a_plugin(name: str, units: Any) -> None:
    """Its arguments may have the same name and mean something else."""
    config = RunConfig(model={"name": name, "hidden_units": units})
    assert environment_of(config).get(ONEDNN) == ("1" if (name, units) == ("dnn", [512, 512]) else None)


def test_the_users_environment_comes_before_what_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONEDNN, "0")
    assert found("model=dnn", LARGE) is None, "the tasks inherit it"
    assert found("model=dnn", LARGE, "devices.onednn=true") == "1"


@pytest.mark.parametrize(("name", "value"), [KEPT_PRIMITIVES, ONE_ARENA])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv(name, raising=False)
    assert found("model=dnn", LARGE, name=name) == value
    monkeypatch.setenv(name, "2")
    assert found("model=dnn", LARGE, name=name) is None


def test_small_models_have_the_arenas_of_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = ONE_ARENA
    monkeypatch.delenv(name, raising=False)
    assert found("model=dnn", name=name) is None


def test_other_processors_are_left_to_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert found("model=dnn", LARGE) is None
