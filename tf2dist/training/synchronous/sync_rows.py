"""Gradients of rows of large tables, which replicas exchange with the ids of the rows, and the same update everywhere.

Every worker has the whole tables. A sum of gradients of their size would carry zeros almost alone, so each replica
sends those of the rows that its batch has looked up, as Horovod does with slices of sparse gradients. All workers add
up those of the same row in the order of the replicas, so that all of them get the same bits.
"""

import keras
import tensorflow as tf

from tf2dist.model.shards import by_id, global_clipping
from tf2dist.model.step import Step
from tf2dist.model.tables import apply_rows, sum_by_row
from tf2dist.tf_internals.keras import counter_of, groups_of

NO_ROW = -1  # fills up ids


class RowExchange:
    """The exchange of the gradients of the rows of `step.tables`, and the updates by an optimizer.

    Args:
        optimizer: already built for `step.trainable`. It must not clip by the norm of all gradients any more, which
            no single call sees.
        narrow: the type in which the gradients travel; None for their own.
        lengths: for each table how many rows a batch looks up at most, if the tensors of all replicas and steps must
            have the same shape; or nothing.
    """

    def __init__(self, step: Step, optimizer: keras.Optimizer, narrow: tf.DType | None, lengths: list[int]) -> None:
        self._tables, self._narrow, self._lengths = step.tables, narrow, lengths
        self._optimizer, self._groups = optimizer, groups_of(optimizer, step.trainable)
        self._clip = global_clipping(optimizer, step.trainable)
        for inner, _ in self._groups:
            inner.global_clipnorm = None

    def pack(self, ids: list[tf.Tensor], gradients: list[tf.Tensor], share: tf.Tensor) -> list[tf.Tensor]:
        """On a replica: what it sends, the ids for each table, and then the gradients.

        Args:
            ids: of the rows of each table, int32 [n], each once.
            gradients: of these rows.
            share: of the replica's batch in the step; the rows of padding are left out.
        """
        own = [tf.cast(gradient, self._narrow or gradient.dtype) for gradient in gradients]
        ids = [tensor[: tf.where(share > 0, tf.size(tensor), 0)] for tensor in ids]
        own = [tensor[: tf.size(each)] for tensor, each in zip(own, ids, strict=True)]
        for number, length in enumerate(self._lengths):
            missing = length - tf.size(ids[number])
            ids[number] = tf.ensure_shape(tf.pad(ids[number], [[0, missing]], constant_values=NO_ROW), [length])
            own[number] = tf.ensure_shape(tf.pad(own[number], [[0, missing], [0, 0]]), [length, *own[number].shape[1:]])
        return [*ids, *own]

    def add_up(self, gathered: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """For each table the ids that replicas have sent, each once, and the sums of their gradients."""
        number = len(self._tables)
        pairs = []
        with tf.device("CPU:0"):  # where sums are made in order
            for table, ids, gradients in zip(self._tables, gathered[:number], gathered[number:], strict=True):
                if self._lengths:
                    are_rows = ids != NO_ROW
                    ids, gradients = tf.boolean_mask(ids, are_rows), tf.boolean_mask(gradients, are_rows)
                pairs.append(sum_by_row(ids, tf.cast(gradients, table.dtype)))
        return [ids for ids, _ in pairs], [sums for _, sums in pairs]

    def apply(self, variables: list[keras.Variable], gradients: list[tf.Tensor], ids: list[tf.Tensor]) -> None:
        """Applies an update.

        Args:
            variables: that are no tables.
            gradients: of these, and then of the rows of each table.
            ids: of these rows.
        """
        gradient_of = self._clip(by_id([*variables, *self._tables], gradients))
        ids_of = by_id(self._tables, ids)
        for optimizer, trained in self._groups:
            for table in trained:
                if id(table) in ids_of:
                    apply_rows(optimizer, gradient_of[id(table)], table, ids_of[id(table)], runs_alone=True)
            if others := [variable for variable in trained if id(variable) not in ids_of]:
                optimizer.apply([gradient_of[id(variable)] for variable in others], others)
            elif trained:
                counter_of(optimizer).assign_add(1)
        if all(optimizer is not self._optimizer for optimizer, _ in self._groups):  # a MultiOptimizer counts, too
            counter_of(self._optimizer).assign_add(1)
