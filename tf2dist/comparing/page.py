"""report.html: one file that needs no network, readable on a phone, in the dark and in the light."""

import base64
import html
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tf2dist.comparing.results import ContenderResult, Measurement, Spread
from tf2dist.comparing.running import Outcome
from tf2dist.comparing.verdict import Claim, Verdict, count_text, rate_text, secs_text

STATES = {"seen": "seen", "not seen": "unseen", "unclear": "unclear"}  # classes of the style sheet
Row = tuple[ContenderResult, Outcome]
MEDIA = {
    "narrow dark": "(max-width: 640px) and (prefers-color-scheme: dark)",
    "narrow light": "(max-width: 640px)",
    "wide dark": "(prefers-color-scheme: dark)",
}


@dataclass(frozen=True)
class Picture:
    """One figure of the report.

    Attributes:
        svgs: see `look.as_svgs`.
        caption: what it shows, and how to read it.
    """

    title: str
    caption: str
    svgs: dict[str, bytes]


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        value: by which it is sorted: a number, a spread, a text, or None if it was not measured.
        shown: the text of a value that is not None.
    """

    title: str
    value: Callable[[Any], Any]
    shown: Callable[[Any], str] = str
    is_number: bool = True

    def text(self, row: Any) -> str:
        value = self.value(row)
        return "" if value is None else self.shown(value)


def page(
    record: dict[str, Any],
    verdict: Verdict,
    results: Sequence[ContenderResult],
    pictures: Sequence[Picture],
    notes: list[str],
) -> str:
    """The whole report.

    Args:
        record: see `report.record_of`.
        notes: how it was measured, a sentence each.
    """
    own = resources.files(__package__)
    command = shlex.join(["python", "-m", "tf2dist.compare", *record["arguments"]])
    parts = [
        f"<h1>{_text(_title(record))}</h1>",
        f'<p class="soft">{_text(_about(record))}</p>',
        f'<p class="lead">{_text(verdict.headline)}</p>',
        *_situations(verdict),
        *_claims(verdict.claims),
        "<h2>All contenders</h2>",
        _table(contender_columns(results), results),
        *(_figure(picture) for picture in pictures),
        "<details><summary><h2>All runs</h2></summary>",
        _table(run_columns(), [(result, outcome) for result in results for outcome in result.outcomes]),
        "</details>",
        *_list("What was not run", record["not_run"]),
        *_list("How it was measured", notes),
        f"<p>The command: <code>{_text(command)}</code></p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Without an icon of its own a browser would ask for one.
        f'<link rel="icon" href="data:,">\n<title>{_text(_title(record))}</title>\n'
        f"<style>\n{own.joinpath('report.css').read_text()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{own.joinpath('report.js').read_text()}</script>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return html.escape(text)


def _title(record: dict[str, Any]) -> str:
    modes = list(dict.fromkeys(one["mode"] for one in record["contenders"]))
    return f"{', '.join(modes)}: {'which one is first?' if len(modes) > 1 else 'measured'}"


def _about(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"] or {}
    workers, seeds = record["workers"], record["seeds"]
    written = record["written"][:16].replace("T", " ")
    return (
        f"{workers} worker{'s' if workers != 1 else ''} on one machine with {machine['processors']} processors, "
        f"{record['data']}, {record['optimizer']}, until {record['until']}, {seeds} seed{'s' if seeds != 1 else ''}. "
        f"tf2dist {record['tf2dist']}, TensorFlow {versions.get('tensorflow', 'unknown')}, {written}."
    )


def _situations(verdict: Verdict) -> list[str]:
    parts = []
    for name, sentences in verdict.situations:
        items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences) or "<li>Nothing was measured.</li>"
        parts.append(f'<div class="card"><h3>{_text(name[:1].upper() + name[1:])}</h3><ul>{items}</ul></div>')
    return parts


def _claims(claims: Sequence[Claim]) -> list[str]:
    if not claims:
        return []
    items = [
        f'<li><span class="state {STATES[one.state]}">{one.state}</span>: {_text(one.text)} '
        f'<span class="soft">{_text(one.figures)}</span></li>'
        for one in claims
    ]
    return [
        "<h2>What the textbooks say, and what was measured</h2>",
        f'<div class="card"><ul class="claims">{"".join(items)}</ul></div>',
    ]


def _figure(picture: Picture) -> str:
    uris = {name: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}" for name, svg in picture.svgs.items()}
    sources = "".join(f'<source media="{media}" srcset="{uris[name]}">' for name, media in MEDIA.items())
    return (
        f'<h2>{_text(picture.title)}</h2><figure class="card"><picture>{sources}'
        f'<img src="{uris["wide light"]}" alt="{_text(picture.title)}"></picture>'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """A table whose columns can be sorted; columns without any value are left out."""
    shown = [column for column in columns if any(column.text(row) for row in rows)]
    head = "".join(
        f'<th scope="col"{_class(column)}><button type="button">{_text(column.title)}</button></th>' for column in shown
    )
    body = "".join(f"<tr>{''.join(_cell(column, row) for column in shown)}</tr>" for row in rows)
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: Column, row: Any) -> str:
    value = column.value(row)
    key = value.mean if isinstance(value, Spread) else value
    return (
        f'<td{_class(column)} data-label="{_text(column.title)}" data-value="{_text("" if key is None else str(key))}">'
        f"{_text(column.text(row) or '-')}</td>"
    )


def _class(column: Column) -> str:
    return ' class="number"' if column.is_number else ""


def _list(title: str, sentences: Sequence[str]) -> list[str]:
    if not sentences:
        return []
    return [f"<h2>{_text(title)}</h2>", f"<ul>{''.join(f'<li>{_text(one)}</li>' for one in sentences)}</ul>"]


def contender_columns(results: Sequence[ContenderResult]) -> list[Column]:
    """Of a table with a row for each `ContenderResult`."""
    until = results[0].until
    target = f"{until.value:g}" if until.kind == "accuracy" else "the end"
    return [
        Column("mode", lambda one: one.contender.way, is_number=False),
        Column("situation", lambda one: one.contender.situation, is_number=False),
        Column(f"seconds to {target}", lambda one: one.secs, secs_text),
        Column(f"examples to {target}", lambda one: one.examples, count_text),
        Column("accuracy", lambda one: one.accuracy, lambda value: f"{value.mean:.4f}"),
        Column("steps/s", lambda one: one.step_rate, rate_text),
        Column("examples/s", lambda one: one.example_rate, rate_text),
        Column("staleness", lambda one: one.staleness, lambda value: f"{value.mean:.1f}"),
        Column("dropped", lambda one: one.dropped, lambda value: f"{100 * value.mean:.0f} %"),
        Column("seconds to the first step", lambda one: one.start, lambda value: f"{value.mean:.1f}"),
    ]


def run_columns() -> list[Column]:
    """Of a table with a row for each run."""

    def of(value: Callable[[Measurement], Any]) -> Callable[[Row], Any]:
        return lambda row: next((value(one) for one in row[0].measured if one.run == row[1].run), None)

    def to_target(row: Row) -> float | None:
        point = of(lambda one: one.reached(row[0].until))(row)
        return point.secs if point else None

    return [
        Column("mode", lambda row: row[0].contender.way, is_number=False),
        Column("situation", lambda row: row[0].contender.situation, is_number=False),
        Column("seed", lambda row: row[1].run.seed),
        Column("state", _state, is_number=False),
        Column("steps", of(lambda one: one.summary["global_step"]), lambda value: f"{value:,}"),
        Column("seconds to the target", to_target, lambda value: f"{value:.2f}"),
        Column("test accuracy", of(lambda one: one.summary.get("test_accuracy")), lambda value: f"{value:.4f}"),
        Column("steps of each worker", of(_shares), is_number=False),
    ]


def _state(row: Row) -> str:
    outcome = row[1]
    return f"failed ({outcome.exit_code})" if outcome.state == "failed" else outcome.state


def _shares(one: Measurement) -> str:
    names = ("local_steps", "aggregated")
    found = [next((each[name] for name in names if name in each), 0) for each in one.summary["workers"]]
    return " / ".join(f"{value:,}" for value in found)
