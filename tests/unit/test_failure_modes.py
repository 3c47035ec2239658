"""The list of failure modes is complete, and names tests that exist."""

import ast
import re

from tests.conftest import REPOSITORY

ROWS = [f"F{number}" for number in range(1, 43)] + [f"S{number}" for number in range(1, 11)]


def listed() -> dict[str, str]:
    """The last column of each row, by the row's name."""
    text = (REPOSITORY / "tests" / "FAILURE_MODES.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    assert all(len(row) == 4 and all(row) for row in rows), "four columns, none of them empty"
    found = {row[0].strip("| "): row[3].rstrip("| ") for row in rows[1:]}
    assert len(found) == len(rows) - 1, "every row once"
    return found


def names_in(path: str) -> set[str]:
    """The names of the tests in a file, which is read and not imported."""
    tree = ast.parse((REPOSITORY / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_row_is_listed() -> None:
    assert list(listed()) == ROWS


def test_every_row_names_a_test_or_says_why_not() -> None:
    for row, shown_by in listed().items():
        assert "::" in shown_by or shown_by.startswith("not covered: "), row


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", " ".join(listed().values()))
    assert len(named) > len(ROWS)
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert not missing
