"""The report of a comparison in a real browser, on a wide screen and on a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compared import compared, usual_secs
from tf2dist.comparing.report import report_of

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"),
)
# What the page itself says when it has been loaded and each table was sorted by a click.
PROBE = """<script>
addEventListener("load", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const wide = [...document.querySelectorAll("body *")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.right > innerWidth + 0.5 || box.left < -0.5;
  });
  const table = document.querySelector("table");
  const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "steps/s");
  const values = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value));
  const click = () => { table.tHead.rows[0].cells[column].querySelector("button").click(); return values(); };
  const seen = {
    width: innerWidth,
    height: document.documentElement.scrollHeight,
    wide: wide.map((one) => one.outerHTML.slice(0, 80)),
    cut: [...document.querySelectorAll("p, li, td, th, h1, h2")].filter((one) => one.scrollWidth > one.clientWidth + 1
      && getComputedStyle(one).display !== "inline").map((one) => one.outerHTML.slice(0, 80)),
    pictures: [...document.images].map((image) => image.naturalWidth),
    fetched: performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !/^data:/.test(name)),
    ink: getComputedStyle(document.body).color,
    rising: click(),
    falling: click(),
  };
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>"""
# A window of the browser has at least 500 pixels; a frame in it has any width.
FRAME = """<!DOCTYPE html><link rel="icon" href="data:,"><pre id="seen"></pre><script>
addEventListener("message", (event) => { document.getElementById("seen").textContent = event.data; });
</script><iframe src="report.html" style="border: 0; width: %dpx; height: 900px"></iframe>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a report with the figures that every comparison has, and with a long word."""
    folder = tmp_path_factory.mktemp("compared")
    options, results = compared(
        folder, "data=digits", "model=softmax", "until=0.85", secs_per_example=usual_secs, data="x" * 200
    )
    return str(report_of(options, ["until=0.85", f"+data.name={'y' * 300}"], results)[1]["report.html"])


def shown(folder: Path, page: str, width: int, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """What the probe has seen in a page, and what the browser has written to its console."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium; Debian's package of that name is enough")
    (folder / "report.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    path = folder / "frame.html"
    path.write_text(FRAME % width)
    completed = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            *flags,
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    match = re.search(r'<pre id="seen">(.+?)</pre>', completed.stdout, re.DOTALL)
    assert match, completed.stdout[-500:] + completed.stderr[-2000:]
    console = [line for line in completed.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(match[1])), console


def assert_whole(seen: dict[str, Any], console: list[str]) -> None:
    assert console == []
    assert seen["fetched"] == []
    assert seen["wide"] == []
    assert seen["cut"] == []
    assert len(seen["pictures"]) == 3
    assert all(seen["pictures"])
    assert seen["rising"] == sorted(seen["rising"])
    assert seen["falling"] == seen["rising"][::-1]
    assert len(set(seen["rising"])) > 1


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_is_whole_and_needs_no_network(tmp_path: Path, report: str, width: int) -> None:
    seen, console = shown(tmp_path, report, width)
    assert seen["width"] == width
    assert_whole(seen, console)


@pytest.mark.slow
def test_the_dark_report(tmp_path: Path, report: str) -> None:
    light, _ = shown(tmp_path, report, 1280)
    dark, console = shown(tmp_path, report, 1280, "--blink-settings=preferredColorScheme=0")
    assert_whole(dark, console)
    assert light["ink"] != dark["ink"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoiled", "by"),
    [
        ("console", "<script>nothing.there()</script>"),
        ("fetched", '<img src="http://127.0.0.1:9/x.png" alt="">'),
        ("wide", '<p style="width: 2000px">wide</p>'),
        ("cut", '<ul><li style="width: 50px; overflow: hidden; white-space: nowrap">a long line that is cut</li></ul>'),
    ],
)
def test_the_test_sees_what_is_wrong(tmp_path: Path, report: str, spoiled: str, by: str) -> None:
    seen, console = shown(tmp_path, report.replace("<main>", f"<main>{by}"), 390)
    assert console if spoiled == "console" else seen[spoiled]
