"""What each way of training refuses of a model stands in one table, which the documentation shows."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import PAGES, REPOSITORY
from tf2dist.model import features, support
from tf2dist.model.features import Feature
from tf2dist.model.support import COLUMNS

WAYS = [value for value in vars(support).values() if isinstance(value, support.Way)]
# Refusals that say nothing of a way of training, by how they begin.
OTHERS = (
    *("its builder makes other variables on", "not the same on"),  # workers compare what they have made
    "two variables are called",  # a checkpoint names them
    *("is compiled without an optimizer", "needs {} GB more memory"),  # `fit` alone can be asked so
)
# By a feature another one that everything with it has, too.
CASE_OF = {
    features.CONSTRAINT_OF_PARTS: features.CONSTRAINT,
    features.REPEATS: features.IN_PHASES,
    features.ASSIGNED_UPDATED: features.IN_PHASES,
}


def works(feature: Feature) -> dict[str, str]:
    """By column of the table in docs/modes.md where a feature works."""
    refused = {feature, CASE_OF.get(feature)}
    ways = [way.works for way in WAYS if any(one in way.refuses for one in refused)]
    found = {column: dict.fromkeys(works[column] for works in ways if column in works) for column in COLUMNS}
    return {column: "no" if "no" in cells else ", ".join(cells) or "yes" for column, cells in found.items()}


def table() -> tuple[list[str], list[str]]:
    """The rows of the table in docs/modes.md, and the lines of the list of what works in no column."""
    shown = list(dict.fromkeys(feature for way in WAYS for feature in way.refuses))
    shown.sort(key=list(vars(features).values()).index)
    cells = {feature.shown: list(works(feature).values()) for feature in shown}
    rows = [f"| {name} | {' | '.join(row)} |" for name, row in cells.items() if set(row) != {"no"}]
    return rows, [f"* {name}" for name, row in cells.items() if set(row) == {"no"}]


def test_the_page_shows_the_table() -> None:
    lines = PAGES["docs/modes.md"].splitlines()
    rows, nowhere = table()
    begin = lines.index(f"| a model with | {' | '.join(f'`{column}`' for column in COLUMNS)} |") + 2
    assert lines[begin : lines.index("", begin)] == rows
    begin = lines.index(nowhere[0])
    assert lines[begin : lines.index("", begin)] == nowhere


CHINESE = {
    "yes": "是",
    "no": "否",
    "one worker": "单个节点",
    "one worker or no XLA": "单个节点或无 XLA",
    "one worker or no XLA, full last step": "单个节点或无 XLA、末步足够大",
    "no XLA": "无 XLA",
    "one ps": "单个 ps",
    "arrays": "数组",
    "not cut": "未切分",
    "no outer steps": "无外层更新",
    "no `init_from`": "无 `init_from`",
}


def test_the_chinese_page_has_the_same_cells() -> None:
    lines = PAGES["docs/zh/modes.md"].splitlines()
    begin = lines.index(f"| 模型中有 | {' | '.join(f'`{column}`' for column in COLUMNS)} |") + 2
    cells = [line.strip("| ").split(" | ")[1:] for line in lines[begin : lines.index("", begin)]]
    rows, nowhere = table()
    assert cells == [[CHINESE[cell] for cell in row.strip("| ").split(" | ")[1:]] for row in rows]
    begin = lines.index("* `run_eagerly`")
    assert lines.index("", begin) - begin == len(nowhere)


def test_every_feature_is_refused_somewhere() -> None:
    known = {name for name, value in vars(features).items() if isinstance(value, Feature)}
    refused = {feature for way in WAYS for feature in way.refuses}
    assert {name for name in known if getattr(features, name) not in refused} == set()


# By numbers: the text of a way has addresses of functions, and the processes of pytest-xdist must agree on the names.
@pytest.mark.parametrize("way", WAYS, ids=[str(number) for number in range(len(WAYS))])
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
