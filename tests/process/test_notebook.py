"""What `fit` shows below the cell of a notebook, in a real kernel."""

import re
from typing import Any

import pytest

from tf2dist.fitting.consoles import MAX_EPOCHS

CELL = """
from tf2dist.fitting.consoles import console_of
from tf2dist.messages import ProgressMessage
metrics = {{f"<i>{{number}}": 1.0 for number in range({metrics})}}
with console_of(1) as console:
    console.note("fit: starting 2 workers")
    console.status("<b>starting</b>")
    for epoch in range({epochs}):
        console.progress(ProgressMessage(6 * epoch + 3, 6 * {epochs}, {{"loss": 0.5}}, 10.0, task="worker-0"))
        console.epoch(epoch + 1, {epochs}, {{"loss": 0.25 - epoch / 1000, **metrics, "per_class": [0.1]}})
    console.epoch({epochs}, {epochs}, {{"loss": 0.125, **metrics}})
    console.note("done")
"""


def run_cell(code: str) -> list[Any]:
    """What is below the cell in the end."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cell = nbformat.v4.new_code_cell(code)
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), timeout=100).execute()
    return list(cell.outputs)


def outputs(epochs: int, metrics: int = 1) -> tuple[str, str, str]:
    """What is printed, and what is shown as HTML and as text, after so many epochs with a loss and other metrics."""
    before, shown, after = run_cell(CELL.format(epochs=epochs, metrics=metrics))
    assert shown.output_type == "display_data"
    assert (before.name, after.name) == ("stdout", "stdout")
    return before.text + after.text, shown.data["text/html"], shown.data["text/plain"]


def test_a_bar_and_a_table_of_epochs_are_below_the_cell() -> None:
    printed, page, text = outputs(3)
    assert printed == "fit: starting 2 workers\ndone\n", "an epoch is a row and no line"
    assert '<progress value="15" max="18"' in page
    assert "</progress> step 15/18  loss 0.5000  10 steps/s  0:00 left" in page
    assert re.findall("<th>(.*?)</th>", page) == ["epoch", "loss", "&lt;i&gt;0"]
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(<td>.*?)</tr>", page)]
    assert rows == [["1/3", "0.2500", "1.0000"], ["2/3", "0.2490", "1.0000"], ["3/3", "0.1250", "1.0000"]]
    assert text.splitlines()[0] == "epoch 1/3, loss 0.2500, <i>0 1.0000"
    assert text.splitlines()[-1].startswith("━━━━━━━━━━━━━━━━──── step 15/18")


def test_the_table_has_the_last_epochs_of_many() -> None:
    _, page, text = outputs(5 * MAX_EPOCHS)
    assert page.count("<tr>") == MAX_EPOCHS + 1
    assert f"<td>{5 * MAX_EPOCHS}/{5 * MAX_EPOCHS}</td>" in page
    assert "the last 20 epochs; the history has all" in page
    assert "the last 20 epochs; the history has all" in text


def test_a_status_is_shown_until_there_is_progress() -> None:
    code = "from tf2dist.fitting.consoles import console_of\nconsole_of(1).status('starting <TensorFlow>')"
    (output,) = run_cell(code)
    assert output.data == {"text/plain": "starting <TensorFlow>", "text/html": "<div>starting &lt;TensorFlow&gt;</div>"}
