"""Which examples a step takes: each is seen once in a pass, wherever a run begins and however it cuts the data."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf2dist.data import pipeline
from tf2dist.data.passes import ExampleOrder, InputPosition, NumberedSteps, Range, Sharding

SIZES = st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.booleans()


@st.composite
def positions(draw: st.DrawFn) -> InputPosition:
    """Anywhere in the first hundred examples, with up to three ranges before it that are still to be seen."""
    *limits, following = sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=7)))
    return InputPosition(following, tuple(zip(limits[::2], limits[1::2], strict=False)))


def to_see(begin: InputPosition, until: int) -> list[int]:
    return [*all_of(begin.unseen), *range(begin.next, until)]


def all_of(ranges: Iterable[Range]) -> list[int]:
    return [example for first, last in ranges for example in range(first, last)]


@settings(deadline=None, max_examples=60)
@given(*SIZES, positions())
def test_steps_see_each_example_once(n: int, batch_size: int, shards: int, whole: bool, begin: InputPosition) -> None:
    sharding = Sharding(n, batch_size, shards, 3, whole)
    steps = NumberedSteps(sharding, begin)
    until = (-(-begin.next // n) + 2) * n
    count = steps.steps_to(until)
    assert count == steps.to_pass_end + 2 * sharding.steps_per_pass
    ranges = [steps.examples(number, number + 1) for number in range(count)]
    assert all(len(one) == 1 for one in ranges)
    assert all_of(one for (one,) in ranges) == to_see(begin, until) == all_of(steps.examples(0, count))
    assert all(first // n == (last - 1) // n and last - first <= sharding.step_size for ((first, last),) in ranges)
    in_graph = np.stack(steps.ranges(tf.range(count, dtype=tf.int64)), 1)
    assert in_graph.tolist() == [list(one) for (one,) in ranges]


@settings(deadline=None, max_examples=60)
@given(*SIZES, positions(), st.data())
def test_another_run_sees_what_is_left(
    n: int, batch_size: int, shards: int, whole: bool, begin: InputPosition, data: st.DataObject
) -> None:
    steps = NumberedSteps(Sharding(n, batch_size, shards, 3, whole), begin)
    following = data.draw(st.integers(0, 20))
    left = data.draw(st.sets(st.integers(0, following - 1))) if following else set()
    position = steps.position(following, tuple((number, number + 1) for number in sorted(left)))
    seen = all_of(
        one for number in range(following) if number not in left for one in steps.examples(number, number + 1)
    )
    until = position.next + 3 * n
    assert sorted([*seen, *to_see(position, until)]) == to_see(begin, until)
    other = NumberedSteps(Sharding(n, 7, 2, 3, not whole), position)
    until = -(-position.next // n) * n
    assert all_of(other.examples(0, other.to_pass_end)) == to_see(position, until), "cut in another way"


@settings(deadline=None, max_examples=4)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), positions())
def test_replicas_share_each_step(n: int, batch_size: int, shards: int, begin: InputPosition) -> None:
    sharding = Sharding(n, batch_size, shards, 3, True)
    steps = NumberedSteps(sharding, begin)
    count = min(steps.to_pass_end + sharding.steps_per_pass, 20)
    datasets = [pipeline.batches(lambda rows: [rows], sharding, shard, begin) for shard in range(shards)]
    batches = [list(dataset.take(count).as_numpy_iterator()) for dataset in datasets]
    for number, parts in enumerate(zip(*batches, strict=True)):
        ((first, last),) = steps.examples(number, number + 1)
        seen = np.concatenate([rows[weights > 0] for rows, weights in parts])
        assert sorted(seen) == sorted(sharding.order.rows(first, last))
        np.testing.assert_allclose(sum(weights.sum() for _, weights in parts), 1, rtol=1e-5)
        counts = [int((weights > 0).sum()) for _, weights in parts]
        assert max(counts) - min(counts) <= 1
        for shard in range(shards):
            begin_of, number_of = sharding.share(tf.constant(first), tf.constant(last), tf.constant(shard))
            assert sharding.order.rows(int(begin_of), int(begin_of + number_of)).tolist() == (
                parts[shard][0][parts[shard][1] > 0].tolist()
            )


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    first = ExampleOrder(100, 0, True).rows(0, 100)
    assert sorted(first) == list(range(100))
    assert (first == ExampleOrder(100, 0, True).rows(0, 100)).all()
    assert (first != ExampleOrder(100, 0, True).rows(100, 200)).any()
    assert (first != ExampleOrder(100, 1, True).rows(0, 100)).any()
    assert ExampleOrder(100, 0, False).rows(130, 140).tolist() == list(range(30, 40))


def test_workers_together_see_the_batches_of_one_worker_with_a_larger_batch() -> None:
    (one,) = NumberedSteps(Sharding(100, 30, 1, 0, True), InputPosition()).examples(1, 2)
    (three,) = NumberedSteps(Sharding(100, 10, 3, 0, True), InputPosition()).examples(1, 2)
    (several,) = NumberedSteps(Sharding(100, 10, 3, 0, False), InputPosition()).examples(3, 6)
    assert one == three == several == (30, 60)
