"""The figures of `make bench` that pages quote are those of docs/bench.json.

A page that quotes a figure has a row in `QUOTED`: the page, a piece of its text with {} for each figure, and for each
{} the row of bench.json and one of its contenders, or RATIO, PERCENT or MORE. A figure may be rounded as the page
likes. Without such a row a rate in the README is not accepted.
"""

# ruff: noqa: RUF001

import json
import re
from typing import NamedTuple

import pytest

from tests.conftest import PAGES, REPOSITORY

RATIO, PERCENT = "the ratio", "the ratio in percent"
MORE = (
    "how much more than that of the other contender, in whose figure something is added, as in `1 thousand rows + 50`"
)
Figure = tuple[str, str]  # the row of bench.json, and what of it


class Quoted(NamedTuple):
    page: str
    text: str
    figures: tuple[Figure, ...]


def in_table(page: str, text: str, row: str, contender: str) -> Quoted:
    """A row of a table, with the rate of tf2dist, that of a contender, and the ratio."""
    return Quoted(page, f"| {text} |", ((row, "tf2dist"), (row, contender), (row, RATIO)))


TABLES = (("tables keras async", "tf2dist"), ("tables keras async", "keras fit"))
UNEQUAL = (("straggler sync", PERCENT), ("straggler async", PERCENT), ("straggler sync_replicas", PERCENT))
DDP = (("torch dnn 2 workers", "tf2dist"), ("torch dnn 2 workers", "torch gloo"))
OLD = (("async softmax", "tf2dist"), ("async softmax", "old program"))
ALONE = (("one process dnn", "keras fit"), ("one process dnn", "tf2dist"))
LATE = (
    *(("straggler sync_replicas", "delayed"), ("straggler sync_replicas", "alike")),
    *(("straggler sync", "delayed"), ("straggler sync", "alike")),
)
MEMORY = (("tables memory", MORE),)
FIRST_STEP = (("first step async", "tf2dist"),)
ALL_TABLES = (*TABLES, ("tables keras sync", "tf2dist"))
ROWS = (("tables rows async", "10 million rows"), ("tables rows async", "1 thousand rows"))
FROM_TO = (LATE[1], LATE[0], LATE[3], LATE[2])
WIDE_AND_DEEP = tuple(
    ("wide and deep", name) for name in ("tf2dist", "tf2dist, sync", "tf2dist, 1 worker", "old program")
)
OLD_TEXT, OLD_TEXT_ZH = "{} steps/s | TensorFlow 1 program {} | {}", "{} 步/秒 | TensorFlow 1 程序 {} | {}"
DDP_TEXT, DDP_TEXT_ZH = "{} steps/s | PyTorch DDP with gloo {} | {}", "{} 步/秒 | PyTorch DDP（gloo）{} | {}"
LARGE_SYNC = "large sync 12 million 2 workers"
QUOTED = [
    Quoted("README.md", "two workers take {} steps/s, and Keras `fit` {}", TABLES),
    Quoted(
        "README.md",
        "`sync` keeps {} % of its rate, `async` {} %, and `sync_replicas`, which drops late gradients, {} %",
        UNEQUAL,
    ),
    Quoted("README.md", "with two workers: {} steps/s, and {} with PyTorch DDP", DDP),
    Quoted("README.md", "takes {} steps/s where the old program takes {}", OLD),
    Quoted("README.md", "Keras `fit` takes {} steps/s where three local workers take {}", ALONE),
    in_table("README.md", f"async, softmax, 3 workers | {OLD_TEXT}", "async softmax", "old program"),
    in_table("README.md", f"async, dnn, 3 workers | {OLD_TEXT}", "async dnn", "old program"),
    in_table(
        "README.md", f"async, 12 million parameters, 3 workers | {OLD_TEXT}", "large async 12 million", "old program"
    ),
    in_table("README.md", f"sync, dnn, 2 workers | {DDP_TEXT}", "torch dnn 2 workers", "torch gloo"),
    in_table("README.md", f"sync, 12 million parameters, 2 workers | {DDP_TEXT}", LARGE_SYNC, "torch gloo"),
    Quoted("README.zh.md", "两个工作节点每秒 {} 步，Keras `fit` 每秒 {} 步", TABLES),
    Quoted(
        "README.zh.md",
        "`sync` 的速度只剩 {} %，`async` 还有 {} %，舍去迟到梯度的 `sync_replicas` 还有 {} %",
        UNEQUAL,
    ),
    Quoted("README.zh.md", "两个工作节点同步训练：每秒 {} 步，PyTorch DDP（gloo）每秒 {} 步", DDP),
    Quoted("README.zh.md", "tf2dist 每秒 {} 步，原程序每秒 {} 步", OLD),
    Quoted("README.zh.md", "Keras `fit` 每秒 {} 步，三个本机工作节点每秒 {} 步", ALONE),
    in_table("README.zh.md", f"异步，softmax，3 个工作节点 | {OLD_TEXT_ZH}", "async softmax", "old program"),
    in_table("README.zh.md", f"异步，dnn，3 个工作节点 | {OLD_TEXT_ZH}", "async dnn", "old program"),
    in_table(
        "README.zh.md", f"异步，1,200 万参数，3 个工作节点 | {OLD_TEXT_ZH}", "large async 12 million", "old program"
    ),
    in_table("README.zh.md", f"同步，dnn，2 个工作节点 | {DDP_TEXT_ZH}", "torch dnn 2 workers", "torch gloo"),
    in_table("README.zh.md", f"同步，1,200 万参数，2 个工作节点 | {DDP_TEXT_ZH}", LARGE_SYNC, "torch gloo"),
    Quoted("docs/embeddings.md", "and need {} MB more memory", MEMORY),
    Quoted("docs/zh/embeddings.md", "内存只多 {} MB", MEMORY),
    Quoted("docs/zh/embeddings.md", "两个异步的工作节点每秒 {} 步，Keras `fit` 每秒 {} 步", TABLES),
    Quoted("docs/zh/embeddings.md", "两个同步的工作节点每秒 {} 步", ALL_TABLES[2:]),
    Quoted("docs/zh/embeddings.md", "工作节点每秒 {} 步，一千行时每秒 {} 步", ROWS),
    Quoted("docs/zh/fit.md", "在两个核上，{} 秒之后走第一步", FIRST_STEP),
    Quoted("docs/modes.md", "six times as slow, {} steps/s are left of {}, and {} of {} with `sync`", LATE),
    Quoted("docs/fit.md", "importing TensorFlow, since the tasks have to import it, too: {} s", FIRST_STEP),
    Quoted(
        "docs/embeddings.md",
        "workers take {} steps/s, and Keras `fit` {}**, on the same two cores ([benchmarks.md](benchmarks.md), "
        "`tables keras async`); two synchronous ones take {} steps/s",
        ALL_TABLES,
    ),
    Quoted("docs/embeddings.md", "the workers take {} steps/s, with a thousand rows {},", ROWS),
    Quoted(
        "docs/benchmarks.md",
        "tf2dist trains {} examples with two asynchronous workers, {} with two synchronous ones, and {} with one "
        "worker alone; a TensorFlow 1 program with two asynchronous workers trains {}.",
        WIDE_AND_DEEP,
    ),
    Quoted("docs/zh/modes.md", "六分之一时，从每秒 {} 步降到 {} 步，`sync` 则从 {} 步降到 {} 步", FROM_TO),
]
BENCH = {row["name"]: row for row in json.loads((REPOSITORY / "docs/bench.json").read_text())["comparisons"]}
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
RATE = re.compile(rf"{NUMBER} steps/s|每秒 {NUMBER} 步|{NUMBER} 步/秒")


