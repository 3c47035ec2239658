"""The programs of docs/four_ideas.md run as they stand, and the page shows them and what they print."""

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/four_ideas.md").read_text()
FOLDER = REPOSITORY / "docs/four_ideas"
WORKERS = [f"/job:worker/replica:0/task:{index}/device:CPU:0" for index in (0, 1)]
PS = "/job:ps/replica:0/task:0/device:CPU:0"


@pytest.fixture(scope="module")
def printed() -> Iterator[dict[str, list[str]]]:
    """What each program prints, line by line; as the page says it. All run at the same time."""
    with contextlib.ExitStack() as stack:
        started = {}
        for path in sorted(FOLDER.glob("*.py")):
            process = subprocess.Popen(
                [sys.executable, f"docs/four_ideas/{path.name}"],
                cwd=REPOSITORY,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            started[path.stem] = process
        lines = {}
        for name, process in started.items():
            stdout, stderr = process.communicate(timeout=90)
            assert process.returncode == 0, stderr
            output = re.search(rf"\$ .*python docs/four_ideas/{name}\.py\n(.*?)```", PAGE, re.DOTALL)
            assert output is not None, name
            assert stdout == output[1]
            lines[name] = stdout.splitlines()
        yield lines


def test_the_layers_of_one_model_on_two_workers(printed: dict[str, list[str]]) -> None:
    hidden, output, same = printed["model_parallelism"]
    assert hidden.endswith(f": {{'{WORKERS[0]}'}}")
    assert output.endswith(f": {{'{WORKERS[1]}'}}")
    assert same.endswith("one process: True")


def test_parts_of_the_data(printed: dict[str, list[str]]) -> None:
    mean, updates = printed["data_parallelism"]
    assert mean.endswith("whole batch: True")
    assert updates == f"200 updates applied; weights [1. 2. 3.] on {PS}"


def test_one_client_builds_every_tower(printed: dict[str, list[str]]) -> None:
    towers, graph, weights = printed["in_graph_replication"]
    assert ast.literal_eval(towers.removeprefix("towers on ")) == WORKERS
    jobs = [device.split("/device")[0] for device in ast.literal_eval(graph.removeprefix("in the one graph: "))]
    assert jobs == ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"]
    assert weights == "weights [1. 2. 3.] as in one process: True"


def test_each_worker_runs_the_same_program(printed: dict[str, list[str]]) -> None:
    *graphs, updates = printed["between_graph_replication"]
    for index, line in enumerate(graphs):
        devices = ast.literal_eval(line.removeprefix(f"the graph of worker {index} ran on "))
        assert devices == [PS, WORKERS[index]], "no graph knows the other worker"
    assert updates == "200 updates applied; weights [1. 2. 3.]"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_page_shows_the_program_as_it_is(path: Path) -> None:
    assert f"```python\n# docs/four_ideas/{path.name}\n{path.read_text()}```" in PAGE
    code = [line for line in path.read_text().splitlines() if line.strip()]
    assert 20 <= len(code) <= 40
