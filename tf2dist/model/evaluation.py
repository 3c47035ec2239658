"""Exact evaluation: sums over disjoint ranges, added up and checked against the number of examples."""

import math
from dataclasses import dataclass

import numpy as np

from tf2dist.data.splits import Splits
from tf2dist.errors import DataError, NotFiniteError, TrainingError
from tf2dist.messages import NO_METRICS
from tf2dist.model.batch_dependence import mixes_examples
from tf2dist.model.metrics import Metrics, Results, scalars_of
from tf2dist.model.source import EpochPlan
from tf2dist.model.step import Step
from tf2dist.tf_internals.keras import inputs_of

MAX_CHUNK = 1000  # examples for each forward pass
MAX_CHUNK_BYTES = 4 << 20  # of their arrays as float32; the activations of a model take some ten times as much


@dataclass(frozen=True)
class Evaluation:
    """The result over a split.

    Attributes:
        metrics: by name, usually "loss" among them.
    """

    metrics: Results
    num_examples: int

    @classmethod
    def of_sums(cls, metrics: Metrics, sums: np.ndarray, num_examples: int | None) -> "Evaluation":
        """Turns the sums over a split, see `Step.evaluate`, into results.

        Args:
            num_examples: of the split; None for a stream, of which nobody knows it.
        """
        # A chunk that was lost, or computed twice by workers that came back, must not pass for a result.
        counted, *totals = sums
        if num_examples is None and not counted:
            raise DataError("validation_data: gives no batch to any worker; give one at least")
        if num_examples not in (None, counted):
            raise TrainingError(f"evaluation counted {counted:.0f} of {num_examples} examples")
        results = metrics.results(np.array(totals))
        # Of a model with a test_step of its own there may be none.
        if not math.isfinite(results.get("loss", 0.0)):
            raise NotFiniteError(f"the loss is {results['loss']} in the evaluation; try a lower learning rate")
        return cls(results, int(counted))

    @property
    def headline(self) -> str:
        """The metric that stands for the whole, as in "accuracy=0.9125": the accuracy, else the loss, else the first.

        A step of a model's own may return no metric, or none that is a single number.
        """
        numbers = scalars_of(self.metrics)
        name = next((each for each in ("accuracy", "loss", *numbers) if each in numbers), None)
        return f"{name}={numbers[name]:.4f}" if name else NO_METRICS


def chunk_size(
    batch_size: int, step: Step, splits: Splits, plan: EpochPlan | None = None, replica_size: int | None = None
) -> int:
    """Examples for each forward pass: as many as in a training step, which fit into memory, or more if they are small.

    If the result depends on this number, it is the one that Keras would take.

    Args:
        batch_size: of a worker.
        replica_size: the part of such a batch that a GPU takes; None if that is all of it.
    """
    if plan and (plan.validation_batch_size or plan.validation_steps or step.depends_on_batches):
        return plan.validation_batch_size or batch_size
    # A model whose input has a fixed batch size may compute with that number, as in reshape(x, (8, -1)).
    if fixed := next((tensor.shape[0] for tensor in inputs_of(step.model) if tensor.shape[0]), None):
        return int(fixed)
    if plan and splits.validation and len(splits.validation) > batch_size and mixes_examples(step, splits):
        return batch_size
    fitting = replica_size or batch_size
    shapes = [spec.shape.as_list() for spec in step.layout.specs]
    if any(None in shape for shape in shapes):
        return fitting
    numbers = sum(map(math.prod, shapes))
    small: int = MAX_CHUNK_BYTES // max(1, 4 * numbers)
    return min(MAX_CHUNK, max(fitting, small))


def chunks(num_examples: int, size: int, shard: int = 0, num_shards: int = 1) -> list[tuple[int, int]]:
    """The ranges (first, last) that one of `num_shards` workers evaluates; together they cover all."""
    ranges = [(first, min(first + size, num_examples)) for first in range(0, num_examples, size)]
    return ranges[shard::num_shards]


def evaluated_sizes(sizes: dict[str, int], at_once: int, plan: EpochPlan | None) -> dict[str, int]:
    """How many examples of each split are evaluated: all, unless the plan has fewer steps for a validation."""
    if "validation" in sizes and plan and plan.validation_steps:
        return sizes | {"validation": min(sizes["validation"], plan.validation_steps * at_once)}
    return sizes
