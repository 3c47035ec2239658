"""Evaluates the model of a run on a data set."""

import math
import sys

import keras
import numpy as np

from tf2dist.data.arrays import Arrays
from tf2dist.errors import DataError, NotFiniteError, reason_of
from tf2dist.launch.console import print_lines
from tf2dist.tools.finished.opening import data_of, model_of, split_of
from tf2dist.tools.finished.shell import Request

BATCH_SIZE = 256


def evaluate(request: Request) -> None:
    """Prints the loss and each metric in a line of its own, and then the number of examples.

    Raises:
        RequestError: the model or the data cannot be loaded, or the data does not fit the model.
        NotFiniteError: the loss is not finite.
    """
    split = request.options.get("split", "test")
    # The model first: that runs the plugins, which may register the data.
    model = model_of(request)
    name, splits = data_of(request)
    arrays = split_of(name, splits, split)
    results = _results(model, name, arrays)
    width = max(map(len, results))
    for key, value in results.items():
        print_lines(f"{key:{width}}  {np.array2string(np.asarray(value), precision=6)}", sys.stdout)
    print_lines(f"{len(arrays):,} examples of {name}, {split}", sys.stdout)
    # After the figures are printed: which metric is not finite may tell the reason.
    if not math.isfinite(results["loss"]):
        raise NotFiniteError(f"the loss is {results['loss']}; look for NaN in the weights and in the data")


def _results(model: keras.Model, name: str, arrays: Arrays) -> dict[str, float]:
    """The loss and the metrics by name, the loss first.

    Raises:
        DataError: the data does not fit the model.
    """
    try:
        metrics: dict[str, float] = model.evaluate(
            arrays.x, arrays.y, BATCH_SIZE, verbose=0, sample_weight=arrays.sample_weight, return_dict=True
        )
    except (ValueError, TypeError, KeyError) as error:  # what Keras raises for other shapes, types and structures
        reason = reason_of(error)
        raise DataError(
            f"data ({name}): does not fit the model ({reason}); choose another one with data=NAME"
        ) from None
    return {"loss": metrics.pop("loss"), **metrics}
