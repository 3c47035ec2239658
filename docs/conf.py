"""How Sphinx builds the pages: `make docs`. The sources are the pages at the top, docs/ and one page of tests/."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

from tf2dist import __version__

ROOT = Path(__file__).parent.parent
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # of the notebook, in whose output TensorFlow's messages would stand

project = "tf2dist"
release = __version__
# The source folder is the whole repository, so that a link between pages is the same here and on a code host.
include_patterns = ["*.md", "docs/**.md", "tests/FAILURE_MODES.md"]
root_doc = "README"
nitpicky = True
smartquotes_action = "D"  # quotes in sentences are often those of Python

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
nb_execution_in_temp = True
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

default_role = "code"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # with them a signature would be longer than a line
autodoc_typehints_description_target = "documented"
# Types of other packages, whose pages are not here, and of parts that have no page.
nitpick_ignore_regex = [("py:class", r"(?!tf2dist\.).*"), ("py:class", r"tf2dist\.[a-z]\w*\.(?!Splits|Arrays)\w.*")]

html_theme = "furo"
html_theme_options = {  # for the links that show and edit a page's source
    "source_repository": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"],
    "source_branch": "main",
    "source_directory": "",
}
html_favicon = "pictures/logo.svg"
html_title = f"tf2dist {release}"
html_copy_source = False
html_show_copyright = False
html_use_index = html_domain_indices = False  # all names are on one page
copybutton_prompt_text = r"\w*\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

LABELS = {  # in Chinese
    "Search": "搜索",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "Back to top": "回到顶部",
    "View this page": "查看源文件",
    "Edit this page": "编辑此页",
    "Skip to content": "跳到正文",
}


class EnglishAndChineseSearch(SearchEnglish):
    """Finds English words and, in Chinese, which has no spaces, each two characters that stand side by side."""

    js_splitter_code = r"""
function splitQuery(query) {
  const pairs = (run) => run.length < 2 ? [run] : [...run.slice(1)].map((second, index) => run[index] + second);
  const parts = query.match(/[\u3400-\u9fff]+|[^\s\u3400-\u9fff]+/g) || [];
  return parts.flatMap((part) => /[\u3400-\u9fff]/.test(part) ? pairs(part)
    : part.split(/[^\p{Letter}\p{Number}_]+/u).filter((word) => word));
}
"""

    def split(self, input: str) -> list[str]:
        words = []
        for word in re.findall(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+", input):
            is_chinese = "\u3400" <= word[0] <= "\u9fff" and len(word) > 1
            words += [word[i : i + 2] for i in range(len(word) - 1)] if is_chinese else [word]
        return words


def suit_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """The language of the page and of its labels, and places where a phone may break long names in tables."""
    if page.endswith(".zh") or "/zh/" in page:
        # By it browsers choose the forms of Chinese characters, and screen readers a voice.
        context["language"] = "zh-CN"
        context["_"] = context["gettext"] = lambda text, **values: LABELS.get(text, text) % values
    if "body" in context:
        context["body"] = re.sub(r"<td>.*?</td>", with_breaks, context["body"], flags=re.DOTALL)
        context["metatags"] += "<style>@media (min-width: 46em) { wbr { display: none } }</style>"


def with_breaks(cell: re.Match[str]) -> str:
    """The code of a cell with places where a line may end."""
    return re.sub(r"(?<=[\w)\]}][._=/,])(?=[\w\[{$])(?=[^<>]*</span>)", "<wbr>", cell[0])


def redirect_from_the_top(app: Sphinx, error: Exception | None) -> None:
    """A file of the usual name at the top of what is built."""
    if not error:
        text = '<!DOCTYPE html>\n<meta http-equiv="refresh" content="0; url=README.html">\n'
        (Path(app.outdir) / "index.html").write_text(text)


def add_menu(app: Sphinx, page: str, source: list[str]) -> None:
    """The front page's list of all pages, which a code host would show as text."""
    if page == root_doc:
        source[0] += (Path(app.confdir) / "menu.txt").read_text()


def setup(app: Sphinx) -> None:
    app.add_search_language(EnglishAndChineseSearch)
    app.connect("html-page-context", suit_page)
    app.connect("source-read", add_menu)
    app.connect("build-finished", redirect_from_the_top)
