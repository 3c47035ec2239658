"""A configuration is data: nothing in it is executed or instantiated."""

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tf2dist import cli
from tf2dist.config import decode, schema
from tf2dist.config.load import load
from tf2dist.errors import ConfigError
from tf2dist.launch import run_dir


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, in which a command that was run leaves the file `ran`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_FOLDER", "a folder")
    yield tmp_path
    assert not (tmp_path / "ran").exists()


VALUES = [
    "_target_=os.system",
    "_target_=logging.os.system",
    "inner={_target_: os.system, command: 'touch ran'}",
    "inner=[{_target_: os.system, _args_: ['touch ran']}]",
]
ATTEMPTS = [
    ["+_target_=os.system", "+command='touch ran'"],
    ["+_target_=logging.os.system"],
    *[[f"+{group}.{value}"] for group in ("model", "optimizer", "data", "train") for value in (VALUES[0], VALUES[-1])],
    *[[f"++{group}.{value}"] for group in ("model", "train") for value in VALUES],
    ["model.hidden_units=[{_target_: os.system, command: 'touch ran'}]"],
    ["optimizer.learning_rate={_target_: os.system, command: 'touch ran'}"],
    ["optimizer.schedule={_target_: os.system, command: 'touch ran'}"],
    ["plugins=[{_target_: os.system, command: 'touch ran'}]"],
    ["seed=!!python/object/apply:os.system ['touch ran']"],
    ["seed='!!python/object/apply:os.system [touch ran]'"],
    ["+model.x='!!python/object/apply:os.system [touch ran]'"],
    ["+model.x='!!python/name:os.system'"],
]

# In further groups, which are read as `train` is.
MORE = [[f"+{group}.{value}"] for group in ("cluster", "task", "devices") for value in (VALUES[0], VALUES[-1])]


@pytest.mark.parametrize(
    "overrides",
    [*ATTEMPTS, *(pytest.param(attempt, marks=pytest.mark.thorough) for attempt in MORE)],
    ids=[" ".join(attempt) for attempt in ATTEMPTS + MORE],
)
def test_options_that_could_execute_code_are_refused(folder: Path, overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        load(overrides, None)


def test_a_yaml_tag_in_a_text_stays_a_text(folder: Path) -> None:
    tag = "!!python/object/apply:os.system [touch ran]"
    config = load([f"run_dir='{tag}'"], None)
    assert config.run_dir == tag
    assert decode.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['touch ran']", "!!python/name:os.system ''"])
def test_a_tag_in_the_file_that_tasks_read_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        decode.from_yaml(f"seed: {text}\n")


@pytest.mark.parametrize(
    "override",
    [
        "run_dir=x/${oc.env:A_FOLDER}",
        "run_dir='x/${oc.env:A_FOLDER}'",
        "run_dir=${oc.env:NOT_SET,x}/${oc.env:A_FOLDER}",
    ],
)
def test_the_command_line_itself_may_name_the_environment(folder: Path, override: str) -> None:
    assert load([override], None).run_dir == "x/a folder"


FILES = [
    "seed: !!python/object/apply:os.system ['touch ran']",
    "seed: !!python/name:os.system ''",
    "_target_: os.system\ncommand: touch ran",
    "model: {_target_: os.system, command: touch ran}",
    "train: {_target_: os.system, command: touch ran}",
    "[1, 2]",
]


@pytest.mark.parametrize("text", FILES)
@pytest.mark.parametrize("place", ["mine.yaml", "experiment/mine.yaml"])
def test_a_file_names_no_code(folder: Path, text: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "conf" / place
    file.parent.mkdir(parents=True)
    begin = "# @package _global_\n" if "/" in place else "" if text[0] == "[" else "defaults: [config, _self_]\n"
    file.write_text(f"{begin}{text}\n")
    flag = "experiment=mine" if "/" in place else "--config-name=mine"
    with pytest.raises(SystemExit) as ended:
        cli.main(["--config-dir=conf", flag, "data=digits"])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert len(output.err.splitlines()) == 1


def test_a_plugin_is_checked_without_being_run(folder: Path) -> None:
    plugin = folder / "plugin.py"
    plugin.write_text("import os\nos.system('touch ran')\n")
    assert load([f"plugins=[{plugin}]"], None).plugins == [str(plugin)]


RUNNERS = {"eval", "exec", "load_model", "instantiate", "from_config_file", "unsafe_load", "full_load"}


PACKAGE = REPOSITORY / "tf2dist"


@pytest.mark.parametrize("module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_code_itself_unpickles_and_evaluates_nothing(module: Path) -> None:
    """`registry` runs plugins, which are code, `testing` sends functions to processes of the same test, and
    `functions`, `pickling` and `shipping` send those of a call of `fit` to its tasks. The modules of `tools/finished`
    load models in Keras' safe mode, also for `prediction`."""
    imported: set[str] = set()
    called: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.name for alias in node.names}
            imported |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
        elif isinstance(node, ast.Call):
            called.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
            loose = [word for word in node.keywords if word.arg in ("allow_pickle", "shell")]
            assert module.stem == "shipping" or not any(word.arg == "safe_mode" for word in node.keywords)
            assert all(isinstance(word.value, ast.Constant) and word.value.value is False for word in loose)
    loads_models = module.stem in ("shipping", "prediction") or module.parent.name == "finished"
    assert not called & RUNNERS - ({"load_model"} if loads_models else set())
    fitting = {name: {"cloudpickle"} for name in ("functions", "pickling", "shipping")}
    allowed = {"testing": {"pickle", "cloudpickle"}, **fitting}.get(module.stem, set())
    assert imported & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "runpy", "hydra.utils"} <= allowed


def private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.fixture
def lax_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("lax_umask")
def test_a_run_directory_is_private_and_so_are_those_on_the_way_to_it(folder: Path) -> None:
    created = run_dir.make_run_dir(schema.RunConfig(run_dir="a/b/c"))
    assert created == folder / "a" / "b" / "c"
    assert all(private(folder / path) for path in ("a", "a/b", "a/b/c", "a/b/c/logs"))


@pytest.mark.usefixtures("lax_umask")
def test_the_default_run_directory_is_private(folder: Path) -> None:
    created = run_dir.make_run_dir(schema.RunConfig())
    assert created.parent == folder / "outputs"
    assert private(created)
    assert private(folder / "outputs")


def test_an_empty_directory_becomes_private_and_a_full_one_stays(folder: Path) -> None:
    (folder / "empty").mkdir(mode=0o755)
    (folder / "full").mkdir(mode=0o755)
    (folder / "full" / "notes").touch()
    assert private(run_dir.make_run_dir(schema.RunConfig(run_dir="empty")))
    assert not private(run_dir.make_run_dir(schema.RunConfig(run_dir="full")))
