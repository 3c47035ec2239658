"""The pages agree with the code: options, defaults, links, commands, names in the walks, tests of failure modes."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

import pytest
import yaml
from hydra._internal.utils import get_args_parser

import tf2dist
from tests.conftest import BLOCKS, PAGES, REPOSITORY, Block, blocks_of
from tests.pictures import drawings
from tests.twins import ENDS, TWINS, is_translation
from tf2dist import doctor, render
from tf2dist.config.compose import PLUGIN_GROUPS, groups, values
from tf2dist.config.option import COMMAND_LINE
from tf2dist.config.schema import MODES, OPTIONS, RunConfig
from tf2dist.data.known import IMAGES
from tf2dist.data.location import DEFAULT_EPOCHS
from tf2dist.tools.comparing.matrix import PARSERS

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGES["docs/options.md"].splitlines()
    if line.startswith("| `")
]
CHOSEN = {
    group: name
    for entry in yaml.safe_load((REPOSITORY / "conf/config.yaml").read_text())["defaults"]
    if isinstance(entry, dict)
    for group, name in entry.items()
    if name
}


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


SECTIONS = PAGES["docs/options.md"].split("\n## ")
LISTED = {  # by option: the default, the types of the row, and the description
    name: (default, row[1], row[2])
    for row in ROWS
    if len(row) == 3 and "=" in row[0]
    for name, _, default in (code.partition("=") for code in in_code(row[0]))
}


def defaults() -> dict[str, str]:
    """By option: as in the file of the default choice, or else in the schema, or else in the first file that has it."""
    declared = {name: option.default_text for name, option in OPTIONS.items() if not option.is_choice}
    files = [(group, name) for group in PLUGIN_GROUPS for name in groups()[group]]
    chosen = [(group, name) for group, name in files if CHOSEN[group] == name]
    return written(files[::-1]) | declared | written(chosen)


def written(files: list[tuple[str, str]]) -> dict[str, str]:
    """The defaults in files of ``conf/``, as written there; the last one counts."""
    return {
        f"{group}.{key}": value for group, name in files for key, value in values(group, name).items() if key != "name"
    }


def test_every_option_is_listed_with_its_default() -> None:
    assert {name: default for name, (default, _, _) in LISTED.items()} == defaults()


def types_in(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each option of a dataclass with the name of its type, without None."""
    for entry in fields(section):
        if is_dataclass(entry.type):
            yield from types_in(entry.type, f"{prefix}{entry.name}.")
        else:
            kind = entry.type.__name__ if entry.type in (bool, float, int, str) else str(entry.type)
            yield f"{prefix}{entry.name}", kind.removesuffix(" | None")


def test_every_option_is_listed_with_its_type() -> None:
    types = dict(types_in(RunConfig))
    wrong = {name: kind for name, (_, kind, _) in LISTED.items() if name in types and kind != types[name]}
    assert wrong == {}
    assert {kind for _, kinds, _ in LISTED.values() for kind in kinds.split(", ")} <= {*types.values(), "list[int]"}


def test_the_page_says_what_fit_takes_in_options() -> None:
    """Where `fit` has an argument instead, the row names it; what only the command has is told there or above."""
    texts = {row[0].strip("`"): row[2] for row in ROWS if len(row) == 3} | {
        name: text for name, (_, _, text) in LISTED.items()
    }
    for name, option in OPTIONS.items():
        if option.fit == COMMAND_LINE:
            above = [section.partition("\n|")[0] for section in SECTIONS if f"\n| `{name}=" in section]
            assert "not in `fit`" in " ".join([texts[name.removesuffix(".name")], *above]).lower(), name
        else:
            named = re.search(r"\(`fit`: (.*?)\)", texts[name.removesuffix(".kind")])
            assert (named[1].replace("`", "") if named else "") == option.fit, name


