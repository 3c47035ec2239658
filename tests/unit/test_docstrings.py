"""The page of the Python interface has every public name, and their docstrings say what each parameter is."""

import ast
import re
from itertools import chain

import pytest

import tf2dist
from tests.conftest import PAGES, REPOSITORY

FILES = {path: path.read_text() for path in (REPOSITORY / "tf2dist").rglob("*.py")}
SHOWN = re.findall(r"^\.\. auto\w+:: ([\w.]+)", PAGES["docs/api.md"], re.MULTILINE)
Definition = ast.FunctionDef | ast.ClassDef


def definition(name: str) -> Definition:
    """The one function or class of this name in the package, read and not imported: Keras would take seconds."""
    pattern = re.compile(rf"^(?:def|class) {name}\b", re.MULTILINE)
    nodes = chain.from_iterable(ast.parse(text).body for text in FILES.values() if pattern.search(text))
    (found,) = (node for node in nodes if isinstance(node, Definition) and node.name == name)
    return found


def named(node: Definition, section: str) -> set[str]:
    """What a section of the docstring has entries of."""
    text = (ast.get_docstring(node) or "").partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    return {name for names in re.findall(r"^    (\w+(?:, \w+)*):", text, re.MULTILINE) for name in names.split(", ")}


def parameters(node: ast.FunctionDef) -> set[str]:
    """Those that a user gives: not `self`, and not the fixtures that a fixture asks for."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any("fixture" in decorator for decorator in decorators):
        return set()
    if gathers := [match[1] for decorator in decorators if (match := re.match(r"with_arguments\((\w+)", decorator))]:
        fields = definition(gathers[0]).body  # of a dataclass
        return {ast.unparse(field.target) for field in fields if isinstance(field, ast.AnnAssign)} - {"_"}
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} - {"self"}


def undocumented(node: Definition, path: str) -> list[str]:
    """What lacks a docstring, or is not in one."""
    lacks = [] if ast.get_docstring(node) else [path]
    if isinstance(node, ast.FunctionDef):
        return lacks + [f"{path}({name})" for name in sorted(parameters(node) ^ named(node, "Args"))]
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and (member.name[0] != "_" or member.name == "__call__"):
            lacks += undocumented(member, f"{path}.{member.name}")
        elif isinstance(member, ast.AnnAssign) and (name := ast.unparse(member.target))[0] != "_":
            lacks += [] if name in named(node, "Attributes") else [f"{path}.{name}"]
    return lacks


def test_the_page_has_every_public_name() -> None:
    assert {f"tf2dist.{name}" for name in tf2dist.__all__} <= set(SHOWN)


@pytest.mark.parametrize("path", SHOWN)
def test_every_parameter_is_in_the_docstring(path: str) -> None:
    assert undocumented(definition(path.rpartition(".")[2]), path) == []


def test_every_module_has_a_docstring() -> None:
    assert [str(path) for path, text in FILES.items() if text and not ast.get_docstring(ast.parse(text))] == []
