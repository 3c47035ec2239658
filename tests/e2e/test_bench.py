"""The benchmark runs; what it says is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.timeout(260)
def test_the_benchmark_runs(real_data: str, tmp_path: Path) -> None:
    if real_data != "mnist":
        pytest.skip("the benchmark trains on MNIST, which is not on this machine")
    arguments = ["--only", "one process softmax,input", "--rounds", "1", "--scale", "0.3", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tests.bench", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    comparisons = {one["name"]: one for one in json.loads((tmp_path / "bench.json").read_text())["comparisons"]}
    assert set(comparisons) == {"one process softmax", "input"}
    assert set(comparisons["one process softmax"]["medians"]) == {"tf2dist", "bare loop", "keras fit"}
    for one in comparisons.values():
        assert all(figure > 0 for figures in one["values"].values() for figure in figures), done.stdout
        assert one["ratio"] > 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