def test_the_ten_options_come_first() -> None:
    ten = dict(code.split("=") for row in ROWS[:10] for code in in_code(row[0]))
    assert len(ten) == 10
    assert ten == {name: (defaults() | CHOSEN)[name] for name in ten}


def test_the_choices_are_those_in_conf() -> None:
    rows = {row[0].strip("`"): row[1] for row in ROWS if row[0].strip("`") in groups()}
    for group, shown in rows.items():
        listed = set(in_code(shown)) | ({"local2", "local3"} if "`local1` ... `local4`" in shown else set())
        assert listed == set(groups()[group])
        assert re.findall(r"\*\*`(.*?)`\*\*", shown) == ([CHOSEN[group]] if group in CHOSEN else [])
    assert set(rows) == set(groups())


def test_the_default_length_of_a_training() -> None:
    titles = {name: images.title for name, images in IMAGES.items()}
    passes = {titles.get(name, name): f"{epochs:g}" for name, epochs in DEFAULT_EPOCHS.items()}
    text = ", ".join(f"{count} over {title}" for title, count in passes.items()).replace(" over", " passes over", 1)
    assert text in LISTED["train.epochs"][2]


def test_the_modes_have_the_options_that_their_page_says() -> None:
    """In the rows that name one; the last column is mode=sync with algorithm=local_sgd."""
    section = PAGES["docs/modes.md"].partition("## What each mode supports")[2]
    rows = re.findall(r"^\| .*\(`(\w+\.\w+)`\) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 4
    chosen = [{"mode": mode, "algorithm.kind": "plain"} for mode in MODES]
    chosen.append({"mode": "sync", "algorithm.kind": "local_sgd"})
    for name, cells in rows:
        conditions = [one for one in OPTIONS[name].only_for if one.option in chosen[0]]
        refused = [not all(one.holds(None, choices[one.option]) for one in conditions) for choices in chosen]
        assert [cell.startswith("no") for cell in cells.split(" | ")] == refused, name


# sh is for commands alone, console and pycon for commands with what they print, text for what is neither.
LANGUAGES = {"console", "diff", "dockerfile", "json", "pycon", "python", "sh", "text", "yaml"}


def test_every_block_has_a_language() -> None:
    """Or is a directive, which the build of the pages executes."""
    found = {(block.page, block.language) for block in BLOCKS if not block.language.startswith("{")}
    assert {(page, language) for page, language in found if language not in LANGUAGES} == set()
    nameless = [block for block in BLOCKS if block.language == "python" and not block.text.startswith("# ")]
    assert nameless == []
    prompts = [block.text for block in BLOCKS if block.language == "console" and not re.match(r"\w*[$] ", block.text)]
    assert prompts == []


def without_code(text: str) -> str:
    return re.sub(r"^ *(`{3,}).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(text: str) -> set[str]:
    """Those of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


LINKS = [
    (page, link)
    for page, text in PAGES.items()
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(text))
    if "://" not in link
]


def leads(page: str, link: str) -> bool:
    """Whether a link leads to a file, and to a heading if it names one."""
    path, _, anchor = link.partition("#")
    target = (REPOSITORY / page).parent / path if path else REPOSITORY / page
    return target.resolve().is_file() and (not anchor or anchor in anchors(target.read_text()))


def test_every_link_leads_somewhere() -> None:
    assert [each for each in LINKS if not leads(*each)] == []


def test_the_front_page_leads_to_every_page() -> None:
    reached, found = set[str](), {"README.md"}
    while found - reached:
        reached |= found
        links = [(REPOSITORY / page).parent / link.partition("#")[0] for page, link in LINKS if page in reached]
        paths = {str(path.resolve().relative_to(REPOSITORY)) for path in links}
        found |= paths & set(PAGES)
    assert reached == set(PAGES)


@pytest.mark.parametrize("name", drawings())
def test_the_drawings_are_what_is_drawn(name: str) -> None:
    """Of the figures in bench.json; `python -m tests.pictures` draws them anew."""
    assert (REPOSITORY / "docs/pictures" / name).read_text() == drawings()[name]


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:tests|tf2dist|docs)/[\w/]+\.(?:py|md))`", "\n".join(PAGES.values()))
    assert [path for path in named if not (REPOSITORY / path).is_file()] == []


def test_every_file_in_the_tables_of_inside_exists() -> None:
    """There a file is named by the end of its path."""
    paths = [path.as_posix() for folder in ("tf2dist", "tests") for path in (REPOSITORY / folder).rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", PAGES["docs/inside.md"] + PAGES["docs/versions.md"])
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []


@pytest.mark.parametrize(("chinese", "english"), TWINS.items())
def test_a_chinese_page_shows_what_the_english_one_shows(chinese: str, english: str) -> None:
    """The same blocks in the same order, and the same options and files."""
    whole, end = PAGES[english], ENDS.get(english, "")
    text = whole[: whole.index(end)] if end else whole

    def named(text: str) -> set[str]:
        return set(re.findall(r"\w+\.\w+", " ".join(in_code(without_code(text)))))

    pairs = list(zip_longest(blocks_of(chinese, PAGES[chinese]), blocks_of(english, text)))
    assert [pair for pair in pairs if None in pair or not is_translation(*pair)] == []
    assert named(PAGES[chinese]) == named(text)


def test_every_chinese_page_has_a_twin_or_none() -> None:
    pages = {page for page in PAGES if "zh" in re.split(r"\W", page)}
    assert pages == {*TWINS, "docs/zh/options.md"}, "the most common options"


def test_what_differs_between_twins_is_found() -> None:
    def block(text: str, language: str = "python") -> Block:
        return Block("page.md", language, f"# one.py\n{text}")

    english = block('def one():\n    """One."""\n    return 1  # not two\n')
    assert is_translation(block('def one():\n    """一"""\n    return 1  # 不是二\n'), english)
    assert not is_translation(block('def one():\n    """一"""\n    return 2  # 不是二\n'), english)
    assert not is_translation(block("def one():\n    return 1\n", "text"), english)
    assert is_translation(block("make x  # 一\n", "sh"), block("make x  # one\n", "sh"))
    assert not is_translation(block("make y  # 一\n", "sh"), block("make x  # one\n", "sh"))
    assert is_translation(block("ps-0 变量\n", "text"), block("ps-0: variables\n", "text"))
    assert not is_translation(block("ps-1 变量\n", "text"), block("ps-0: variables\n", "text"))


# By page, what it has in code outside of blocks.
MENTIONED = {page: " ".join(f"<{code}>" for code in in_code(without_code(text))) for page, text in PAGES.items()}
FILES = ("py", "sh", "keras", "json", "yaml")
# Of Keras, Hydra's examples, pip, podman, SLURM and SageMaker.
FOREIGN = {"aggregation", "alpha", "auto_scale_loss", "custom_objects", "distribution", "name", "override", "reduction"}
ABOUT_OTHERS = {page for page in PAGES if "coming_from" in page or page == "docs/zh/tf1.md"}  # have their names, too
FOREIGN_MODULES = {"keras.distribution"}
FOREIGN_FLAGS = {"--build-arg", "--compile-bytecode", "--gpu-bind", "--gpus-per-task"}


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_is_named_exists(page: str) -> None:
    """Those with a plus are options of a user's own."""
    names = set(defaults()) | set(OPTIONS) | set(groups())
    dotted = {name.partition(".")[0] for name in names if "." in name}
    found = re.findall(rf"(?<![\w+./-])(?:{'|'.join(dotted)})\.[a-z]\w*(?![\w(/.])", MENTIONED[page])
    if page not in ABOUT_OTHERS:
        own = set(PARSERS) | {"step", "format"} | FOREIGN
        found += [name for name in re.findall(r"<([a-z_]+)=", MENTIONED[page]) if name not in own]
    known = names | FOREIGN_MODULES
    assert [name for name in found if name not in known and name.rpartition(".")[2] not in FILES] == []


def test_every_flag_that_is_named_exists() -> None:
    programs = "".join((REPOSITORY / f"tests/bench/{name}.py").read_text() for name in ("__main__", "staleness"))
    helps = f"{render.__doc__}{doctor.__doc__}{programs}"
    hydras = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    known = {*re.findall(r"--[a-z]+", helps), *hydras, *FOREIGN_FLAGS, "--help"}
    named = {flag for page in MENTIONED.keys() - ABOUT_OTHERS for flag in re.findall(r"<(--[a-z-]+)", MENTIONED[page])}
    assert named <= known
    assert named >= FOREIGN_FLAGS


def test_every_target_of_make_exists() -> None:
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    shell = [block.text for block in BLOCKS if block.language in ("sh", "console")]
    assert set(re.findall(r"(?:<|^)make ([a-z]+)", "\n".join([*MENTIONED.values(), *shell]), re.MULTILINE)) <= set(
        targets
    )


@pytest.mark.parametrize("name", sorted(set(re.findall(r"python -m (tf2dist\.\w+)", "\n".join(PAGES.values())))))
def test_every_command_exists(name: str) -> None:
    assert importlib.util.find_spec(name)


def defined(nodes: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The names of functions, classes and methods."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
            yield from defined(node.body, f"{prefix}{node.name}.")


WALKED = re.findall(r"^\d+\. \[.*?\]\(\.\./(tf2dist/[\w/]+\.py)\)\s+`([\w.]+)`:", PAGES["docs/inside.md"], re.MULTILINE)


@pytest.mark.parametrize(("path", "name"), WALKED)
def test_the_walks_name_what_is_there(path: str, name: str) -> None:
    assert name in defined(ast.parse((REPOSITORY / path).read_text()).body)


FAILURE_MODES = [f"F{number}" for number in range(1, 43)] + [f"S{number}" for number in range(1, 11)]


def failure_modes() -> dict[str, str]:
    """The last column of each row of FAILURE_MODES.md, by the row's name."""
    text = (REPOSITORY / "tests" / "FAILURE_MODES.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    assert all(len(row) == 4 and all(row) for row in rows), "four columns, none of them empty"
    tests = {row[0].strip("| "): row[3].rstrip("| ") for row in rows[1:]}
    assert len(tests) == len(rows) - 1, "every row once"
    return tests


def names_in(path: str) -> set[str]:
    """The names of the tests in a file, which is read and not imported."""
    tree = ast.parse((REPOSITORY / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_row_is_failure_modes() -> None:
    assert list(failure_modes()) == FAILURE_MODES


def test_every_failure_mode_names_a_test_or_says_why_not() -> None:
    for row, shown_by in failure_modes().items():
        assert "::" in shown_by or shown_by.startswith("not covered: "), row


def test_every_test_that_is_named_exists() -> None:
    text = " ".join([*failure_modes().values(), PAGES["docs/exactness.md"]])
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > len(FAILURE_MODES)
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert not missing


def texts_of_the_code() -> list[str]:
    """The texts in the code of the package, with a sign for what is filled in."""
    found = []
    for path in (REPOSITORY / "tf2dist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_that_are_explained_are_those_of_the_code() -> None:
    section = PAGES["docs/failures.md"].partition("## Messages on many hosts\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) >= 10
    texts = texts_of_the_code()
    for message in (message for row in rows for message in in_code(row)):
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


def test_the_table_of_errors_has_all_with_their_exit_codes() -> None:
    section = PAGES["docs/failures.md"].partition("## Errors of fit\n")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.MULTILINE))
    errors = {name: getattr(tf2dist, name) for name in tf2dist.__all__ if name.endswith(("Error", "TaskFailure"))}
    assert {name: str(kind.exit_code) for name, kind in errors.items() if name != "TfDistError"} == shown
