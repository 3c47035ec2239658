"""What the benchmark keeps of several runs, and the page that it writes."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.__main__ import circumstances, merged, run, write
from tests.bench.comparisons import Comparison


def test_comparisons_that_are_not_run_again_stay(tmp_path: Path) -> None:
    def measured(name: str, figure: float, rounds: int) -> dict[str, Any]:
        contenders = {"ours": lambda: figure, "theirs": lambda: 2.0}
        comparison = Comparison(name, "steps/s", contenders, ("ours", "theirs"), 1.5)
        return run(comparison, rounds, Console(quiet=True)) | circumstances(
            argparse.Namespace(rounds=rounds, scale=1.0)
        )

    write([measured("async dnn", 2.0, 1), measured("async softmax", 4.0, 1)], tmp_path)
    again = [measured("async dnn", 5.0, 3)]
    write(merged(tmp_path, again), tmp_path)
    page = (tmp_path / "bench.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `async")]
    assert rows == [
        "| `async softmax` | ours 4, theirs 2 | steps/s | 2.00 ours / theirs | at least 1.50 |",
        "| `async dnn` | ours 5, theirs 2 | steps/s | 2.50 ours / theirs | at least 1.50 |",
    ]
    assert page.count("; 1 round,") == page.count("; 3 rounds,") == 1, "each with its circumstances"
