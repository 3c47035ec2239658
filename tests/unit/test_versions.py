"""`make versions`: which releases it asks for, and its table."""

import os
import sys
from pathlib import Path

import pytest

from tests import versions


def test_the_oldest_releases_are_the_lower_bounds() -> None:
    bounds = {one.name: one.specifier for one in versions.requirements()}
    named = [line for line in versions.packages(versions.SETS["oldest"]) if "==" in line]
    assert {line.partition("==")[0] for line in named} == set(versions.NAMED)
    for line in named:
        name, _, version = line.partition("==")
        assert bounds[name].contains(version.removesuffix(".*"))
        assert f">={version.removesuffix('.*')}" in str(bounds[name])


def test_the_other_packages_are_in_the_ranges_of_the_project() -> None:
    for name in ("oldest", "newest", "python3.12"):
        asked = versions.packages(versions.SETS[name])
        assert {str(one) for one in versions.requirements() if one.name == "packaging"} <= set(asked)
        assert ("--pre" in asked) == (name == "newest")


def test_another_python_gets_what_a_user_gets() -> None:
    needed = [str(one) for one in versions.requirements()]
    assert versions.packages(versions.SETS["python3.12"]) == [*needed, *versions.TESTING]


def test_a_python_that_cannot_be_run_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shim of a version manager, which is there and fails."""
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not versions.is_here(versions.Releases("", python="python3.99"))
    assert not versions.is_here(versions.Releases("", python="python3.98"))
    assert versions.is_here(versions.SETS["oldest"])


def test_rows_are_replaced_and_others_stay() -> None:
    table = f"# Head\n\n| {' | '.join(versions.HEADS)} |\n|---|\n| newest | 1 |\n| locked | 2 |\n\nBelow.\n"
    lines = versions.merged(table, [["oldest", "3"], ["newest", "4"]]).splitlines()
    assert lines[4:7] == ["| oldest | 3 |", "| locked | 2 |", "| newest | 4 |"]
    assert lines[-2:] == ["", "Below."]
    lines = versions.merged(table, []).splitlines()
    assert lines[5:7] == ["| locked | 2 |", "| newest | 1 |"]
    assert lines[4].startswith("| oldest | not here | - |"), "a set that was never run"
    assert len(lines) == 4 + len(versions.SETS) + 2


def test_a_row_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later set may end the command, as where an index does not answer."""
    page = tmp_path / "versions.md"
    page.write_text(versions.PAGE.read_text())
    rows = {"oldest": ["oldest", "new"]}
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "run", rows.__getitem__)
    monkeypatch.setattr(sys, "argv", ["versions", "oldest", "newest"])
    with pytest.raises(KeyError):
        versions.main()
    assert "| oldest | new |" in page.read_text()


@pytest.mark.parametrize(
    ("code", "output", "cell"),
    [
        (0, "..\n35 passed, 3 deselected, 2 warnings in 9.1s (0:00:09)", "35 passed"),
        (1, "F.\n1 failed, 34 passed in 9.1s", "1 failed, 34 passed"),
        (1, "E\n2 errors in 1s", "2 error"),
        (0, "..\n1 passed, 1 skipped in 1s", "1 passed, 1 skipped"),
        (-11, "..", "ended with -11"),
        (5, "3 deselected in 1s", "ended with 5"),
    ],
)
def test_cells(code: int, output: str, cell: str) -> None:
    assert versions.outcome(code, output) == cell


def test_the_page_has_a_row_for_each_set() -> None:
    table = versions.PAGE.read_text().partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert rows[0] == list(versions.HEADS)
    assert [row[0] for row in rows[1:]] == list(versions.SETS)
