"""What the benchmark keeps of several runs, and the page that it writes."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench import page
from tests.bench.__main__ import circumstances, merged, run, write
from tests.bench.comparisons import Comparison
from tests.conftest import PAGES, REPOSITORY


def measured(name: str, figures: dict[str, float], rounds: int, target: float | None = 1.5) -> dict[str, Any]:
    """The result of a comparison whose contenders give these figures, of which the first two have a ratio."""
    contenders = {contender: lambda figure=figure: figure for contender, figure in figures.items()}
    ours, other, *_ = figures
    result = run(Comparison(name, "steps/s", contenders, (ours, other), target), rounds, Console(quiet=True))
    return result | circumstances(argparse.Namespace(rounds=rounds, scale=1.0))


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| `") and "`--only`" not in line]


def test_comparisons_that_are_not_run_again_stay(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text(f"# Mine\n\nThis stays.\n\n{page.MARK}\n\nThis goes.\n")
    two = [measured(name, {"ours": 2.0, "theirs": 2.0}, 1) for name in ("async dnn", "async softmax")]
    write(two, tmp_path)
    write(merged(tmp_path, [measured("async dnn", {"ours": 5.0, "theirs": 2.0}, 3)]), tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith(f"# Mine\n\nThis stays.\n\n{page.MARK}\n")
    assert "This goes." not in text
    assert rows_of(text)[:2] == [
        "| `async softmax` | 2 | 2 | steps/s | 1.00 | at least 1.50, **missed** | 1 |",
        "| `async dnn` | 5 | 2 | steps/s | 2.50 | at least 1.50 | 2 |",
    ]
    runs = [line.split(" | ") for line in text.partition("## Machines and runs")[2].splitlines()[4:]]
    assert [(cells[0], cells[-2]) for cells in runs] == [("| 1", "1"), ("| 2", "3")], "each with its circumstances"


def test_each_topic_has_a_table_with_a_column_for_each_contender() -> None:
    results = [
        measured("one process dnn", {"tf2dist": 3.0, "bare loop": 1.0}, 1),
        measured("async dnn", {"tf2dist": 2.0, "old program": 1.0, "plain port": 0.5}, 1, None),
        measured("async cnn", {"tf2dist": 4.0, "old program": 2.0}, 1),
        measured("adam", {"adam": 9.0, "sgd": 10.0}, 1, 0.95),
    ]
    text = page.tables_of(results)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## TensorFlow 1 programs", "## One process", "## Costs and sizes", "## Machines and runs"]
    assert "| `--only` | tf2dist | old program | plain port | unit | tf2dist / old program | target | run |" in text
    assert rows_of(text) == [
        "| `async dnn` | 2 | 1 | 0.5 | steps/s | 2.00 |  | 1 |",
        "| `async cnn` | 4 | 2 |  | steps/s | 2.00 | at least 1.50 | 1 |",
        "| `one process dnn` | 3 | 1 | steps/s | 3.00 | at least 1.50 | 1 |",
        "| `adam` | adam | 9 | sgd | 10 | steps/s | 0.90 | at least 0.95, **missed** | 1 |",
    ]
    assert text.startswith("3 of 4 rows have a target; **missed** by `adam`.")


def test_the_load_of_the_machine_stands_beside_the_rows_that_have_it() -> None:
    rows = [measured(f"jax {model}", {"tf2dist": 3.0, "old program": 1.0}, 1) for model in ("softmax", "dnn")]
    text = page.tables_of([rows[0], rows[1] | {"load": 7.5}])
    assert "| tf2dist / old program | target | load | run |" in text
    assert [row.split(" | ")[-2:] for row in rows_of(text)] == [["", "1 |"], ["7.5", "1 |"]]


def test_a_missed_target_is_told_from_a_ratio_that_looks_like_it() -> None:
    (row,) = rows_of(page.tables_of([measured("adam", {"adam": 1.4988, "sgd": 1.0}, 1)]))
    assert "| 1.499 | at least 1.50, **missed** |" in row


def test_the_page_has_what_the_file_of_results_has() -> None:
    results = json.loads((REPOSITORY / "docs/bench.json").read_text())["comparisons"]
    text = PAGES["docs/benchmarks.md"]
    assert page.page_of(results, text) == text
    assert "**Not measured: several real hosts, and several GPUs.**" in text.partition("## ")[0]
