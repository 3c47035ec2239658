"""The results in plain words with the figures: who is first, and which of the textbooks' claims are seen.

An order counts as seen only if the runs of both contenders do not overlap: all seeds of one before all of the other.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tf2dist.errors import NotFiniteError
from tf2dist.tools.comparing.matrix import Until
from tf2dist.tools.comparing.results import (
    ACCURACY,
    EXAMPLES,
    SECS,
    Column,
    ContenderResult,
    Spread,
    count_text,
    mean_rate_text,
    secs_text,
    spread_text,
)

CLEAR_RATIO = 1.02  # a smaller ratio is no difference
KEPT_RATE = 0.9  # a rate that is at least so much of another has been kept
UNEQUAL = "Unequal workers: choose a mode that does not wait for the slowest; it is first."
NOT_FINITE = NotFiniteError.exit_code


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
        headline: a sentence or two, each on a line of its own.
        scenarios: for each scenario its name and who is first in it.
    """

    headline: str
    scenarios: list[tuple[str, list[str]]]
    claims: list[Claim]


def verdict_of(results: list[ContenderResult], until: Until) -> Verdict:
    """Judges all results; works with any part of the runs done."""
    names = list(dict.fromkeys(result.contender.scenario for result in results))
    scenarios = [(name, list(_scenario([result for result in results if result.contender.scenario == name], until)))
                  for name in names]  # fmt: skip
    return Verdict(_headline(results, until), scenarios, list(_claims(results)))


def ranked(
    results: list[ContenderResult], measure: Column, *, highest: bool = False
) -> list[tuple[ContenderResult, Spread]]:
    """The results that have a value, the best first."""
    measured = [(result, spread) for result in results if (spread := measure.value(result))]
    return sorted(measured, key=lambda pair: pair[1].mean, reverse=highest)


def doubt_about(first: Spread, second: Spread) -> str:
    """The reason why two have no order, as the end of a sentence; "" if all runs of one are below the other's."""
    low, high = sorted((first, second), key=lambda spread: spread.mean)
    if len(low.values) < 2 or len(high.values) < 2:
        return "with one run each the order is open"
    if high.is_bound:
        return "that was so at a first evaluation already, so the order is open; give a smaller eval_every_examples"
    return "" if low.high * CLEAR_RATIO < high.low else "the runs overlap or are nearly equal, so the order is open"


def _headline(results: list[ContenderResult], until: Until) -> str:
    """Tells who is first in the scenario with the fastest machines, and in that with the slowest worker."""
    delays = sorted({result.contender.delay_secs for result in results})
    ends = [[result for result in results if result.contender.delay_secs == delay_secs]
            for delay_secs in dict.fromkeys((delays[0], delays[-1]))]  # fmt: skip
    if all(len({result.contender.scenario for result in end}) == 1 for end in ends):
        return "\n".join(_in_one_sentence(end, until) for end in ends)
    names = dict.fromkeys(result.contender.scenario for result in results)
    orders = [ranked([result for result in results if result.contender.scenario == name], SECS) for name in names]
    firsts = Counter(order[0][0].contender.mode_label for order in orders
                     if order and (len(order) == 1 or not doubt_about(order[0][1], order[1][1])))  # fmt: skip
    goal = f"an accuracy of {until.value:g}" if until.kind == "accuracy" else "the best accuracy that all runs reached"
    counts = [f"{label} is first in {number} of {len(names)} scenarios" for label, number in firsts.most_common()]
    num_open = len(names) - firsts.total()
    counts += [f"in {num_open} of {len(names)} the order is open"] if num_open else []
    return f"Time to {goal}: {'; '.join(counts)}."


def _in_one_sentence(results: list[ContenderResult], until: Until) -> str:
    """Tells who is first in one scenario, and to what."""
    goal, order = results[0].goal, ranked(results, SECS)
    begin = f"With {results[0].contender.scenario},"
    if goal is None:
        return f"{begin} no run was evaluated."
    if not order:
        accuracies = [result.accuracy.high for result in results if result.accuracy]
        best = f"; the best accuracy was {max(accuracies):.4f}" if accuracies else ""
        return f"{begin} no mode reached {goal} in every run{best}."
    reached = f"{goal}" if until.kind == "accuracy" else f"{goal} (the best that all runs reached)"
    (first, spread), *others = order
    label, secs = first.contender.mode_label, _secs(spread)
    if len(results) == 1:
        return f"{begin} only {label} was measured, and reached {reached} after {secs}."
    if not others:
        return f"{begin} only {label} reached {reached} in every run, after {secs}."
    second, other_secs = others[0][0].contender.mode_label, _secs(others[0][1])
    doubt = doubt_about(spread, others[0][1])
    if not doubt:
        return f"{begin} {label} is first: it reached {reached} after {secs}, and {second} after {other_secs}."
    return f"{begin} {label} reached {reached} after {secs} and {second} after {other_secs}; {doubt}."


def _secs(spread: Spread) -> str:
    return f"{secs_text(Spread((spread.mean,)))} s"


