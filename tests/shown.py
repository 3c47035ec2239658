"""Compares what a page shows with what a command prints, by the rules in docs/development.md."""

import re
from typing import NamedTuple

MOMENT = r"\d{8}_\d{6}|\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"  # in the name of a directory
NUMBER = r"\d(?:[\d,.:]*\d)?"
TOKEN = re.compile(rf"(?P<anything>\.\.\.)|(?P<space>\s+)|(?P<moment>{MOMENT})|(?P<number>{NUMBER})")
# Numbers that differ from run to run, by the words before or after them.
FREE_AFTER = re.compile(r"(\b|_)(step|staleness|at most|pid|done in)[ =]$|\bepoch=$")
FREE_BEFORE = re.compile(r" ?(steps/s|examples/s|/s|left|secs|s)\b")
IF_SLOW = "drawing training.png"  # a line that comes only if that takes long
LOSS = re.compile(r"(\b|_)loss[=:]?\s*$")
LOSS_FACTOR = 3.0
ACCURACY = re.compile(r"(\b|_)accuracy( of|[=:])?\s*$")
MISTAKES_FACTOR = 2.0
SLACK = 0.05  # of other numbers with a decimal point: so much, or this share of the number


class Line(NamedTuple):
    """A line that is shown, and in a table the heads of its columns."""

    text: str
    heads: list[str]


def is_as_shown(shown: str, printed: str) -> bool:
    """Whether a whole output is as shown; blank lines do not count."""
    lines: list[Line] = []
    for text in shown.splitlines():
        if text.strip():
            lines.append(Line(text.strip(), _heads(text, [line.text for line in lines])))
    return _fits(lines, [line.strip() for line in printed.splitlines() if line.strip() not in ("", IF_SLOW)])


def _fits(shown: list[Line], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0].text == "...":
        return any(_fits(shown[1:], printed[begin:]) for begin in range(len(printed) + 1))
    return bool(printed) and _line_fits(shown[0], printed[0]) and _fits(shown[1:], printed[1:])


def _cells(text: str) -> list[str]:
    return re.split(r"\s{2,}", text.strip())


def _heads(text: str, above: list[str]) -> list[str]:
    """The cells of the nearest line above that has as many, and no digits."""
    count = len(_cells(text))
    heads = (_cells(line) for line in reversed(above) if not re.search(r"\d", line))
    return next((cells for cells in heads if len(cells) == count), []) if count > 2 else []


def _line_fits(shown: Line, printed: str) -> bool:
    pattern, ranges, end = "", [], 0
    for token in TOKEN.finditer(shown.text):
        pattern += re.escape(shown.text[end : token.start()])
        end = token.end()
        if token["anything"]:
            pattern += ".*"
        elif token["space"]:
            pattern += r"\s+"
        elif token["moment"]:
            pattern += f"(?:{MOMENT})"
        else:
            pattern += f"({NUMBER})"
            ranges.append(_range(token, shown.heads))
    found = re.fullmatch(pattern + re.escape(shown.text[end:]), printed)
    return found is not None and all(map(_is_in, found.groups(), ranges))


def _range(number: re.Match[str], heads: list[str]) -> tuple[float, float] | str | None:
    """What the number may be: from and to, exactly this text, or anything."""
    before, after = number.string[: number.start()], number.string[number.end() :]
    if heads:
        head = heads[len(_cells(before + "x")) - 1]
        before, after = f"{head} ", f" {head.rpartition(' ')[2]}"
    if FREE_AFTER.search(before) or FREE_BEFORE.match(after):
        return None
    text = number[0]
    if not re.fullmatch(r"[\d,]+\.\d+", text):
        return text
    value = float(text.replace(",", ""))
    if LOSS.search(before):
        return value / LOSS_FACTOR, value * LOSS_FACTOR
    if ACCURACY.search(before):
        return 1 - (1 - value) * MISTAKES_FACTOR, 1 - (1 - value) / MISTAKES_FACTOR
    slack = max(SLACK, SLACK * value)
    return value - slack, value + slack


def _is_in(text: str, allowed: tuple[float, float] | str | None) -> bool:
    if allowed is None or isinstance(allowed, str):
        return allowed in (None, text)
    low, high = allowed
    return bool(re.fullmatch(r"[\d,]+(\.\d+)?", text)) and low <= float(text.replace(",", "")) <= high
