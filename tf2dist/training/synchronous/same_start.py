"""What synchronous workers must have in common before their first step: the data, the variables, the first weights.

From then on all of them apply the same updates. What differs at the start would stay different, and checkpoints would
hold only one worker's copy.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from tf2dist.checkpoint.state import Named, assign, values
from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.errors import ConfigError, DataError, RequestError
from tf2dist.process.parts import read_piece, row_pieces
from tf2dist.process.tf_internals import inner_optimizers, trained_variables
from tf2dist.training.synchronous.workers import Workers

DIGEST_BYTES = 6  # as many as a float64 holds exactly, since digests travel through a sum
OF_ALL = "random choices are the same everywhere if they come from random or numpy.random, which have the run's seed"


def synchronize_initial_state(
    config: RunConfig,
    splits: Splits,
    named: Named,
    by_row: Collection[str],
    optimizer: keras.Optimizer,
    workers: Workers,
) -> None:
    """Compares what all workers have made, and gives all of them the weights of worker 0; to be called by all.

    Args:
        by_row: the names of tables; see `names_by_row`.

    Raises:
        DataError: a worker has other data than worker 0.
        ConfigError: a worker has other variables, or another optimizer.
    """
    shapes = {name: [tuple(variable.shape) for variable in variables] for name, variables in named.items()}
    own = [_description_of(splits), str(sorted(shapes.items())).encode(), _description_of_optimizer(optimizer)]
    of_model = {name: variables for name, variables in named.items() if not name.startswith("optimizer/")}
    weights = hashlib.sha256()
    for name, (variable, *_) in of_model.items():
        for first, last in row_pieces(variable) if name in by_row else []:
            weights.update(read_piece(variable, first, last).data)
        if name not in by_row:
            weights.update(np.ascontiguousarray(variable.numpy()).tobytes())

    # Each worker fills its own row, so the sum holds the rows of all.
    digests = np.zeros([workers.count, len(own) + 1])
    digests[workers.index] = [*(_as_number(hashlib.sha256(text)) for text in own), _as_number(weights)]
    # Every worker sees all rows, so all of them raise the same error and none is left waiting.
    everywhere = workers.add_up(digests.reshape(-1)).reshape(digests.shape)
    differs = everywhere != everywhere[0]
    for number in range(len(own)):
        if differs[:, number].any():
            others = ", ".join(f"worker-{index}" for index in np.flatnonzero(differs[:, number]))
            raise _errors(config, others)[number]

    # Weights alone may differ, if a builder draws them where the seed does not reach: all workers take worker 0's. The
    # broadcast is left out if they are equal, since it costs time with a large model.
    if differs[:, -1].any():
        _, arrays = workers.broadcast_arrays(None, values(of_model, by_row) if workers.index == 0 else {})
        assign(of_model, arrays, by_row)


def _errors(config: RunConfig, others: str) -> list[RequestError]:
    """The error for each of the descriptions that all workers compare, if the workers `others` differ in it."""
    data, model, optimizer = config.data.name, config.model["name"], config.optimizer["name"]
    return [
        DataError(f"data ({data}): not the same examples on {others} as on worker-0; give all of them the same"),
        ConfigError(f"model ({model}): its builder makes other variables on {others} than on worker-0; {OF_ALL}"),
        ConfigError(f"optimizer ({optimizer}): not the same on {others} as on worker-0; {OF_ALL}"),
    ]


def _description_of(splits: Splits) -> bytes:
    evaluated = str(splits.validation_stream or sorted(splits.sizes().items()))
    return str([str(splits.stream or splits.train), evaluated, splits.num_classes]).encode()


def _description_of_optimizer(optimizer: keras.Optimizer) -> bytes:
    def kind(value: Any) -> Any:
        return float(value) if isinstance(value, np.floating) else type(value).__name__

    description: list[Any] = []
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        description += [optimizer.initial_scale, optimizer.dynamic_growth_steps]
    place = {id(variable): number for number, variable in enumerate(trained_variables(optimizer))}
    for inner in inner_optimizers(optimizer):
        config: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a user's own schedule may not be able to give its configuration
            config = inner.get_config()
        if not isinstance(config.get("learning_rate"), float | np.floating):
            # The configuration of a function names its file, which may lie elsewhere on another host.
            config["learning_rate"] = float(inner.learning_rate)
        description += [type(inner).__name__, config, [place[id(variable)] for variable in trained_variables(inner)]]
    return json.dumps(description, default=kind, sort_keys=True).encode()


def _as_number(sha256: "hashlib._Hash") -> float:
    return float(int.from_bytes(sha256.digest()[:DIGEST_BYTES], "big"))
