"""What code hosts and package indexes read at the top of the repository agrees with the rest."""

import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY
from tf2dist import __version__, tf_constants

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


def test_the_version_is_that_of_the_newest_changes_and_of_the_citation() -> None:
    heading = re.search(r"^## \[(.*?)\] - (\S+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert heading is not None
    assert heading.groups() == (citation["version"], str(citation["date-released"]))
    assert citation["version"] == __version__


@pytest.mark.parametrize("path", [*WORKFLOWS, REPOSITORY / ".pre-commit-config.yaml"], ids=lambda path: path.name)
def test_what_is_made_is_a_target(path: Path) -> None:
    yaml.safe_load(path.read_text())
    made = re.findall(r"(?:run|entry): make (\w+)", path.read_text())
    assert set(made) <= set(TARGETS)
    assert made


def test_every_python_is_tested() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "test.yml").read_text())
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == [f"3.{minor}" for minor in range(50) if f"3.{minor}" in tf_constants.tested_versions()["python"]]