def measured(figure: Figure) -> float:
    """The value of a figure in bench.json."""
    row, what = BENCH[figure[0]], figure[1]
    if what in (RATIO, PERCENT):
        return float(row["ratio"]) * (100 if what == PERCENT else 1)
    if what == MORE:
        first, second = (row["medians"][name] for name in row["ratio_of"])
        return float(first - second + float(row["ratio_of"][1].partition(" + ")[2]))
    return float(row["medians"][what])


def pattern_of(text: str) -> re.Pattern[str]:
    """Finds a piece of text, at whose spaces a line may end, with a number at each {}."""
    words = [re.escape(word).replace(r"\{\}", NUMBER) for word in text.split()]
    return re.compile(r"\s+".join(words))


def is_rounded(shown: str, value: float) -> bool:
    """Whether a number is the value, rounded to as many decimal places as are shown."""
    places = len(shown.partition(".")[2])
    half: float = 0.5 * 10**-places
    return abs(float(shown.replace(",", "")) - value) <= half * (1 + 1e-9)


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: f"{quoted.page}: {quoted.text[:40]}")
def test_a_page_quotes_what_was_measured(quoted: Quoted) -> None:
    found = pattern_of(quoted.text).search(PAGES[quoted.page])
    assert found, f"{quoted.page} no longer has this text: {quoted.text}"
    assert len(found.groups()) == len(quoted.figures)
    wrong = [
        f"{shown} is {measured(figure):.4g} in bench.json ({' of '.join(reversed(figure))})"
        for shown, figure in zip(found.groups(), quoted.figures, strict=True)
        if not is_rounded(shown, measured(figure))
    ]
    assert wrong == []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_every_rate_of_the_readme_is_bound_to_its_row(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    bound = [found.span() for quoted in QUOTED if (found := pattern_of(quoted.text).search(text))]
    rates = [rate for rate in RATE.finditer(text) if not any(a <= rate.start() < b for a, b in bound)]
    assert [rate[0] for rate in rates] == []


def test_a_figure_is_rounded_and_not_changed() -> None:
    assert all(is_rounded(shown, 1234.56) for shown in ("1,235", "1234.6", "1,234.56"))
    assert not any(is_rounded(shown, 1234.56) for shown in ("1,234", "1200", "1,234.5", "1,236"))
