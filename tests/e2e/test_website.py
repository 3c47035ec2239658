"""The pages as `make docs` builds them, and as a browser shows them: wide and narrow, light and dark."""

import html
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CONTRAST, look
from tests.conftest import PAGES, REPOSITORY, slowness
from tests.shown import is_as_shown

# The page that is a notebook is run, too.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

# Opens every page in a frame of each width, and looks at it in light and in dark. Then it searches for a word.
TOUR = (
    f"""<!DOCTYPE html><link rel="icon" href="data:,"><pre id="seen"></pre><script>{CONTRAST}</script>"""
    + """<script>
const frame = (url, width) => new Promise((loaded) => {
  const made = document.createElement("iframe");
  made.style = `border: 0; height: 900px; width: ${width}px`;
  made.onload = () => loaded(made);
  made.src = url;
  document.body.append(made);
});
const drawn = (text) => {
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d");
  context.font = "16px sans-serif";
  context.fillText(text, 0, 20);
  return canvas.toDataURL();
};
function state(page, width, theme, shown) {
  const document = shown.contentDocument;
  document.body.dataset.theme = theme;
  const faint = [...document.querySelectorAll("body *")].filter(hasText).filter((one) => contrast(one) < 4.5);
  return {
    page, width, theme, innerWidth: shown.contentWindow.innerWidth,
    // On a narrow screen furo scrolls the content sideways, and not the page.
    wide: [...document.querySelectorAll("html, .content")].filter((one) => one.scrollWidth > one.clientWidth)
      .map((one) => `${one.tagName} ${one.scrollWidth}`),
    paper: getComputedStyle(document.body).backgroundColor,
    faint: faint.map((one) => `${contrast(one).toFixed(2)} ${one.outerHTML.slice(0, 120)}`),
    uncopied: [...document.querySelectorAll("pre:not(:has(+ .copybtn))")].map((one) => one.outerHTML.slice(0, 80)),
    cut: [...document.querySelectorAll(".table-wrapper")].filter((one) => one.scrollWidth > one.clientWidth).length,
    broken: [...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src),
  };
}
addEventListener("load", async () => {
  const seen = {pages: [], found: {}, copied: "", hasChinese: drawn("参") !== drawn("数")};
  for (const width of [1280, 390]) {
    for (const page of PAGES) {
      const shown = await frame(page, width);
      for (const theme of ["light", "dark"]) seen.pages.push(state(page, width, theme, shown));
      if (page === "README.html") {
        const document = shown.contentDocument;  // what it would copy is selected then, but a script has no clipboard
        document.execCommand = () => { seen.copied = document.activeElement.value; return true; };
        document.querySelector("div.highlight-console .copybtn").click();
      }
      shown.remove();
    }
  }
  for (const word of WORDS) {
    const search = await frame(`search.html?q=${word}`, 1280);
    await new Promise((done) => setTimeout(done, 5000));
    seen.found[word] = [...search.contentDocument.querySelectorAll("ul.search li a")].map((link) => link.href);
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
</script>"""
)

# What is searched for, and a page that has it.
WORDS = {
    "staleness": "docs/modes.html",
    "梯度": "docs/zh/modes.html",
    "失联": "README.zh.html",
    "异步": "docs/zh/modes.html",
    "参数服务器": "docs/zh/tf1.html",
}

# On a page of its own, in which the tour must see all that is wrong.
SPOILED = """<p style="width: 2000px; color: #777; background: #fff">wide and faint</p><img src="none.png" alt="">
<pre>without a button</pre>"""


