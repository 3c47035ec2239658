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
    requirements = [Requirement(line) for line in metadata.requires("tf2dist") or []]
    tested = {
        requirement.name: requirement.specifier
        for requirement in requirements
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    }
    return {"python": SpecifierSet(about["Requires-Python"] or ""), **tested}


def installed_version(module: str) -> str:
    """The version of the package that a module comes from, which may have another name, as keras-nightly has.

    Raises:
        importlib.metadata.PackageNotFoundError: there is none.
    """
    try:
        version = metadata.version(module)
    except metadata.PackageNotFoundError:
        others = metadata.packages_distributions().get(module)
        if not others:
            raise
        version = metadata.version(others[0])
    return version or "unknown"  # None where the metadata is damaged


def untested(packages: Iterable[str]) -> list[str]:
    """Those packages that are there in another version than the tested ones, such as "keras 3.16.0"."""
    untested_packages = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        tested = tested_versions()
        for package in packages:
            version = installed_version(package)
            if not tested[package].contains(version, prereleases=True):
                untested_packages.append(f"{package} {version}")
    return untested_packages
