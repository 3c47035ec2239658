"""Made-up clicks: items shown to users, with the true probability of each click, so the best possible AUC is known.

Ids follow Zipf's law: id k comes up about as often as 1 / (k + 1), user 0 and item 0 most often. Each user has a taste
and each item has traits, both FACTORS hidden numbers, and each impression has four visible numbers, its context. A user
clicks with the probability

    sigmoid(BIAS + TASTE * taste . traits / sqrt(FACTORS) + CONTEXT . context)

Hidden numbers are a hash of the id, so nothing here is as large as a table with a row for each id.
"""

import numpy as np

FACTORS = 2  # hidden numbers of a user and of an item
BIAS, TASTE = -1.0, 2.0
CONTEXT = np.array([0.8, -0.4, 0.2, 0.0], np.float32)
USERS, ITEMS = 0, 1  # tell the hashes of users and items apart


def make_impressions(
    num: int, num_users: int, num_items: int, seed: int = 0, sample: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Impressions and their clicks.

    Args:
        seed: of the hidden numbers and the draws.
        sample: other numbers give other impressions of the same users and items.

    Returns:
        x: "user" and "item", int32 [num], and "context", float32 [num, 4].
        y: 1 for a click or 0, float32 [num, 1].
        probabilities: of the clicks, float32 [num, 1].
    """
    draws = np.random.default_rng([seed, sample])
    x = {
        "user": zipf_ids(draws, num, num_users),
        "item": zipf_ids(draws, num, num_items),
        "context": draws.standard_normal((num, len(CONTEXT)), np.float32),
    }
    match = np.einsum("nf,nf->n", hidden_numbers(x["user"], seed, USERS), hidden_numbers(x["item"], seed, ITEMS))
    logits = BIAS + match * np.float32(TASTE / FACTORS**0.5) + x["context"] @ CONTEXT
    probabilities = 1 / (1 + np.exp(-logits[:, None]))
    return x, (draws.random(probabilities.shape, np.float32) < probabilities).astype(np.float32), probabilities


def zipf_ids(draws: np.random.Generator, num: int, size: int) -> np.ndarray:
    """Ids below `size`, int32 [num]: id k has the probability log((k + 2) / (k + 1)) / log(size + 1)."""
    # The inverse of the distribution function: no array has an element for each id. Rounding could give `size`.
    ids: np.ndarray = np.exp(draws.random(num) * np.log(size + 1)).astype(np.int32) - 1
    return ids.clip(0, size - 1)


def hidden_numbers(ids: np.ndarray, seed: int, kind: int) -> np.ndarray:
    """The numbers of users or items, float32 [n, FACTORS]: uniform, with mean 0 and variance 1."""
    (offset,) = np.random.SeedSequence([seed, kind]).generate_state(1, np.uint64)
    # The generator SplitMix64, whose n-th number is a hash of n.
    z = ids[:, None].astype(np.uint64) * np.uint64(FACTORS) + np.arange(1, FACTORS + 1, dtype=np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15) + offset
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    fractions: np.ndarray = (z >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return (fractions - np.float32(0.5)) * np.float32(12**0.5)


def area_under_curve(y: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs of a click and no click in which the click has the higher score; NaN without a pair."""
    clicked = y.ravel()[np.argsort(scores.ravel())] > 0
    num_pairs = np.count_nonzero(clicked) * np.count_nonzero(~clicked)
    return int(np.cumsum(~clicked)[clicked].sum()) / num_pairs if num_pairs else float("nan")