@pytest.fixture(scope="module")
def website(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages, built as `make docs` builds them."""
    folder = tmp_path_factory.mktemp("website")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "."]
    completed = subprocess.run(
        [*command, str(folder), "-d", str(folder / ".doctrees")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500 * slowness(),
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def seen(website: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser has seen of all pages, and of a spoiled one."""
    pages = {str(path.relative_to(website)) for path in website.rglob("*.html")} - {"index.html"}
    tour = website / "tour.html"
    lists = {"PAGES": [*sorted(pages), "spoiled.html"], "WORDS": [*WORDS, "度梯"]}
    text = TOUR
    for name, words in lists.items():
        text = text.replace(name, json.dumps(words))
    tour.write_text(text)
    (website / "spoiled.html").write_text((website / "README.html").read_text().replace("<h1>", f"{SPOILED}<h1>"))
    profile = tmp_path_factory.mktemp("profile")
    found, console = look(tour, profile, "--allow-file-access-from-files", virtual_secs=120, timeout_secs=300)
    assert console == []
    spoiled = [page for page in found["pages"] if page["page"] == "spoiled.html"]
    return {**found, "spoiled": spoiled, "pages": [page for page in found["pages"] if page not in spoiled]}


def test_every_page_is_built(website: Path) -> None:
    assert [page for page in PAGES if not (website / page).with_suffix(".html").is_file()] == []
    assert 'url=README.html"' in (website / "index.html").read_text()


def test_a_page_says_its_language(website: Path) -> None:
    for page in PAGES:
        language = "zh-CN" if "zh" in re.split(r"\W", page) else "en"
        assert f'lang="{language}"' in (website / page).with_suffix(".html").read_text().partition("<head>")[0], page


def test_the_notebook_shows_what_it_has_computed(website: Path) -> None:
    page = (website / "docs" / "your_own_model.html").read_text()
    assert "val_accuracy" in page
    assert page.count("<img ") >= 1


def test_what_the_notebook_has_computed_is_as_its_page_shows_it(website: Path) -> None:
    """A code host shows outputs as blocks, which Sphinx leaves out: it has no such tag."""
    _, *cells = PAGES["docs/your_own_model.md"].split("```{code-cell} python\n")
    outputs = [cell.partition("```{only} never\n")[2].partition("```")[0] for cell in cells if "print(" in cell]
    assert all(outputs)
    # Shares of workers and predictions differ from run to run; of the accuracies the last one counts.
    free = re.sub(r"\[\d[\d, ]*\](?! are right)", "[...]", "...\n".join(["", *outputs, ""]))
    shown = re.sub(r"\[0\.[\d., ]*, (0\.\d+)\]", r"[... \1]", free)
    page = (website / "docs" / "your_own_model.html").read_text()
    assert is_as_shown(shown, html.unescape(re.sub(r"<[^>]*>", "", page)))
    assert page.count("are right") == 2, "in the cell, and printed"


@pytest.mark.parametrize("is_chinese", [False, True])
def test_nothing_is_wider_than_the_screen(seen: dict[str, Any], is_chinese: bool) -> None:
    if is_chinese and not seen["hasChinese"]:
        pytest.skip("the browser draws Chinese as boxes; Debian's fonts-noto-cjk is enough")
    pages = [page for page in seen["pages"] if ("zh" in re.split(r"\W", page["page"])) == is_chinese]
    assert {(one["width"], one["innerWidth"]) for one in pages} == {(1280, 1280), (390, 390)}
    assert [(one["page"], one["width"], one["wide"]) for one in pages if one["wide"]] == []


def test_text_has_enough_contrast(seen: dict[str, Any]) -> None:
    papers = {theme: {one["paper"] for one in seen["pages"] if one["theme"] == theme} for theme in ("light", "dark")}
    assert papers["light"].isdisjoint(papers["dark"])
    assert [(one["page"], one["theme"], one["faint"]) for one in seen["pages"] if one["faint"]] == []


def test_every_block_can_be_copied_without_prompts(seen: dict[str, Any]) -> None:
    assert [(one["page"], one["uncopied"]) for one in seen["pages"] if one["uncopied"]] == []
    assert seen["copied"] == "python -m tf2dist mode=async cluster=local3 run_dir=runs/a"


def test_every_picture_is_there(seen: dict[str, Any]) -> None:
    assert [one["broken"] for one in seen["pages"] if one["broken"]] == []


def test_the_tour_sees_what_is_wrong(seen: dict[str, Any]) -> None:
    assert len(seen["spoiled"]) == 4
    for page in seen["spoiled"]:
        assert page["wide"]
        assert [len(page[what]) for what in ("faint", "uncopied", "broken")] == [1, 1, 1]


@pytest.mark.parametrize("word", WORDS)
def test_the_search_finds_a_word(seen: dict[str, Any], word: str) -> None:
    """Also in Chinese, which has no spaces between words."""
    assert any(link.partition("?")[0].endswith(WORDS[word]) for link in seen["found"][word])


def test_the_search_finds_nothing_where_nothing_is(seen: dict[str, Any]) -> None:
    assert seen["found"]["度梯"] == []


def test_options_fit_a_phone(seen: dict[str, Any]) -> None:
    """No description is off the screen; long names are broken there, but not on a wide screen."""
    cut = {one["width"]: one["cut"] for one in seen["pages"] if one["page"] == "docs/options.html"}
    assert cut == {1280: 0, 390: 0}


def test_a_page_leads_to_its_source_and_in_its_language_to_the_next(website: Path) -> None:
    source = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    page = (website / "docs/zh/modes.html").read_text()
    for text in (f'href="{source}/edit/main/docs/zh/modes.md"', "<span>下一页</span>", "logo.svg"):
        assert text in page
    assert "<span>Next</span>" in (website / "docs/modes.html").read_text()
