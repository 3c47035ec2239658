"""The tables of docs/benchmarks.md, made from the results of `make bench`."""

import statistics
import textwrap
from pathlib import Path
from typing import Any

from tf2dist.launch.console import number_of

Result = dict[str, Any]
Runs = dict[tuple[Any, ...], str]  # the number of a run by its circumstances

# Above it the page explains; what is below is written here.
MARK = "<!-- Below: written by `make bench`. -->"
FACTS = ("date", "processor", "cores", "memory_gb", "python", "tensorflow", "keras", "rounds", "scale")
# By the heading: how the names of its rows begin, and what they compare.
TOPICS = {
    "TensorFlow 1 programs": (
        ("async ", "sync ", "sync_replicas ", "large async "),
        "The same training with sessions of TensorFlow 1. `our threads` and `oneDNN` are the same "
        "program with as many threads as tf2dist chooses, or with oneDNN. The plain port follows TensorFlow's guides.",
    ),
    "Time to an accuracy": (("to ",), "From the start of the command to this accuracy on the validation set."),
    "PyTorch DDP": (("torch ", "large sync "), "Synchronous training on CPUs, with DDP over gloo."),
    "Keras on JAX": (
        ("jax ",),
        "The same Keras model in synchronous training with two workers, by `keras.distribution.DataParallel` on JAX, "
        "over gloo on CPUs. Keras on JAX takes one step in each call, its default, and tf2dist up to 50, which counts "
        "most for the small models. The start is the time from the start of the processes to the end of the first "
        "step.",
    ),
    "One process": (
        ("one process ",),
        "Three asynchronous workers, which share the two cores with the parameter server, against one process.",
    ),
    "Compiled steps": (
        ("xla ",),
        "With `devices.xla=true` and without, beside `fit` of Keras in one process, which compiles its step on a GPU "
        "and not on CPUs.",
    ),
    "Embedding tables and Keras fit": (
        ("tables keras ",),
        "Two workers against `fit` of Keras in one process, with two tables of a million rows each.",
    ),
    "Embedding tables and TensorFlow 1 programs": (("tables old ",), "Two workers and one parameter server."),
    "Wide and deep": (
        ("wide and deep",),
        "13 numbers and 26 ids by Zipf's law, tables of 10,000 rows of 64 or 128 columns, layers of 1024, 512 and 256 "
        "units, batches of 512, Adagrad. Examples for each second of processor time, in all processes of a program.",
    ),
    "Workers of unequal speed": (
        ("straggler ",),
        "Four workers, of which one takes six times as long for each step, against four that are alike. "
        "`sync_replicas` takes the first three gradients of a step, and with `all` it waits for all four.",
    ),
    "All-reduce": (("large all-reduce ",), "The sums of synchronous workers, by tf2dist and by TensorFlow."),
    "Start": (("first step ", "one step "), "Whole commands, against a process that only imports TensorFlow."),
    "Bytes on the network": (
        ("links bytes ",),
        "What a step sends and receives, against the bytes of the parameters in both directions.",
    ),
    "Deep models": (("deep rate ", "deep first "), "Models whose graphs take long to trace."),
    "Calls of fit": (("fit ",), "Training by a call of `tf2dist.fit`, against the command."),
}
OTHERS = "Costs and sizes"


def page_of(results: list[Result], earlier: str = "") -> str:
    """The whole page; above the mark `earlier` stays as it is."""
    above = earlier.partition(MARK)[0] if MARK in earlier else "# Benchmarks\n\n"
    return f"{above}{MARK}\n\n{tables_of(results)}"


def tables_of(results: list[Result]) -> str:
    """A table for each topic, and one of when and where the rows were measured.

    Comparisons of which a contender has failed are left out.
    """
    compared = [result for result in results if result["ratio"] is not None]
    runs = sorted({circumstances_of(result) for result in compared}, key=str)
    numbers = {run: str(number) for number, run in enumerate(runs, 1)}
    parts = [summary_of(compared)]
    left = compared
    for title, (beginnings, text) in TOPICS.items():
        rows = [result for result in left if result["name"].startswith(beginnings)]
        left = [result for result in left if result not in rows]
        if rows:
            parts += [f"## {title}", filled(text), "\n".join(table_of(rows, numbers))]
    if left:
        parts += [f"## {OTHERS}", "\n".join(table_of_others(left, numbers))]
    parts += ["## Machines and runs", "\n".join(table_of_runs(runs))]
    return "\n\n".join(parts) + "\n"


def filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def summary_of(compared: list[Result]) -> str:
    """How many targets are met, and how far the rounds lie apart."""
    missed = [f"`{result['name']}`" for result in compared if result["met"] is False]
    judged = [result for result in compared if result["met"] is not None]
    text = f"{len(judged)} of {number_of(len(compared), 'row')} have a target"
    text += f"; **missed** by {', '.join(missed)}." if missed else ", and all are met."
    if spreads := spreads_of(compared):
        text += " The tables show the medians of the rounds. The highest round of a contender is"
        text += (
            f" {statistics.median(spreads):.2f} times its lowest in the median, and at most {max(spreads):.1f} times."
        )
    return filled(text)


def spreads_of(compared: list[Result]) -> list[float]:
    """By contender with several rounds, the highest figure divided by the lowest."""
    rounds = [figures for result in compared for figures in result["values"].values() if len(set(figures)) > 1]
    return [max(figures) / min(figures) for figures in rounds]


def table_of(rows: list[Result], runs: Runs) -> list[str]:
    """A row for each comparison, and a column for each contender."""
    contenders = list(dict.fromkeys(name for result in rows for name in (*result["ratio_of"], *result["medians"])))
    pairs = list(dict.fromkeys(" / ".join(result["ratio_of"]) for result in rows))
    load = ["load"] if any("load" in result for result in rows) else []
    ratio = pairs[0] if len(pairs) == 1 else "ratio"
    lines = header("`--only`", *contenders, "unit", ratio, "target", *load, "run")
    for result in rows:
        figures = [shown(result["medians"][name]) if name in result["medians"] else "" for name in contenders]
        ratio, target, run = verdict_of(result, runs)
        of = f" {' / '.join(result['ratio_of'])}" if len(pairs) > 1 else ""
        loads = [str(result.get(name, "")) for name in load]
        lines.append(line(f"`{result['name']}`", *figures, result["unit"], f"{ratio}{of}", target, *loads, run))
    return lines


def table_of_others(rows: list[Result], runs: Runs) -> list[str]:
    """A row for each comparison of which no other has the same two contenders."""
    lines = header("`--only`", "of", "", "against", "", "unit", "ratio", "target", "run")
    for result in rows:
        pairs = [cell for name in result["ratio_of"] for cell in (name, shown(result["medians"][name]))]
        lines.append(line(f"`{result['name']}`", *pairs, result["unit"], *verdict_of(result, runs)))
    return lines


def table_of_runs(runs: list[tuple[Any, ...]]) -> list[str]:
    lines = header("run", "date", "machine", "Python", "TensorFlow", "Keras", "rounds", "steps times")
    for number, (date, processor, cores, memory, *others) in enumerate(runs, 1):
        machine = f"{processor}, {number_of(cores, 'core')}, {memory} GB"
        lines.append(line(str(number), date, machine, *map(str, others)))
    return lines


def header(*cells: str) -> list[str]:
    return [line(*cells), "|" + "---|" * len(cells)]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def circumstances_of(result: Result) -> tuple[Any, ...]:
    return tuple(result[name] for name in FACTS)


def target_of(result: Result) -> str:
    """The target of a ratio; "" for none."""
    if result["target"] is None:
        return ""
    return f"{'at least' if result['at_least'] else 'at most'} {result['target']:.2f}"


def verdict_of(result: Result, runs: Runs) -> tuple[str, str, str]:
    """The ratio of a comparison, its target with a mark if it is missed, and the run."""
    ratio, run = f"{result['ratio']:.2f}", runs[circumstances_of(result)]
    if result["met"] is not False:
        return ratio, target_of(result), run
    looks_met = ratio == f"{result['target']:.2f}"
    return f"{result['ratio']:.3f}" if looks_met else ratio, f"{target_of(result)}, **missed**", run


def shown(value: float) -> str:
    """Four digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def update(results: list[Result], folder: Path) -> None:
    """Writes the page into a folder, or below the mark of the page that is there."""
    path = folder / "benchmarks.md"
    path.write_text(page_of(results, path.read_text() if path.exists() else ""))
