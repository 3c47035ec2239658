"""The rooms of the package and the arrows between them, read from the code's own imports.

Each rule is a function of a folder, so that the tests below can also break it on a copy of the package.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import permutations
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "tf2dist"

# From the ground up: a module imports from floors below its own, and on its own floor from rooms named before its own.
# Those of the first floor import one another as they like, without circles.
FLOORS = [
    ("declared", "errors", "files", "linux", "messages", "palette", "registry", "signals", "tf_constants", ""),
    ("config", "cluster"),
    ("tf_internals", "data", "model", "checkpoint"),
    ("process", "training"),
    ("hosts", "launch"),
    ("tools",),
    (
        *("fitting", "run", "task", "testing"),
        *("compare", "doctor", "engines", "evaluate", "export", "plot", "predict", "render", "cli", "__main__"),
    ),
]
# What a task does, on the floor of the doors: it knows no tools either.
CORE_DOORS = ("run", "task")
WITHOUT_TENSORFLOW = (
    *("config", "cluster", "hosts", "launch", "cli", "doctor"),
    *("compare", "engines", "evaluate", "export", "palette", "plot", "predict", "render", "__main__", ""),
    *("tools.comparing", "tools.end_of_run", "tools.engines", "tools.plotting"),
)
HEAVY = ("tensorflow", "keras", "tensorboard", "tensorflow_datasets")
TWINS = ("training.synchronous", "training.parameter_server")
INTERNALS = ("tf_internals", "tf_constants")  # a package, and a module for rooms without TensorFlow


def modules(package: Path) -> dict[str, Path]:
    """Every module below `package`, by its dotted name there; "" is the package itself. Templates are none."""
    result = {}
    for path in package.rglob("*.py"):
        if path.parent.name == "templates":
            continue
        parts = path.relative_to(package).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


def room(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> tuple[int, int]:
    """The number of a module's floor, and that of its room on it."""
    return next(
        (number, rooms.index(room(module)) if number else 0)
        for number, rooms in enumerate(FLOORS)
        if room(module) in rooms
    )


