"""What the results say, in plain words with the figures: who is first, and which of the textbooks' claims are seen.

An order counts as seen only if the runs of both contenders do not overlap: all seeds of one before all of the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tf2dist.comparing.options import Until
from tf2dist.comparing.results import ContenderResult, Spread
from tf2dist.errors import NotFiniteError

CLEAR_RATIO = 1.02  # a smaller ratio is no difference
KEPT_RATE = 0.9  # a rate that is at least so much of another has been kept
UNEQUAL = "Unequal workers: choose a mode that does not wait for the slowest; it is first."
NOT_FINITE = NotFiniteError.exit_code
Measure = Callable[[ContenderResult], Spread | None]


@dataclass(frozen=True)
class Claim:
    """A claim, and what was measured of it.

    Attributes:
        state: seen, not seen, or unclear: the runs of different seeds overlap.
    """

    text: str
    state: str
    figures: str


@dataclass(frozen=True)
class Verdict:
    """The words of the report.

    Attributes:
        headline: one sentence.
        situations: for each situation its name and who is first in it.
    """

    headline: str
    situations: list[tuple[str, list[str]]]
    claims: list[Claim]


def verdict_of(results: list[ContenderResult], until: Until) -> Verdict:
    """Judges all results; works with any part of the runs done."""
    names = list(dict.fromkeys(result.contender.situation for result in results))
    situations = [(name, list(_situation([result for result in results if result.contender.situation == name], until)))
                  for name in names]  # fmt: skip
    return Verdict(_headline(results, until), situations, list(_claims(results, until)))


def secs_text(spread: Spread) -> str:
    return _text(spread, lambda value: f"{value:.2f}" if value < 9.995 else f"{value:,.1f}", " s")


def count_text(spread: Spread) -> str:
    return _text(spread, lambda value: f"{round(value):,}", "")


def _text(spread: Spread, form: Callable[[float], str], unit: str) -> str:
    """The mean, with the lowest and highest of several runs, as in 3.2 s (3.0 to 3.4)."""
    low, high = form(spread.low), form(spread.high)
    return form(spread.mean) + unit + (f" ({low} to {high})" if low != high else "")


def ranked(
    results: list[ContenderResult], measure: Measure, *, highest: bool = False
) -> list[tuple[ContenderResult, Spread]]:
    """Those that have a value, the best first."""
    measured = [(result, spread) for result in results if (spread := measure(result))]
    return sorted(measured, key=lambda pair: pair[1].mean, reverse=highest)


def is_clear(first: Spread, second: Spread) -> bool:
    """Whether all runs of one are clearly on the same side of all runs of the other; never of one run each."""
    are_several = len(first.values) > 1 and len(second.values) > 1
    return are_several and (first.high * CLEAR_RATIO < second.low or second.high * CLEAR_RATIO < first.low)


def is_alone(*spreads: Spread) -> bool:
    """Whether one of them comes from a single run, which proves no order."""
    return any(len(spread.values) < 2 for spread in spreads)


def _headline(results: list[ContenderResult], until: Until) -> str:
    """Who is first in the situation with the fastest machines, and in that with the slowest worker."""
    delays = sorted({result.contender.delay_secs for result in results})
    parts = []
    for delay_secs in dict.fromkeys((delays[0], delays[-1])) if delays else ():
        with_delay = [result for result in results if result.contender.delay_secs == delay_secs]
        names = list(dict.fromkeys(result.contender.situation for result in with_delay))
        if len(names) != 1:
            continue
        order = _order(with_delay, until)
        if not order:
            parts.append(f"With {names[0]}, no run has come to the target")
        elif len(with_delay) == 1:
            parts.append(f"With {names[0]}, only {order[0][0].contender.way} was measured")
        elif len(order) > 1 and is_alone(order[0][1], order[1][1]):
            parts.append(f"With {names[0]}, {order[0][0].contender.way} is first, in one run each")
        elif len(order) > 1 and not is_clear(order[0][1], order[1][1]):
            parts.append(
                f"With {names[0]}, {order[0][0].contender.way} and {order[1][0].contender.way} are about equal"
            )
        else:
            parts.append(f"With {names[0]}, {order[0][0].contender.way} is first")
    return ". ".join(parts) + "." if parts else "Who is first depends on the situation; see below."


def _order(results: list[ContenderResult], until: Until) -> list[tuple[ContenderResult, Spread]]:
    """The ranking that decides: by time to the accuracy or to the steps, or by the accuracy at the end."""
    if until.kind == "secs":
        return ranked(results, lambda result: result.accuracy, highest=True)
    return ranked(results, lambda result: result.secs)


def _situation(results: list[ContenderResult], until: Until) -> Iterator[str]:
    """The sentences about one situation."""
    for result in results:
        if failed := [outcome for outcome in result.outcomes if outcome.state == "failed"]:
            reason = "; the loss was not finite" if any(outcome.exit_code == NOT_FINITE for outcome in failed) else ""
            yield f"{result.contender.way}: {len(failed)} of {len(result.outcomes)} runs failed{reason}."
    if until.kind == "accuracy":
        goal = f"{until.value:g}"
        yield from _race(
            results, lambda result: result.secs, secs_text, f"In time, {{}} comes to {goal} first, after {{}}"
        )
        yield from _race(
            results, lambda result: result.examples, count_text, "Counted in examples, {} is first, with {}"
        )
        for result in results:
            if result.measured and result.num_reached < len(result.measured):
                best = f"; the best accuracy was {result.accuracy.high:.4f}" if result.accuracy else ""
                num_runs = (
                    "no run" if not result.num_reached else f"{result.num_reached} of {len(result.measured)} runs"
                )
                yield f"{result.contender.way}: {num_runs} came to {goal}{best}."
        return
    if until.kind == "steps":
        steps = f"{until.value:,g} steps"
        yield from _race(results, lambda result: result.secs, secs_text, f"{{}} is first at {steps}, after {{}}")
        yield "A step has another number of examples in each mode, so the accuracies are those of different trainings."
    order = ranked(results, lambda result: result.accuracy, highest=True)
    if order:
        listed = ", ".join(
            f"{result.contender.way} {_text(spread, lambda value: f'{value:.4f}', '')}" for result, spread in order
        )
        yield f"Accuracy at {until.value:,g} {'seconds' if until.kind == 'secs' else 'steps'}: {listed}."


def _race(
    results: list[ContenderResult], measure: Measure, text: Callable[[Spread], str], template: str
) -> Iterator[str]:
    """One sentence: the first with its value, and the others with theirs and the ratio."""
    order = ranked(results, measure)
    if not order:
        return
    (first, best), *others = order
    listed = "; ".join(
        f"{result.contender.way} needs {text(spread)}, {spread.mean / best.mean:.2f} times as much"
        for result, spread in others
    )
    doubt = ""
    if others and is_alone(best, others[0][1]):
        doubt = " With one run each the order is open."
    elif others and not is_clear(best, others[0][1]):
        pair = f"{first.contender.way} and {others[0][0].contender.way}"
        doubt = f" The runs of {pair} overlap or are nearly equal, so their order is open."
    yield f"{template.format(first.contender.way, text(best))}{'. ' if others else ''}{listed}.{doubt}"


def _claims(results: list[ContenderResult], until: Until) -> Iterator[Claim]:
    """The claims of the textbooks that these runs can test, on the plain modes."""
    plain = [result for result in results if result.measured]
    delays = sorted({result.contender.delay_secs for result in plain})
    even = [result for result in plain if result.contender.delay_secs == 0]
    if delays[-1:] > [0.0]:
        uneven = [result for result in plain if result.contender.delay_secs == delays[-1]]
        # An algorithm may make workers wait on purpose, of which the textbooks say nothing.
        for slow in (result for result in uneven if result.contender.config.algorithm.kind == "plain"):
            equal = _same_in(even, slow)
            if equal and slow.step_rate and equal.step_rate:
                yield _claim_about_a_straggler(slow, slow.step_rate, equal.step_rate)
        yield from _claim_about_the_first(uneven, until, wants_sync=False)
    yield from _claim_about_staleness(even)
    yield from _claim_about_the_first(even, until, wants_sync=True)


def _same_in(results: list[ContenderResult], result: ContenderResult) -> ContenderResult | None:
    """The same contender with equal workers."""
    contender = result.contender
    return next(
        (
            other
            for other in results
            if (other.contender.way, other.contender.varying) == (contender.way, contender.varying)
        ),
        None,
    )


def _claim_about_a_straggler(slow: ContenderResult, slow_rate: Spread, rate: Spread) -> Claim:
    contender = slow.contender
    share = slow_rate.mean / rate.mean
    figures = (
        f"{rate_text(slow_rate)} steps/s instead of {rate_text(rate)}, {share:.2f} of it; a step takes "
        f"{1000 / slow_rate.mean:,.1f} ms instead of {1000 / rate.mean:,.1f}."
    )
    settings = (
        f" ({', '.join(f'{key}={value}' for key, value in contender.varying.items())})" if contender.varying else ""
    )
    if contender.mode == "sync" or contender.backups == 0:
        # The slow worker alone takes at least the delay for a step.
        state = "seen" if 1 / slow_rate.mean >= contender.delay_secs else "not seen"
        return Claim(f"{contender.way}{settings}: every step is as slow as the slowest worker.", state, figures)
    if contender.mode == "sync_replicas":
        state = "seen" if share >= KEPT_RATE else "not seen"
        return Claim(f"{contender.way}{settings}: a slow worker is not waited for, and the rate stays.", state, figures)
    workers = contender.config.cluster.num_workers
    state = "seen" if share >= KEPT_RATE * (workers - 1) / workers else "not seen"
    return Claim(
        f"{contender.way}{settings}: a slow worker costs no more than its own share of the steps.", state, figures
    )


def rate_text(spread: Spread) -> str:
    """The mean of a rate, with three digits at least where it has them."""
    return f"{spread.mean:,.0f}" if spread.mean >= 99.5 else f"{spread.mean:.1f}"


def _claim_about_staleness(even: list[ContenderResult]) -> Iterator[Claim]:
    text = "The price of async is stale gradients: it needs more examples than sync for the same accuracy."
    for result in even:
        if result.contender.way != "async" or not result.staleness:
            continue
        sync = next((other for other in even if other.contender.way == "sync"
                     and other.contender.situation == result.contender.situation), None)  # fmt: skip
        if not (sync and sync.examples and result.examples):
            continue
        figures = (
            f"{count_text(result.examples)} examples with a staleness of {result.staleness.mean:.1f} on average, and "
            f"{count_text(sync.examples)} with sync."
        )
        is_more = result.examples.mean > sync.examples.mean
        state = ("seen" if is_more else "not seen") if is_clear(result.examples, sync.examples) else "unclear"
        if state == "not seen":
            figures += (
                f" A synchronous step makes one update of {sync.contender.batches} batches. So async makes "
                f"{sync.contender.batches} times as many updates of the same examples, which outweighs that here."
            )
        yield Claim(text, state, figures)


def _claim_about_the_first(results: list[ContenderResult], until: Until, *, wants_sync: bool) -> Iterator[Claim]:
    """The advice of the textbooks about which mode to choose, by the time to the target."""
    if len({result.contender.situation for result in results}) != 1:
        return
    order = _order(results, until)
    if not order:
        return
    first, best = order[0]
    is_sync = first.contender.mode == "sync"
    text = "Equal workers: choose sync, which is first." if wants_sync else UNEQUAL
    # Sync against the best of the others: their own order does not matter here.
    rivals = [spread for result, spread in order if (result.contender.mode == "sync") != is_sync]
    if not rivals:
        return
    state = ("seen" if is_sync == wants_sync else "not seen") if is_clear(best, rivals[0]) else "unclear"
    text_of = secs_text if until.kind != "secs" else (lambda spread: _text(spread, lambda value: f"{value:.4f}", ""))
    ranking = [f"{result.contender.way} {text_of(spread)}" for result, spread in order]
    yield Claim(text, state, f"{'Accuracy' if until.kind == 'secs' else 'Time'} at the target: {', '.join(ranking)}.")
