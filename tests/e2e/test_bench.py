"""The benchmark runs; what it says is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, slowness

FEW = {
    "one process softmax": {"tf2dist", "bare loop", "keras fit"},
    "input": {"ours", "per_element"},
    "fit sync": {"fit", "command"},
    "large loopback sync 2 million": {"steps", "loopback"},
}
OLD = {"tf2dist", "old program", "old, our threads", "plain port"}
MORE = {
    "async softmax": OLD,
    "sync cnn": OLD,
    "measuring": {"measured", "unmeasured"},
    "tables keras async": {"tf2dist", "keras fit"},
    "tables old 100 thousand rows": {"tf2dist", "old program"},
}


@pytest.mark.timeout(620)
@pytest.mark.slow
@pytest.mark.parametrize(("contenders", "scale"), [(FEW, 1.0), (MORE, 0.4)])
def test_the_benchmark_runs(contenders: dict[str, set[str]], scale: float, real_data: str, tmp_path: Path) -> None:
    if real_data != "mnist":
        pytest.skip("the benchmark trains on MNIST, which is not on this machine")
    arguments = ["--only", ",".join(contenders), "--rounds", "1", "--scale", str(scale), "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tests.bench", *arguments]
    completed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600 * slowness())
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    comparisons = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    assert {one["name"]: set(one["medians"]) for one in comparisons} == contenders, completed.stdout
    for one in comparisons:
        assert all(figure > 0 for figures in one["values"].values() for figure in figures), completed.stdout
        assert one["ratio"] > 0
    assert all(f"| `{name}` |" in (tmp_path / "benchmarks.md").read_text() for name in contenders)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
