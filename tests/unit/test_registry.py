"""The registries of plugins, and how plugins are loaded."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tf2dist import registry
from tf2dist.errors import ConfigError

MODEL = """
import tf2dist
{imports}

@tf2dist.register_model("mine"{more})
def mine(input_shape, num_classes, act="relu"):
    import {late_import}
    return act, {late_import}.VALUE
"""


@pytest.fixture(autouse=True)
def restore_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the registries, the search path and the modules of this process after each test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    mappings: tuple[dict[Any, Any], ...] = (registry.MODELS, registry._LOCATIONS, sys.modules)
    for mapping in mappings:
        for key in [*mapping]:
            monkeypatch.setitem(mapping, key, mapping[key])
    keys_before = [{*mapping} for mapping in mappings]
    yield
    for mapping, keys in zip(mappings, keys_before, strict=True):
        for key in {*mapping} - keys:
            del mapping[key]


def plugin(
    folder: Path, name: str = "plugin", imports: str = "", late_import: str = "beside_the_plugin", more: str = ""
) -> str:
    """Writes a plugin and a module beside it, which the plugin imports when its model is built; returns its path."""
    folder.mkdir(exist_ok=True)
    (folder / "beside_the_plugin.py").write_text("VALUE = 7\n")
    path = folder / f"{name}.py"
    path.write_text(MODEL.format(imports=imports, late_import=late_import, more=more))
    return str(path)


def test_modules_beside_a_plugin_can_be_imported_at_once_and_when_its_model_is_built(tmp_path: Path) -> None:
    registry.load_plugins([plugin(tmp_path, imports="from beside_the_plugin import VALUE")])
    assert registry.MODELS["mine"]((1,), 2, act="gelu") == ("gelu", 7)


def test_modules_beside_a_plugin_do_not_shadow_others(tmp_path: Path) -> None:
    """The folder of the plugin is searched last, so the module of the standard library is found first."""
    (tmp_path / "antigravity.py").write_text("raise RuntimeError\n")
    registry.load_plugins([plugin(tmp_path)])
    assert sys.path[-1] == str(tmp_path) not in sys.path[:-1]


def test_a_name_registered_twice_is_refused(tmp_path: Path) -> None:
    first, second = plugin(tmp_path / "a"), plugin(tmp_path / "b")
    registry.load_plugins([first, first])
    with pytest.raises(ConfigError) as caught:
        registry.load_plugins([second])
    assert str(caught.value) == (
        f"model (mine): is registered by {first}, line 5, and again by {second}, line 5; choose another name, or "
        "replace the first with @tf2dist.register_model('mine', override=True)"
    )
    registry.load_plugins([plugin(tmp_path / "b", more=", override=True")])
    assert registry.MODELS["mine"].__code__.co_filename == second


def test_a_name_registered_twice_by_one_helper_is_refused(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(
        "import tf2dist\ndef register(function):\n    tf2dist.register_model('theirs')(function)\n"
    )
    for name in ("one", "two"):
        text = "import helper\ndef model(input_shape, num_classes): ...\nhelper.register(model)\n"
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=r"theirs\): is registered by .*one.py, line 2, and again by .*two.py"):
        registry.load_plugins([str(tmp_path / "one.py"), str(tmp_path / "two.py")])


def test_a_plugin_may_replace_the_search_path(tmp_path: Path) -> None:
    path = tmp_path / "tidy.py"
    path.write_text(f"import sys\nsys.path[:] = [entry for entry in sys.path if entry != {str(tmp_path)!r}]\n")
    registry.load_plugins([str(path)])
    assert sys.path[-1] == str(tmp_path)


def test_one_plugin_may_import_another(tmp_path: Path) -> None:
    first = plugin(tmp_path, "first_of_two")
    second = tmp_path / "second.py"
    second.write_text("import first_of_two\n")
    registry.load_plugins([first, str(second)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_shape": 3}, "model.input_shape (3): is given by the run itself; leave it out"),
        ({"width": 3}, "model (mine): got an unexpected keyword argument 'width'; leave it out"),
    ],
)
def test_arguments_that_a_plugin_does_not_accept_are_refused(
    tmp_path: Path, arguments: dict[str, int], words: str
) -> None:
    registry.load_plugins([plugin(tmp_path)])
    with pytest.raises(ConfigError) as caught:
        registry.call("model", "mine", registry.MODELS["mine"], arguments, {"input_shape": (1,), "num_classes": 2})
    assert str(caught.value) == words
