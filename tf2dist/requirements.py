"""Which versions of other packages this project is tested with, as its installation says."""

import contextlib
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def tested_versions() -> dict[str, SpecifierSet]:
    """By package; "python" is among them.

    Raises:
        importlib.metadata.PackageNotFoundError: this project is not installed.
    """
    about = metadata.metadata("tf2dist")
    wanted = [Requirement(line) for line in metadata.requires("tf2dist") or []]
    tested = {need.name: need.specifier for need in wanted if not need.marker or need.marker.evaluate({"extra": ""})}
    return {"python": SpecifierSet(about["Requires-Python"] or ""), **tested}


def untested(packages: Iterable[str]) -> list[str]:
    """Those packages that are there in another version than the tested ones, such as "keras 3.16.0"."""
    found = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        tested = tested_versions()
        for package in packages:
            version = metadata.version(package)
            if not tested[package].contains(version, prereleases=True):
                found.append(f"{package} {version}")
    return found