def tree(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


@cache
def parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    # CPython 3.11 counts the depth of all threads' parsers together, so one of another thread may spoil this one:
    # gh-106905. Threads of earlier tests may still trace functions.
    except SystemError:
        return ast.parse(text)


def imported(path: Path, *, at_import: bool = False) -> tuple[str, ...]:
    """The dotted names that a file imports; `at_import`: only those that importing the file imports."""
    return imported_by(tree(path), at_import)


# A copy of the package is broken in one file at a time: what is found in the others is found once.
@cache
def imported_by(module: ast.Module, at_import: bool) -> tuple[str, ...]:
    return tuple(each_import(module, at_import))


def each_import(module: ast.Module, at_import: bool) -> Iterator[str]:
    nodes: list[ast.AST] = [module]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (at_import and (is_later or is_for_types)):
            nodes += ast.iter_child_nodes(node)


def arrows(package: Path, *, at_import: bool = False) -> Iterator[tuple[str, str]]:
    """(importer, imported) among the modules of the package."""
    known = modules(package)
    for module, path in known.items():
        for name in imported(path, at_import=at_import):
            target = name.removeprefix("tf2dist").removeprefix(".")
            if name.partition(".")[0] != "tf2dist" or target.startswith("conf."):
                continue
            target = target if target in known else target.rpartition(".")[0]
            if target != module:
                yield module, target


def upward(package: Path) -> list[str]:
    """Arrows to a floor above, to a room named later on the same floor, or from the core to the tools.

    The package itself may name for type checkers what it imports on first use.
    """
    found, at_import = set(), set(arrows(package, at_import=True))
    for importer, target in arrows(package):
        if importer == "" and (importer, target) not in at_import:
            continue
        knows_tools = room(importer) in CORE_DOORS and room(target) == "tools"
        if floor(importer) < floor(target) or knows_tools:
            found.add(f"{importer} -> {target}")
    return sorted(found)


def circles(package: Path) -> list[str]:
    """A circle of modules, one of which cannot be understood without the others; imports for types count, too.

    The package itself is none of them: it names what it imports on first use.
    """
    graph: dict[str, set[str]] = {}
    for importer, target in arrows(package):
        if importer:
            graph.setdefault(importer, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def base_names_twice(package: Path) -> list[str]:
    """File names that stand in two folders: in an editor's tab a name says where one is."""
    homes: dict[str, list[str]] = {}
    for module, path in modules(package).items():
        homes.setdefault(path.stem, []).append(module)
    twice = {name for name in homes if len(homes[name]) > 1} - {"__init__", "__main__"}
    return sorted(f"{name}: {', '.join(homes[name])}" for name in twice)


def reach_tensorflow(package: Path) -> list[str]:
    """Modules that must start fast, and import TensorFlow or Keras through others or by themselves."""
    graph: dict[str, set[str]] = {}
    for importer, target in arrows(package, at_import=True):
        graph.setdefault(importer, set()).add(target)
    heavy = {
        module
        for module, path in modules(package).items()
        if any(name.partition(".")[0] in HEAVY for name in imported(path, at_import=True))
    }
    results = []
    for module in modules(package):
        if not f"{module}.".startswith(tuple(f"{name}." for name in WITHOUT_TENSORFLOW)):
            continue
        seen, queue = set(), [module]
        while queue:
            current = queue.pop()
            if current not in seen:
                seen.add(current)
                queue += graph.get(current, ())
        results += [f"{module} -> {reached}" for reached in sorted(seen & heavy)]
    return sorted(results)


def between_twins(package: Path) -> list[str]:
    return sorted(
        f"{importer} -> {target}"
        for importer, target in arrows(package)
        for twin, other in permutations(TWINS, 2)
        if importer.startswith(twin) and target.startswith(other)
    )


def unknown_at_the_top(package: Path) -> list[str]:
    known = set().union(*FLOORS)
    return sorted({room(module) for module in modules(package)} - known)


def private_names(package: Path) -> list[str]:
    """Private names of other packages, and names that they read from their environment, outside of `INTERNALS`."""
    results = []
    for module, path in modules(package).items():
        if f"{module}.".startswith(tuple(f"{name}." for name in INTERNALS)):
            continue
        results += [f"{module}: {name}" for name in private_names_in(tree(path))]
    return sorted(set(results))


@cache
def private_names_in(module: ast.Module) -> list[str]:
    own_names = set(defined(module))
    results = [name for name in imported_by(module, False) if FOREIGN_MODULE.match(name)]
    results += [repr(text) for text in texts(module) if FOREIGN_TEXT.fullmatch(text)]
    attributes = [node for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    # Those of Python's own modules stay.
    foreign = [
        node for node in attributes if node.attr not in own_names and ast.unparse(node.value) not in ("os", "sys")
    ]
    return results + [ast.unparse(node) for node in foreign if re.match(r"_[^_]", node.attr)]


def texts(module: ast.Module) -> Iterator[str]:
    """The texts in a file, without those that are parts of others."""
    nodes = list(ast.walk(module))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def class_names_twice(package: Path) -> list[str]:
    homes: dict[str, list[str]] = {}
    for module, path in modules(package).items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    return sorted(f"{name}: {', '.join(modules)}" for name, modules in homes.items() if len(modules) > 1)


def names_given_twice(package: Path) -> list[str]:
    """Functions, classes and constants to which a module gives a name that it has given before."""
    results = []
    for module, path in modules(package).items():
        names = [name for node in tree(path).body for name in given_by(node)]
        results += [f"{module}: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    return results


def given_by(node: ast.stmt) -> list[str]:
    """The names that a statement of a module gives."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]


def defined(module: ast.Module) -> Iterator[str]:
    """The names that a module gives to its own functions, classes, variables and attributes."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


# What reads a tree, or makes objects of one, and the modules that do so, with the reason.
CODEC = {
    *("dataclasses.fields", "dataclasses.is_dataclass", "typing.get_type_hints"),
    *("yaml.load", "yaml.safe_load", "OmegaConf.create", "OmegaConf.to_container"),
}
CODECS = {
    "declared": "dataclasses from trees",
    "config.decode": "options from trees",
    "config.option": "the declarations of options",
    "config.schema": "options as YAML",
    "config.compose": "the files in conf/, as they are written",
    "config.load": "references between options",
    "fitting.request": "the arguments that are the plan of the epochs",
}


def codecs(package: Path) -> list[str]:
    """Modules that read trees for themselves, beside the codec."""
    found = []
    for module, path in modules(package).items():
        attributes = {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        if module not in CODECS:
            found += [f"{module}: {name}" for name in sorted(CODEC & {*attributes, *imported(path)})]
    return found


def converted(package: Path) -> list[str]:
    """Modules with code that AutoGraph would convert, which takes time and leaves what it has generated in /tmp."""
    found = []
    for module, path in modules(package).items():
        nodes = list(ast.walk(tree(path)))
        uses = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) == "tf.function"]
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in uses]
        plain = [call for call in calls if "autograph=False" in map(ast.unparse, call.keywords)]
        found += [module] if len(uses) > len(plain) else []
    return found


FOREIGN_MODULE = re.compile(r"(tensorflow\.(python|compiler|core)|keras\.src|tensorflow_datasets\.core)\b")
# Private attributes, such as "_momentums", but no keys of Hydra's, such as "_target_"; modules; environment variables.
FOREIGN_TEXT = re.compile(
    r"_[a-z]\w*[a-z0-9]|seed_generator_state|keras\.(_tf_keras|src)\b.*|tensorflow\.(python|compiler|core)\b.*"
    r"|TF_(?!CONFIG)[A-Z_]+|KERAS_[A-Z_]+|GRPC_[A-Z_]+"
)
RULES = {
    "one codec reads trees": codecs,
    "AutoGraph converts nothing": converted,
    "no arrow runs up": upward,
    "no circle": circles,
    "what starts fast reaches no TensorFlow": reach_tensorflow,
    "the twins do not know each other": between_twins,
    "private names stand in one package": private_names,
    "every module has a floor": unknown_at_the_top,
    "a class name has one meaning": class_names_twice,
    "a name of a module has one meaning": names_given_twice,
    "a file name has one meaning": base_names_twice,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: str) -> None:
    assert RULES[rule](PACKAGE) == []


BREAKS = [
    ("one codec reads trees", "launch/sweep.py", "from dataclasses import fields"),
    ("one codec reads trees", "checkpoint/snapshot.py", "import yaml\nyaml.safe_load('')"),
    ("AutoGraph converts nothing", "model/step.py", "CALL = tf.function(print)"),
    ("AutoGraph converts nothing", "model/step.py", "CALL = tf.function(print, autograph=True)"),
    ("AutoGraph converts nothing", "model/step.py", "@tf.function\ndef late():\n    pass"),
    ("no arrow runs up", "cluster/spec.py", "from tf2dist.launch import console"),
    ("no arrow runs up", "config/schema.py", "def late():\n    from tf2dist.cluster import spec"),
    ("no arrow runs up", "checkpoint/store.py", "from tf2dist.hosts import meeting"),
    ("no arrow runs up", "__init__.py", "from tf2dist.tools.finished import loading"),
    ("no arrow runs up", "data/arrays.py", "from tf2dist.model import step"),
    ("no arrow runs up", "launch/single_run.py", "def late():\n    from tf2dist.tools import plotting"),
    ("no arrow runs up", "run.py", "def late():\n    from tf2dist.tools.finished import loading"),
    ("no circle", "errors.py", "from tf2dist import registry"),
    ("no circle", "errors.py", "if TYPE_CHECKING:\n    from tf2dist import registry"),
    ("no circle", "data/arrays.py", "def late():\n    from tf2dist.data import loading"),
    *[
        ("what starts fast reaches no TensorFlow", file, line)
        for file in (
            "launch/launcher.py",
            "hosts/meeting.py",
            "config/load.py",
            "cluster/spec.py",
            "cli.py",
            "doctor.py",
        )
        for line in ("import tensorflow as tf", "from tf2dist.model import step")
    ],
    ("what starts fast reaches no TensorFlow", "errors.py", "import keras"),
    (
        "the twins do not know each other",
        "training/synchronous/loop.py",
        "from tf2dist.training.parameter_server import async_loop",
    ),
    (
        "the twins do not know each other",
        "training/parameter_server/loop.py",
        "import tf2dist.training.synchronous.peers",
    ),
    ("private names stand in one package", "model/step.py", "from tensorflow.python.eager import context"),
    ("private names stand in one package", "model/step.py", "import keras.src.backend"),
    ("private names stand in one package", "training/loop.py", "def f(o):\n    return o._iterations"),
    ("private names stand in one package", "training/loop.py", "def f(o):\n    o._iterations = 0"),
    ("private names stand in one package", "model/step.py", "def f(o):\n    return getattr(o, '_rate', None)"),
    ("private names stand in one package", "model/step.py", "NAME = '_noinline'"),
    ("private names stand in one package", "launch/start.py", "MODULE = 'keras.src.wrappers'"),
    ("private names stand in one package", "launch/start.py", "LEVEL = {'TF_CPP_MIN_LOG_LEVEL': '2'}"),
    ("private names stand in one package", "tf_internals_too.py", "import keras.src.backend"),
    ("every module has a floor", "novelty.py", ""),
    ("every module has a floor", "novelties/__init__.py", ""),
    ("a class name has one meaning", "training/synchronous/loop.py", "class AsyncLoop:\n    pass"),
    ("a name of a module has one meaning", "training/parameter_server/schedule.py", "POLL_SECS = 0.05"),
    ("a name of a module has one meaning", "errors.py", "class ConfigError(Exception):\n    pass"),
    ("a file name has one meaning", "config/launcher.py", ""),
]


# Of each rule; `make thorough` tests the others.
FIRST = {rule: (rule, file, line) for rule, file, line in reversed(BREAKS)}


@pytest.mark.parametrize(
    ("rule", "file", "line"),
    [pytest.param(*each, marks=[] if each in FIRST.values() else [pytest.mark.thorough]) for each in BREAKS],
    ids=[f"{file}: {line}" for _, file, line in BREAKS],
)
def test_each_rule_can_be_broken(tmp_path: Path, rule: str, file: str, line: str) -> None:
    package = tmp_path / "tf2dist"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / file).parent.mkdir(exist_ok=True)
    with (package / file).open("a", encoding="utf-8") as text:
        text.write(f"\n\n{line}\n")
    assert RULES[rule](package), "the rule sees nothing"


@pytest.mark.parametrize("module", ["tf2dist", "tf2dist.data", "tf2dist.cli", "tf2dist.doctor"])
def test_modules_that_must_start_fast_load_no_tensorflow(module: str) -> None:
    heavy = "{'tensorflow', 'keras', 'h5py'}"
    code = f"import sys, {module}; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr


def test_the_package_itself_loads_no_numpy() -> None:
    code = "import sys, tf2dist, tf2dist.data; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_plugin_finds_what_it_needs() -> None:
    from tf2dist import register_data, register_model, register_optimizer
    from tf2dist.data import Arrays, Splits, load

    assert all(map(callable, (register_data, register_model, register_optimizer, Arrays, Splits, load)))
    with pytest.raises(ImportError):
        from tf2dist.data import nothing_of_this_name  # type: ignore[attr-defined]  # noqa: F401
