"""`make versions`: which releases it asks for, and its table."""

import pytest

from tests import versions


def test_the_oldest_releases_are_the_lower_bounds() -> None:
    bounds = {one.name: one.specifier for one in versions.requirements()}
    named = versions.packages("oldest")[: len(versions.NAMED)]
    assert [line.partition("==")[0] for line in named] == list(versions.NAMED)
    for line in named:
        name, _, version = line.partition("==")
        assert bounds[name].contains(version.removesuffix(".*"))
        assert f">={version.removesuffix('.*')}" in str(bounds[name])


def test_the_other_packages_are_in_the_ranges_of_the_project() -> None:
    for name in ("oldest", "newest"):
        asked = versions.packages(name)
        assert {str(one) for one in versions.requirements() if one.name == "packaging"} <= set(asked)
        assert ("--pre" in asked) == (name == "newest")


def test_rows_are_replaced_and_others_stay() -> None:
    table = f"# Head\n\n| {' | '.join(versions.HEADS)} |\n|---|\n| newest | 1 |\n| locked | 2 |\n\nBelow.\n"
    lines = versions.merged(table, [["oldest", "3"], ["newest", "4"]]).splitlines()
    assert lines[4:] == ["| oldest | 3 |", "| locked | 2 |", "| newest | 4 |", "", "Below."]
    assert versions.merged(table, []).endswith("| locked | 2 |\n| newest | 1 |\n\nBelow.\n")


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
    rows = [line.strip("| ").split(" | ") for line in versions.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[0] == list(versions.HEADS)
    assert [row[0] for row in rows[1:]] == list(versions.SETS)
