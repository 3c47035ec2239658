"""How Sphinx builds the pages: `make docs`. The sources are the pages at the top, docs/ and one page of tests/."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from tf2dist import __version__

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
html_title = f"tf2dist {release}"
html_copy_source = False
html_show_copyright = False
html_use_index = html_domain_indices = False  # all names are on one page
copybutton_prompt_text = r"\w*\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"


def redirect_from_the_top(app: Sphinx, error: Exception | None) -> None:
    """A file of the usual name at the top of what is built."""
    if not error:
        text = '<!DOCTYPE html>\n<meta http-equiv="refresh" content="0; url=README.html">\n'
        (Path(app.outdir) / "index.html").write_text(text)


def add_menu(app: Sphinx, page: str, source: list[str]) -> None:
    """The front page's list of all pages, which a code host would show as text."""
    if page == root_doc:
        source[0] += (Path(app.confdir) / "menu.txt").read_text()


def set_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """By the language of a page browsers choose the forms of Chinese characters, and screen readers a voice."""
    if page.endswith(".zh") or "/zh/" in page:
        context["language"] = "zh-CN"


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", set_language)
    app.connect("source-read", add_menu)
    app.connect("build-finished", redirect_from_the_top)
