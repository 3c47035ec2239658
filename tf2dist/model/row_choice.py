"""Which tables travel by rows: those whose optimizer leaves alone the rows that a batch does not look up."""

import keras

from tf2dist.config.checks import LAZY_ROWS
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.model.step import Step
from tf2dist.model.tables import can_be_lazy, is_exact_by_row
from tf2dist.tf_internals.keras import groups_of


def choose_tables(model_name: str, step: Step, optimizer: keras.Optimizer, config: RunConfig, why_not: str) -> str:
    """Sets `Step.tables`; returns a note on what differs from Keras, or costs time; empty for nothing.

    Args:
        optimizer: with the settings of the run.
        why_not: why the mode lets no table travel by rows; empty if it does.
    """
    lazily = config.optimizer.get(LAZY_ROWS, False)
    tables = step.lookups.find(step.trainable)
    if config.devices.xla:
        why_not = "devices.xla compiles a step for each number of rows"
    if why_not:
        return "; ".join(_whole(table, why_not) for table in tables)
    of_table = {id(v): inner for inner, trained in groups_of(optimizer, step.trainable) for v in trained}
    chosen, notes = [], []
    for table in tables:
        inner = of_table[id(table)]
        kind = type(inner).__name__
        if is_exact_by_row(inner):
            chosen.append(table)
        elif lazily and can_be_lazy(inner):
            chosen.append(table)
            notes.append(
                f"{table.path}: {kind} changes only the rows that a batch looks up, since optimizer.{LAZY_ROWS}=true; "
                "keras.Model.fit changes all rows in each step"
            )
        elif lazily:
            raise ConfigError(
                f"optimizer.{LAZY_ROWS}: {kind} of model ({model_name}) cannot update rows alone; leave it out"
            )
        else:
            way_out = f", or give optimizer.{LAZY_ROWS}=true to leave those alone" if can_be_lazy(inner) else ""
            notes.append(
                _whole(table, f"{kind} also changes rows that a batch does not look up; take Adagrad or SGD{way_out}")
            )
    step.lookups.choose(chosen)
    return "; ".join(notes)


def _whole(table: keras.Variable, reason: str) -> str:
    return f"{table.path}: its {table.shape[0]:,} rows travel in each step, since {reason}"
