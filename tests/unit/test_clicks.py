"""Made-up clicks: they are what their page says, and need nothing of the size of a table."""

import tracemalloc

import numpy as np
import pytest

from tf2dist.data.loading import CONTEXT, FACTORS, ITEMS, USERS, area_under_curve, hidden_numbers, make_impressions

MOST_ROWS = 2**31 - 1


def test_the_seed_decides_everything() -> None:
    one, same, other_seed, other_sample = (
        make_impressions(1000, 500, 50, seed, sample) for seed, sample in ((3, 0), (3, 0), (4, 0), (3, 1))
    )
    for name, array in one[0].items():
        np.testing.assert_array_equal(array, same[0][name])
        for other in (other_seed, other_sample):
            assert np.any(array != other[0][name]), name
    np.testing.assert_array_equal(one[1], same[1])


def test_the_same_user_and_item_are_the_same_in_all_samples() -> None:
    """What is left of two logits without the context depends on the user and the item alone."""
    rests = {}
    for sample in (0, 1):
        x, _, probabilities = make_impressions(5000, 20, 20, sample=sample)
        logits = np.log(probabilities / (1 - probabilities))[:, 0] - x["context"] @ CONTEXT
        pairs = zip(x["user"].tolist(), x["item"].tolist(), strict=True)
        rests[sample] = dict(zip(pairs, logits, strict=True))
    shared = rests[0].keys() & rests[1].keys()
    assert len(shared) > 300
    np.testing.assert_allclose([rests[0][pair] for pair in shared], [rests[1][pair] for pair in shared], atol=1e-3)
    assert np.std(list(rests[0].values())) > 1, "and is a preference worth learning"


@pytest.mark.parametrize("size", [1, 3, 1000, 10_000_000, MOST_ROWS])
def test_ids_follow_zipfs_law(size: int) -> None:
    x, _, _ = make_impressions(100_000, size, 10)
    users = x["user"]
    assert users.dtype == np.int32
    assert 0 <= users.min() <= users.max() < size
    for user in range(min(size, 5)):
        expected = np.log((user + 2) / (user + 1)) / np.log(size + 1)
        assert np.mean(users == user) == pytest.approx(expected, abs=0.006), user


def test_the_hidden_numbers_are_uniform_and_differ() -> None:
    ids = np.arange(50_000)
    users, items = (hidden_numbers(ids, 0, kind) for kind in (USERS, ITEMS))
    numbers = np.concatenate([users, items], axis=1)
    assert numbers.shape == (50_000, 2 * FACTORS)
    np.testing.assert_allclose(numbers.mean(axis=0), 0, atol=0.02)
    np.testing.assert_allclose(np.cov(numbers.T), np.eye(2 * FACTORS), atol=0.02)
    np.testing.assert_allclose(np.quantile(numbers, [0.25, 0.5, 0.75]), 12**0.5 * np.array([-0.25, 0, 0.25]), atol=0.02)


def test_clicks_have_the_probabilities_that_are_told() -> None:
    _, y, probabilities = make_impressions(200_000, 1000, 100)
    order = np.argsort(probabilities[:, 0])
    for part in np.split(order, 10):
        assert y[part].mean() == pytest.approx(probabilities[part].mean(), abs=0.015)


def test_no_score_has_a_larger_area_than_the_true_probabilities() -> None:
    x, y, probabilities = make_impressions(100_000, 1000, 100)
    best = area_under_curve(y, probabilities)
    assert 0.8 < best < 0.95
    assert 0.5 < area_under_curve(y, x["context"] @ CONTEXT) < best - 0.1, "the context alone tells less"
    assert area_under_curve(y, x["context"][:, 3]) == pytest.approx(0.5, abs=0.01), "its last number tells nothing"


def test_the_area_counts_pairs_in_order() -> None:
    assert area_under_curve(np.array([1, 0, 1, 0, 0]), np.array([0.9, 0.8, 0.7, 0.2, 0.1])) == pytest.approx(5 / 6)
    assert np.isnan(area_under_curve(np.ones(3), np.ones(3)))


def test_the_memory_does_not_depend_on_the_rows() -> None:
    peaks = []
    for rows in (1000, MOST_ROWS):
        tracemalloc.start()
        make_impressions(20_000, rows, rows)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.01 * peaks[0] + 10_000