def _scenario(results: list[ContenderResult], until: Until) -> Iterator[str]:
    """The sentences about one scenario."""
    for result in results:
        if failed := [outcome for outcome in result.outcomes if outcome.state == "failed"]:
            reason = "; the loss was not finite" if any(outcome.exit_code == NOT_FINITE for outcome in failed) else ""
            yield f"{result.contender.mode_label}: {len(failed)} of {len(result.outcomes)} runs failed{reason}."
    goal = results[0].goal
    yield from _race(results, SECS, f"Seconds to {goal}")
    yield from _race(results, EXAMPLES, f"Training examples to {goal}")
    if until.kind == "accuracy":
        for result in results:
            if result.measured and result.num_reached < len(result.measured):
                best = f"; the best accuracy was {result.accuracy.high:.4f}" if result.accuracy else ""
                num_runs = (
                    "no run" if not result.num_reached else f"{result.num_reached} of {len(result.measured)} runs"
                )
                yield f"{result.contender.mode_label}: {num_runs} reached {goal}{best}."
        return
    order = ranked(results, ACCURACY, highest=True)
    if order:
        ends = "; ".join(
            f"{result.contender.mode_label} has an accuracy of "
            f"{spread_text(spread, lambda value: f'{value:.4f}')} after "
            f"{count_text(Spread(tuple(point.examples for point in result.ends())))} examples"
            for result, spread in order
        )
        yield f"At {until.value:,g} {'seconds' if until.kind == 'secs' else 'steps'}, {ends}."


def _race(results: list[ContenderResult], measure: Column, measured: str) -> Iterator[str]:
    """One sentence: the first with its value, the others with theirs and the ratio, and whether that is an order."""
    order = ranked(results, measure)
    if not order:
        return
    (first, best), *others = order
    listed = "; ".join(
        [
            f"{first.contender.mode_label} {measure.format(best)}",
            *(f"{result.contender.mode_label} {measure.format(spread)}, {spread.mean / best.mean:.2f} times as much"
              for result, spread in others),
        ]
    )  # fmt: skip
    end = f"; {doubt_about(best, others[0][1]) or f'so {first.contender.mode_label} is first'}" if others else ""
    yield f"{measured}: {listed}{end}."


def _claims(results: list[ContenderResult]) -> Iterator[Claim]:
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
        yield from _claim_about_the_first(uneven, wants_sync=False)
    yield from _claim_about_staleness(even)
    yield from _claim_about_the_first(even, wants_sync=True)


def _same_in(results: list[ContenderResult], result: ContenderResult) -> ContenderResult | None:
    """The same contender with equal workers."""
    contender = result.contender
    return next(
        (
            other
            for other in results
            if (other.contender.mode_label, other.contender.varying) == (contender.mode_label, contender.varying)
        ),
        None,
    )


def _claim_about_a_straggler(slow: ContenderResult, slow_rate: Spread, rate: Spread) -> Claim:
    contender = slow.contender
    share = slow_rate.mean / rate.mean
    figures = (
        f"{mean_rate_text(slow_rate)} steps/s instead of {mean_rate_text(rate)}, {share:.2f} of it; a step takes "
        f"{1000 / slow_rate.mean:,.1f} ms instead of {1000 / rate.mean:,.1f}."
    )
    settings = (
        f" ({', '.join(f'{key}={value}' for key, value in contender.varying.items())})" if contender.varying else ""
    )
    if contender.mode == "sync" or contender.backups == 0:
        # The slow worker alone takes at least its delay for a step, that of all workers included.
        state = "seen" if 1 / slow_rate.mean >= max(contender.config.simulate.delay_secs) else "not seen"
        return Claim(f"{contender.mode_label}{settings}: every step is as slow as the slowest worker.", state, figures)
    if contender.mode == "sync_replicas":
        state = "seen" if share >= KEPT_RATE else "not seen"
        return Claim(
            f"{contender.mode_label}{settings}: a slow worker is not waited for, and the rate stays.", state, figures
        )
    workers = contender.config.cluster.num_workers
    state = "seen" if share >= KEPT_RATE * (workers - 1) / workers else "not seen"
    return Claim(
        f"{contender.mode_label}{settings}: a slow worker costs no more than its own share of the steps.",
        state,
        figures,
    )


def _claim_about_staleness(even: list[ContenderResult]) -> Iterator[Claim]:
    text = "The price of async is stale gradients: it needs more examples than sync for the same accuracy."
    for result in even:
        if result.contender.mode_label != "async" or not result.staleness:
            continue
        sync = next((other for other in even if other.contender.mode_label == "sync"
                     and other.contender.scenario == result.contender.scenario), None)  # fmt: skip
        if not (sync and sync.examples and result.examples):
            continue
        figures = (
            f"{count_text(result.examples)} examples with a staleness of {result.staleness.mean:.1f} on average, and "
            f"{count_text(sync.examples)} with sync."
        )
        is_more = result.examples.mean > sync.examples.mean
        state = "unclear" if doubt_about(result.examples, sync.examples) else "seen" if is_more else "not seen"
        if state == "not seen":
            figures += (
                f" A synchronous step makes one update of {sync.contender.batches} batches. So async makes "
                f"{sync.contender.batches} times as many updates of the same examples, which outweighs that here."
            )
        yield Claim(text, state, figures)


def _claim_about_the_first(results: list[ContenderResult], *, wants_sync: bool) -> Iterator[Claim]:
    """The advice of the textbooks about which mode to choose, by the time to the goal."""
    if len({result.contender.scenario for result in results}) != 1:
        return
    order = ranked(results, SECS)
    if not order:
        return
    first, best = order[0]
    is_sync = first.contender.mode == "sync"
    text = "Equal workers: choose sync, which is first." if wants_sync else UNEQUAL
    # Sync against the best of the others: their own order does not matter here.
    rivals = [spread for result, spread in order if (result.contender.mode == "sync") != is_sync]
    if not rivals:
        return
    state = "unclear" if doubt_about(best, rivals[0]) else "seen" if is_sync == wants_sync else "not seen"
    ranking = [f"{result.contender.mode_label} {secs_text(spread)}" for result, spread in order]
    yield Claim(text, state, f"Seconds to {first.goal}: {', '.join(ranking)}.")
