"""Pages in two languages have the same blocks, in which comments, docstrings and drawings are translated."""

import ast
import functools
import re

from tests.conftest import Block

# By page in Chinese, the one in English.
TWINS = {
    "README.zh.md": "README.md",
    "docs/zh/embeddings.md": "docs/embeddings.md",
    "docs/zh/fit.md": "docs/fit.md",
    "docs/zh/four_ideas.md": "docs/four_ideas.md",
    "docs/zh/hosts.md": "docs/hosts.md",
    "docs/zh/modes.md": "docs/modes.md",
    "docs/zh/tf1.md": "docs/coming_from/tf1.md",
}
# Where the page in English goes on alone.
ENDS = {"docs/hosts.md": "\n## Ranks\n"}
CHINESE = re.compile(r"[\u3000-\u9fff\uff00-\uffef]")
COMMENT = re.compile(r"(?:^|(?<=\s))[ \t]*# .*$", re.MULTILINE)
# Of tasks, files, options and flags, as drawings and lists of files have them.
NAME = re.compile(r"\w+(?:(?:[=/._]|-(?=\d))\w+)+|\w+/|--\w+", re.ASCII)


@functools.cache
def meaning(block: Block) -> tuple[str, str]:
    """The language of a block, and what of it is the same in every language: no comments, no docstrings."""
    first, _, rest = block.text.partition("\n")  # often the name of the file
    if block.language == "python":
        return block.language, f"{first}\n{_without_comments(rest)}"
    if block.language == "text":
        return block.language, block.text
    return block.language, f"{COMMENT.sub('', first) or first}\n{COMMENT.sub('', rest)}"


def _without_comments(program: str) -> str:
    """Without docstrings, too."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def is_translation(chinese: Block, english: Block) -> bool:
    """Whether both blocks say the same. Of a translated drawing, whether it has the same names."""
    if chinese.language == english.language == "text" and CHINESE.search(chinese.text):
        return set(NAME.findall(chinese.text)) == set(NAME.findall(english.text))
    return meaning(chinese) == meaning(english)
