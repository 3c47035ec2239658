"""What each way of training refuses of a model stands in one table, which the documentation shows."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import PAGES, REPOSITORY
from tf2dist.model import features, support
from tf2dist.model.features import Feature

# Refusals that say nothing of a way of training, by how they begin.
OTHERS = (
    *("its builder makes other variables on", "not the same on"),  # workers compare what they have made
    "two variables are called",  # a checkpoint names them
    *("is compiled without an optimizer", "needs {} GB more memory"),  # `fit` alone can be asked so
)


def rows() -> list[str]:
    """The rows of the table in docs/fit.md: features that the same ways refuse stand together."""
    refused_by: dict[str, list[str]] = {}
    for way in support.WAYS:
        for feature in way.refuses:
            ways = refused_by.setdefault(feature.shown, [])
            if way.where not in ways:
                ways.append(way.where)
    together: dict[str, list[str]] = {}
    for shown, ways in refused_by.items():
        together.setdefault(", ".join(ways), []).append(shown)
    return [f"| {where} | {'; '.join(shown)} |" for where, shown in together.items()]


def test_the_page_shows_the_table() -> None:
    section = PAGES["docs/fit.md"].partition("## What is refused")[2].partition("\n## ")[0]
    lines = section.splitlines()
    begin = lines.index("| where | refused |") + 2
    table = lines[begin : lines.index("", begin)]
    assert [line for line in table if not line.startswith(("| arrays |", "| callbacks |", "| GPUs |"))] == rows()


def test_every_feature_is_refused_somewhere() -> None:
    known = {name for name, value in vars(features).items() if isinstance(value, Feature)}
    refused = {feature for way in support.WAYS for feature in way.refuses}
    assert {name for name in known if getattr(features, name) not in refused} == set()
    ways = {name for name, value in vars(support).items() if isinstance(value, support.Way)}
    assert {name for name in ways if getattr(support, name) not in support.WAYS} == set()


@pytest.mark.parametrize("way", support.WAYS, ids=lambda way: way.where)
def test_each_refusal_has_a_way_out(way: support.Way) -> None:
    facts = {"compute": "compute it from", "last_batch": 2, "num_workers": 3}
    for feature in way.refuses:
        told = str(support.refusal(way, feature, "mine", "it", **facts))
        assert told.startswith(("model (mine): ", "optimizer (mine): "))
        assert "; " in told
        assert "{" not in told


def texts_about_models(room: str) -> Iterator[tuple[str, str]]:
    """The texts in a room that begin as the refusal of a model or an optimizer, each with its file."""
    for path in sorted((REPOSITORY / "tf2dist" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                if text.startswith(("model (", "optimizer (", "model: ", "optimizer: ")):
                    yield path.name, text.partition(": ")[2]


def test_no_way_of_training_has_refusals_of_its_own() -> None:
    found = [text for room in ("training", "process", "checkpoint") for text in texts_about_models(room)]
    found += [(name, text) for name, text in texts_about_models("fitting") if name == "refusals.py"]
    assert [(name, text) for name, text in found if not text.startswith(OTHERS)] == []
