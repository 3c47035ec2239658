"""The report of a comparison, and what a notebook shows, in a real browser: wide and on a phone, light and dark."""

from pathlib import Path
from typing import Any

import pytest

from tests.browser import CONTRAST, look
from tests.compared import compared, usual_secs
from tests.process.test_notebook import outputs
from tf2dist.tools.comparing.comparison_report import report_of

DARK = "--blink-settings=preferredColorScheme=0"
# What the page itself says when it has been loaded and each table was sorted by a click.
PROBE = (
    f"<script>{CONTRAST}</script>"
    + """<script>
const start = (one) => one.outerHTML.slice(0, 80);
addEventListener("load", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const all = [...document.querySelectorAll("body *")].filter((one) => one.tagName !== "SCRIPT");
  const scrolls = (one) => one && (getComputedStyle(one).overflowX === "auto" || scrolls(one.parentElement));
  const wide = all.filter((one) => {
    const box = one.getBoundingClientRect();
    return (box.right > innerWidth + 0.5 || box.left < -0.5) && !scrolls(one.parentElement);
  });
  const table = document.querySelector("table");
  const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "steps/s");
  const values = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value));
  const click = () => { table.tHead.rows[0].cells[column].querySelector("button").click(); return values(); };
  const written = all.filter(hasText);
  const seen = {
    width: innerWidth,
    wide: wide.map(start),
    cut: [...document.querySelectorAll("p, li, td, th, h1, h2")].filter((one) => one.scrollWidth > one.clientWidth + 1
      && getComputedStyle(one).display !== "inline").map(start),
    pale: written.filter((one) => contrast(one) < 4.5).map(start),
    written: written.length,
    pictures: [...document.images].map((image) => image.naturalWidth),
    fetched: performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !/^data:/.test(name)),
    ink: getComputedStyle(document.body).color,
    rising: column < 0 ? [] : click(),
    falling: column < 0 ? [] : click(),
  };
  parent.postMessage(seen, "*");
});
</script>"""
)
WIDTHS = (1280, 390)
# A window of the browser has at least 500 pixels; a frame in it has any width.
FRAMES = f"""<!DOCTYPE html><link rel="icon" href="data:,"><pre id="seen"></pre><script>
const all = [];
addEventListener("message", (event) => {{
  all.push(event.data);
  if (all.length === {len(WIDTHS)}) document.getElementById("seen").textContent = JSON.stringify(all);
}});
</script>""" + "".join(
    f'<iframe src="report.html" style="border: 0; width: {width}px; height: 900px"></iframe>' for width in WIDTHS
)
# What a notebook adds to the page in which it shows an output.
NOTEBOOK = """<!DOCTYPE html><html lang="en"><head><style>
body { background: white; color: black; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
</style></head><body><main>%s</main></body></html>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a report with the figures that every comparison has, and with a long word."""
    folder = tmp_path_factory.mktemp("compared")
    options, results = compared(
        folder, "data=digits", "model=softmax", "until=0.85", secs_per_example=usual_secs, data="x" * 200
    )
    return str(report_of(options, ["until=0.85", f"+data.name={'y' * 300}"], results)[1]["report.html"])


def shown(folder: Path, page: str, *flags: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What the probe has seen in a page, at each width, and what the browser has written to its console."""
    (folder / "report.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    path = folder / "frames.html"
    path.write_text(FRAMES)
    seen, console = look(path, folder / "profile", *flags)
    pages = sorted(seen, key=lambda page: -page["width"])
    assert [page["width"] for page in pages] == list(WIDTHS)
    return pages, console


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_whole_and_can_be_read_and_needs_no_network(tmp_path: Path, report: str, scheme: str) -> None:
    pages, console = shown(tmp_path, report, *[DARK] * (scheme == "dark"))
    assert console == []
    for seen in pages:
        assert seen["fetched"] == []
        assert seen["wide"] == []
        assert seen["cut"] == []
        assert seen["pale"] == []
        assert seen["written"] > 100
        assert seen["ink"] == {"light": "rgb(36, 41, 47)", "dark": "rgb(215, 220, 225)"}[scheme]
        assert len(seen["pictures"]) == 3
        assert all(seen["pictures"])
        assert seen["rising"] == sorted(seen["rising"])
        assert seen["falling"] == seen["rising"][::-1]
        assert len(set(seen["rising"])) > 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_output_in_a_notebook_is_whole_and_can_be_read(tmp_path: Path, scheme: str) -> None:
    _, output, _ = outputs(3, metrics=20)
    pages, console = shown(tmp_path, NOTEBOOK % output, *[DARK] * (scheme == "dark"))
    assert console == []
    for seen in pages:
        assert seen["wide"] == []
        assert seen["cut"] == []
        assert seen["pale"] == []
        assert seen["written"] > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoiled", "by"),
    [
        ("console", "<script>nothing.there()</script>"),
        ("fetched", '<img src="http://127.0.0.1:9/x.png" alt="">'),
        ("wide", '<p style="width: 2000px">wide</p>'),
        ("pale", '<p style="color: #999">a pale text on white</p>'),
        ("cut", '<ul><li style="width: 50px; overflow: hidden; white-space: nowrap">a long line that is cut</li></ul>'),
    ],
)
def test_the_test_sees_what_is_wrong(tmp_path: Path, report: str, spoiled: str, by: str) -> None:
    pages, console = shown(tmp_path, report.replace("<main>", f"<main>{by}"))
    assert console if spoiled == "console" else all(seen[spoiled] for seen in pages)
