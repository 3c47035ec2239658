"""Each option is declared once: conf/ chooses and overrides, and values get the types of the schema."""

import inspect
import re
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import yaml

from tests.conftest import REPOSITORY
from tf2dist import fit
from tf2dist.config.compose import groups
from tf2dist.config.decode import defaults, flatten, to_dataclass
from tf2dist.config.help import help_text
from tf2dist.config.load import load
from tf2dist.config.option import COMMAND_LINE, Scope, options_of, rules_between
from tf2dist.config.option import option as make_option
from tf2dist.config.schema import OPTIONS, RunConfig
from tf2dist.errors import ConfigError
from tf2dist.tools.comparing.matrix import REPLACED

CONF = REPOSITORY / "conf"
# A file whose name or comment promises a value must keep it when the default changes.
PROMISED = {"cluster/local3.yaml: cluster.num_workers", "experiment/*: train.batch_size_per_worker"}


def settings(group: str, name: str) -> dict[str, Any]:
    """The settings in a file of conf/, by dotted name."""
    tree = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    tree.pop("defaults", None)
    if group not in ("experiment", "mode"):
        tree = {group: tree}
    return {
        f"{section}.{key}" if isinstance(values, dict) else section: value
        for section, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [(section, values)])
    }


@pytest.mark.parametrize("group", groups())
def test_conf_repeats_no_default_of_the_schema(group: str) -> None:
    again = {
        f"{group}/{'*' if group == 'experiment' else f'{name}.yaml'}: {option}"
        for name in groups()[group]
        for option, value in settings(group, name).items()
        if option in OPTIONS and not OPTIONS[option].is_choice and value == OPTIONS[option].default
    }
    assert again <= PROMISED


def test_the_default_choices_are_the_defaults_of_the_schema() -> None:
    made, plain = load([], None).as_tree(), RunConfig().as_tree()
    for group in ("model", "optimizer", "data"):
        assert made[group]["name"] == plain[group]["name"]
        made[group] = plain[group] = None  # the choice brings values along
    made["keras"] = plain["keras"]  # these are filled in
    assert made == plain


def test_the_defaults_fit_their_types_and_their_ranges() -> None:
    brought_along = {"model": RunConfig().model, "optimizer": RunConfig().optimizer}
    assert to_dataclass(RunConfig, defaults() | brought_along | {"run_dir": None}) == RunConfig()
    for name, option in OPTIONS.items():
        assert option.default is None or all(constraint.holds(option.default) for constraint in option.constraints), (
            name
        )


def test_every_option_says_where_it_belongs() -> None:
    """What hosts compare, what engines set, and what `fit` and `predict` take is made from this."""
    arguments = {*inspect.signature(fit).parameters, "epochs and steps_per_epoch", COMMAND_LINE, ""}
    for name, option in OPTIONS.items():
        assert option.scope in get_args(Scope), name
        assert option.fit in arguments, name
        assert {need.option for need in option.only_for} <= {*OPTIONS}, name
    assert dict(options_of(Undeclared))["size"].scope not in get_args(Scope)


@dataclass
class Undeclared:
    size: int = make_option(1)


def test_what_other_commands_say_of_options_is_of_options_that_exist() -> None:
    assert {*REPLACED} <= {*OPTIONS, *groups(), "hydra.run.dir"}


def test_each_option_without_its_condition_is_refused() -> None:
    """With the value of another option that it needs it has a meaning, and otherwise it is refused."""
    config = RunConfig()
    config.simulate.distribution = "exponential"
    assert [rule for rule in rules_between(config) if not rule[2]] == [
        ("simulate.distribution", "exponential", False, "is for simulate.delay_secs; add that")
    ]
    config.simulate.delay_secs = [0.0, 0.5]
    assert all(holds for _, _, holds, _ in rules_between(config))


def test_help_lists_every_option_and_choice() -> None:
    lines = help_text(120).splitlines()
    for name, option in OPTIONS.items():
        assert sum(line.startswith(f"  {name}=") for line in lines) == (not option.is_choice), name
    for group in groups():
        assert any(line.split() == [group, *", ".join(groups()[group]).split()] for line in lines), group


def test_help_begins_with_the_run_and_the_training() -> None:
    """Those of the places of tasks, of which a local run needs none, come later."""
    options = re.findall(r"^  (\w+(?:\.\w+)?)=", help_text(120).partition("Options,")[2], re.MULTILINE)
    assert options[:2] == ["run_dir", "seed"]
    sections = list(dict.fromkeys(name.rpartition(".")[0] for name in options))
    assert sections[:2] == ["", "train"]
    assert sections.index("optimizer") < sections.index("cluster") < sections.index("task")
    assert [name for name, option in OPTIONS.items() if not option.help and not option.is_choice] == []


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"seed": 1.0}, "seed (1.0): must be a whole number"),
        ({"seed": True}, "seed (True): must be a whole number"),
        ({"seed": None}, "seed (null): must be a whole number"),
        ({"seed": "five"}, "seed (five): must be a whole number"),
        ({"grace_secs": False}, "grace_secs (False): must be a number"),
        ({"grace_secs": [1]}, "grace_secs ([1]): must be a number"),
        ({"devices": {"xla": 2}}, "devices.xla (2): must be true or false"),
        ({"devices": {"xla": 1.0}}, "devices.xla (1.0): must be true or false"),
        ({"devices": {"precision": None}}, "devices.precision (null): must be a word or a path"),
        ({"run_dir": {"a": 1}}, "run_dir ({'a': 1}): must be a word or a path"),
        ({"plugins": "a.py"}, "plugins: must be a list such as [a,b]"),
        ({"plugins": ["a.py", None]}, "plugins[1] (null): must be a word or a path"),
        ({"cluster": {"worker": [["a:1"]]}}, "cluster.worker[0] (['a:1']): must be a word or a path"),
        ({"keras": 3}, "keras (3): holds several options"),
        ({"model": 3}, "model (3): holds several options"),
        ({"train": {"stepss": 3}}, "train.stepss: there is no such option"),
        ({1: 3}, "1: there is no such option"),
        ([], "the configuration ([]): holds several options"),
    ],
)
def test_a_value_of_another_type_is_refused(tree: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_dataclass(RunConfig, tree)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        ({"seed": "5"}, 5),
        ({"grace_secs": 3}, 3.0),
        ({"grace_secs": "1e2"}, 100.0),
        ({"profile": "Yes"}, True),
        ({"profile": 0}, False),
        ({"run_dir": 5}, "5"),
        ({"run_dir": True}, "True"),
        ({"run_dir": None}, None),
        ({"plugins": ["a", 1]}, ["a", "1"]),
    ],
)
def test_unambiguous_values_are_converted(tree: dict[str, Any], value: Any) -> None:
    (name,) = tree
    config = getattr(to_dataclass(RunConfig, tree), name)
    assert config == value
    assert type(config) is type(value)


def test_a_tree_has_dotted_names() -> None:
    tree = {"train": {"steps": 5, "epochs": None}, "plugins": ["a", {"b": 1}], "model": {}}
    assert list(flatten(tree)) == [("train.steps", 5), ("train.epochs", None), ("plugins", ["a", {"b": 1}])]
    assert list(flatten(tree, lists=True))[2:] == [("plugins[0]", "a"), ("plugins[1].b", 1)]


def test_configurations_do_not_share_lists() -> None:
    RunConfig().plugins.append("a.py")
    assert RunConfig().plugins == OPTIONS["plugins"].default == []
