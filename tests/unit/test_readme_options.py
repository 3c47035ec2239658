"""The README's table of options agrees with the schema: their names, choices and defaults."""

import re

import pytest
import yaml

from tests.conftest import REPOSITORY
from tf2dist.config.choices import choices_by_option, groups, public
from tf2dist.config.schema import OPTIONS
from tf2dist.data.location import DEFAULT_EPOCHS

README = (REPOSITORY / "README.md").read_text()


def section(heading: str) -> str:
    return README.partition(f"## {heading}\n")[2].partition("\n## ")[0]


TABLE = section("Options")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE.splitlines() if line.startswith("| `")
]
TOLD_UNDER = {  # another heading of the README, where they are explained with what they are for
    "task.type": "Many hosts",
    "task.index": "Many hosts",
    "cluster.chief": "Many hosts",
    "cluster.ps": "Many hosts",
    "cluster.worker": "Many hosts",
    "cluster.control_port_shift": "Many hosts",
    "cluster.allow_public": "Security",
}
LEFT_OUT = {
    "cluster.evaluator": "a host list like the others; the README explains the task evaluator",
    "cluster.check_address": "the message that refuses an address names it",
    "data.num_validation": "another split makes results that nobody can compare",
    "data.download_timeout_secs": "for a slow network once",
}


def names(text: str) -> list[str]:
    """The options and choices that a text names in code quotes, with or without a value."""
    return re.findall(r"`([a-z_]+[a-z_0-9.]*)(?:=[^`]*)?`", text)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if not option.is_choice])
def test_every_option_has_a_place(name: str) -> None:
    places = [name in names(TABLE), name in TOLD_UNDER, name in LEFT_OUT]
    assert sum(places) == 1, "in the table, told elsewhere, or left out for a reason"
    if name in TOLD_UNDER:
        assert re.search(rf"(?<![\w.]){re.escape(name)}\b", section(TOLD_UNDER[name]))


def test_every_option_of_the_table_exists() -> None:
    known = {*OPTIONS, *groups(), *choices_by_option()}
    unknown = [name for row in ROWS for name in names(row[0]) if name not in known]
    unknown += [name for name in names(TABLE) if "." in name and name not in known]
    assert unknown == []
    assert {*TOLD_UNDER, *LEFT_OUT} <= set(OPTIONS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_defaults_are_those_of_the_schema(row: list[str]) -> None:
    """An option that has none is described in words: a number there would be another default."""
    options, shown = names(row[0]), row[1]
    if options[0] in groups():
        return
    bold = re.findall(r"\*\*`(.*?)`\*\*", shown)
    parts = bold or shown.split(", ")
    if all(OPTIONS[name].default is None for name in options):
        assert not any(re.fullmatch(r"`?[\d.]+`?", part) for part in parts)
        return
    assert len(parts) == len(options)
    for name, part in zip(options, parts, strict=True):
        default = OPTIONS[name]
        if default.default is None:
            assert not re.fullmatch(r"`?[\d.]+`?", part)
        else:
            assert part.strip("`") == default.shown


def test_the_choices_are_those_in_conf() -> None:
    entries = yaml.safe_load((REPOSITORY / "conf" / "config.yaml").read_text())["defaults"]
    chosen = {group: [name] for entry in entries if isinstance(entry, dict) for group, name in entry.items()}
    rows = {names(row[0])[0]: row[1] for row in ROWS if names(row[0])[0] in groups()}
    assert set(rows) == set(groups())
    for group, shown in rows.items():
        listed = set(names(shown))
        if "`local1` ... `local4`" in shown:
            listed |= {"local2", "local3"}
        assert listed == set(public(group))
        assert re.findall(r"\*\*`(.*?)`\*\*", shown) == chosen.get(group, [])


def test_the_default_length_of_a_training() -> None:
    (shown,) = (row[1] for row in ROWS if "train.epochs" in names(row[0]))
    assert shown == f"{DEFAULT_EPOCHS['mnist']:g} passes over MNIST, {DEFAULT_EPOCHS['digits']:g} over digits"
