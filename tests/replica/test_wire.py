"""What a worker and a ps exchange arrives as it was sent."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.model.packing import LARGE_BYTES
from tf2dist.training.parameter_server.counters import ONES
from tf2dist.training.parameter_server.wire import PackedCount, PullLayout, PushLayout, add_request, make_request

COUNTS = [0, 7, 2**24 + 1, 2**53 - 1]  # float32 counts up to 2^24, float64 to 2^53


def variables() -> list[keras.Variable]:
    return [
        keras.Variable(np.array([[0.1, -2.5, 3.0]], np.float32)),
        keras.Variable(np.array([2**24 + 1, -(2**53) - 1]), dtype="int64"),
        keras.Variable(np.array(2**24 + 1), dtype="int32"),
        keras.Variable(np.array([[0.1], [1 / 3]]), dtype="float64"),
        keras.Variable(np.arange(LARGE_BYTES // 4, dtype=np.float32).reshape(8, -1)),
        keras.Variable(np.array([0.5, 1.25]), dtype="bfloat16"),
        keras.Variable(np.arange(LARGE_BYTES // 8), dtype="int64"),
    ]


def assert_fits(specs: list[tf.TensorSpec], buckets: list[tf.Tensor]) -> None:
    assert all(spec.is_compatible_with(bucket) for spec, bucket in zip(specs, buckets, strict=True))
    assert [bucket.shape.rank for bucket in buckets] == [1, 2, 1], "the small ones in one vector, the large ones alone"


def assert_equal(found: list[tf.Tensor], expected: list[tf.Tensor]) -> None:
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("count", COUNTS)
def test_pulled_values_arrive_unchanged(count: int) -> None:
    layout = PullLayout(variables())
    values = [variable.value.read_value() for variable in variables()]
    buckets = layout.pack(values, PackedCount.of(tf.constant(count, tf.float64)))
    assert_fits(layout.specs, buckets)
    pulled = layout.unpack(buckets)
    assert_equal(pulled.values, values)
    assert int(pulled.applied.value()) == count


@pytest.mark.parametrize("count", COUNTS)
def test_pushed_gradients_arrive_with_the_count_of_the_pull(count: int) -> None:
    pull = PullLayout(variables())
    push = PushLayout(variables(), len(ONES) + 3, variables()[:1])
    values = [variable.value.read_value() for variable in variables()]
    pulled = pull.unpack(pull.pack(values, PackedCount.of(tf.constant(count, tf.float64))))
    buckets = push.pack(pulled.values, pulled.applied, tf.constant([0.25, 90.0, 100.0]), values[:1])
    assert_fits(push.specs, buckets)
    changes, sent_back, pulled_at, added, _ = push.unpack(buckets)
    assert_equal(changes, values)
    assert_equal(sent_back, values[:1])
    assert (pulled_at.dtype, int(pulled_at)) == (tf.int64, count)
    assert added.numpy().tolist() == [*ONES, 0.25, 90.0, 100.0]


@pytest.mark.parametrize("narrow", [None, tf.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_tables_follow_what_travels_as_a_whole(narrow: tf.DType | None) -> None:
    """They change neither the values before them nor each other, with an odd number of elements, too."""
    tables = [keras.Variable(np.zeros((9, 3), np.float32)), keras.Variable(np.zeros((5, 2), np.float32))]
    pull, push = PullLayout(variables(), tables, narrow=narrow), PushLayout(variables(), len(ONES), (), tables, narrow)
    values = [variable.value.read_value() for variable in variables()]
    ids, following = [[4, 0, 7], []], [[1], [2, 3]]
    request, next_request = (make_request([tf.constant(own, tf.int32) for own in one]) for one in (ids, following))
    rows = [tf.reshape(tf.range(9.0), [3, 3]), tf.zeros([0, 2])]

    pulled = pull.unpack(pull.pack(values, PackedCount.of(tf.constant(5.0, tf.float64)), rows), request)
    assert_equal(pulled.rows, rows)
    without_rows = pull.unpack(pull.pack(values, pulled.applied), pull.rows.no_rows())
    assert [int(tf.size(own)) for own in without_rows.rows] == [0, 0]

    buckets = push.pack(values, pulled.applied, tf.zeros([0]), (), rows, request)
    for sent in (buckets, add_request(buckets, next_request)):
        assert all(spec.is_compatible_with(bucket) for spec, bucket in zip(push.specs, sent, strict=True))
        _, _, pulled_at, _, pushed = push.unpack(sent)
        assert int(pulled_at) == 5
        assert [found.numpy().tolist() for found, _ in pushed] == ids
        assert_equal([gradient for _, gradient in pushed], rows)
    (asked,) = push.next_request(add_request(buckets, next_request))
    assert [own.numpy().tolist() for own in pull.rows.ids(asked)] == following
