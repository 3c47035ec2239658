"""README.md for package indexes, where links are absolute. All else about what is built stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/tf2dist/tf2dist"


def with_absolute_links(text: str) -> str:
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/main/", text)


setup(
    long_description=with_absolute_links((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
