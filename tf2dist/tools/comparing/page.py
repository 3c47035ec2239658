"""report.html: one file that needs no network, readable on a phone, in the dark and in the light."""

import base64
import html
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from tf2dist.launch.console import number_of, state_text
from tf2dist.tools.comparing.results import ACCURACY, MEASURES, Column, ContenderResult, Measurement, Spread
from tf2dist.tools.comparing.running import RunOutcome
from tf2dist.tools.comparing.verdict import Claim, Verdict

STATES = {"seen": "seen", "not seen": "unseen", "unclear": "unclear"}  # classes of the style sheet
RunRow = tuple[ContenderResult, RunOutcome]
Picture = tuple[str, str, dict[str, bytes]]  # the title, the caption, and what `figures.as_svgs` makes
MEDIA = {
    "narrow dark": "(max-width: 640px) and (prefers-color-scheme: dark)",
    "narrow light": "(max-width: 640px)",
    "wide dark": "(prefers-color-scheme: dark)",
}


def page(
    record: dict[str, Any],
    verdict: Verdict,
    results: Sequence[ContenderResult],
    pictures: Sequence[Picture],
    notes: list[str],
) -> str:
    """The whole report.

    Args:
        record: see `comparison_report.record_of`.
        notes: how it was measured, a sentence each.
    """
    assets = resources.files(__package__)
    command = shlex.join(["python", "-m", "tf2dist.compare", *record["arguments"]])
    parts = [
        f"<h1>{_text(_title(record))}</h1>",
        f'<p class="soft">{_text(_about(record))}</p>',
        f'<p class="lead">{_text(verdict.headline)}</p>',
        *_scenarios(verdict),
        *_claims(verdict.claims),
        "<h2>All contenders</h2>",
        _table(contender_columns(results), results),
        *(_figure(*picture) for picture in pictures),
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
        f"<style>\n{assets.joinpath('report.css').read_text()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{assets.joinpath('report.js').read_text()}</script>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return html.escape(text)


def _title(record: dict[str, Any]) -> str:
    modes = list(dict.fromkeys(contender["mode"] for contender in record["contenders"]))
    return f"{', '.join(modes)}: {'which one is first?' if len(modes) > 1 else 'measured'}"


def _about(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"] or {}
    written = record["written"][:16].replace("T", " ")
    return (
        f"{number_of(record['workers'], 'worker')} on one machine with {machine['processors']} processors, "
        f"{record['data']}, {record['optimizer']}, until {record['until']}, {number_of(record['seeds'], 'seed')}. "
        f"tf2dist {record['tf2dist']}, TensorFlow {versions.get('tensorflow', 'unknown')}, {written}."
    )


def _scenarios(verdict: Verdict) -> list[str]:
    parts = []
    for name, sentences in verdict.scenarios:
        items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences) or "<li>Nothing was measured.</li>"
        parts.append(f'<div class="card"><h3>{_text(name[:1].upper() + name[1:])}</h3><ul>{items}</ul></div>')
    return parts


def _claims(claims: Sequence[Claim]) -> list[str]:
    if not claims:
        return []
    items = [
        f'<li><span class="state {STATES[claim.state]}">{claim.state}</span>: {_text(claim.text)} '
        f'<span class="soft">{_text(claim.figures)}</span></li>'
        for claim in claims
    ]
    return [
        "<h2>What the textbooks say, and what was measured</h2>",
        f'<div class="card"><ul class="claims">{"".join(items)}</ul></div>',
    ]


def _figure(title: str, caption: str, svgs: dict[str, bytes]) -> str:
    uris = {name: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}" for name, svg in svgs.items()}
    sources = "".join(f'<source media="{media}" srcset="{uris[name]}">' for name, media in MEDIA.items())
    return (
        f'<h2>{_text(title)}</h2><figure class="card"><picture>{sources}'
        f'<img src="{uris["wide light"]}" alt="{_text(title)}"></picture>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """A table whose columns can be sorted; columns without any value are left out."""
    visible = [column for column in columns if any(column.text(row) for row in rows)]
    head = "".join(
        f'<th scope="col"{_class(column)}><button type="button">{_text(column.title)}</button></th>'
        for column in visible
    )
    body = "".join(f"<tr>{''.join(_cell(column, row) for column in visible)}</tr>" for row in rows)
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
    return [f"<h2>{_text(title)}</h2>", f"<ul>{''.join(f'<li>{_text(sentence)}</li>' for sentence in sentences)}</ul>"]


def contender_columns(results: Sequence[ContenderResult]) -> list[Column]:
    """Columns of a table with a row for each `ContenderResult`; the heads name the units."""
    metric = next((result.goal.metric for result in results if result.goal), "accuracy")
    accuracy = "best accuracy" if results[0].until.kind == "accuracy" else "accuracy at the end"
    return [
        Column("mode", lambda result: result.contender.mode_label, is_number=False),
        Column("scenario", lambda result: result.contender.scenario, is_number=False),
        Column(f"goal: {metric}", lambda result: result.goal and result.goal.value, lambda value: f"{value:.4g}"),
        *(replace(column, title=accuracy) if column is ACCURACY else column for column in MEASURES),
    ]


def run_columns() -> list[Column]:
    """Columns of a table with a row for each run."""

    def measured(value: Callable[[Measurement], Any]) -> Callable[[RunRow], Any]:
        return lambda row: next((value(run) for run in row[0].measured if run.run == row[1].run), None)

    def secs_to_goal(row: RunRow) -> float | None:
        point = measured(lambda run: run.reached(row[0].goal))(row)
        return point.secs if point else None

    return [
        Column("mode", lambda row: row[0].contender.mode_label, is_number=False),
        Column("scenario", lambda row: row[0].contender.scenario, is_number=False),
        Column("seed", lambda row: row[1].run.seed),
        Column("state", lambda row: state_text(row[1].state, row[1].exit_code), is_number=False),
        Column("steps", measured(lambda run: run.summary["global_step"]), lambda value: f"{value:,}"),
        Column("seconds to the goal", secs_to_goal, lambda value: f"{value:.2f}"),
        Column("test accuracy", measured(lambda run: run.summary.get("test_accuracy")), lambda value: f"{value:.4f}"),
        Column("steps of each worker", measured(_shares), is_number=False),
    ]


def _shares(measurement: Measurement) -> str:
    names = ("local_steps", "aggregated")
    steps = [next((worker[name] for name in names if name in worker), 0) for worker in measurement.summary["workers"]]
    return " / ".join(f"{value:,}" for value in steps)
