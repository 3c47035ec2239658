"""Made-up data of the shape of Criteo's click logs, and the sizes of the wide-and-deep model that DeepRec publishes."""

import numpy as np

WIDE_AND_DEEP = "wide and deep"  # the model's name in a workload
BATCH_SIZE = 512
NUM_EXAMPLES = 100_000
NUMBERS = 13
ROWS = 10_000  # of each table: the ids are hashed into so many
# Of the tables of the deep part, one for each categorical column. Those of the wide part have one column.
COLUMNS = [128 if column in (3, 4, 10, 12, 16, 21, 24, 26) else 64 for column in range(1, 27)]
HIDDEN_UNITS = (1024, 512, 256)


def examples() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Numbers, float32 [n, 13], and ids by Zipf's law, int32 [n, 26]; and a quarter of clicks, float32 [n, 1]."""
    from tf2dist.data.loading import zipf_ids  # imports TensorFlow

    draws = np.random.default_rng(0)
    ids = np.stack([zipf_ids(draws, NUM_EXAMPLES, ROWS) for _ in COLUMNS], 1)
    numbers = draws.random((NUM_EXAMPLES, NUMBERS), np.float32)
    return {"numbers": numbers, "ids": ids}, (draws.random((NUM_EXAMPLES, 1)) < 0.25).astype(np.float32)
