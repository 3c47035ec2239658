"""Functions of TensorFlow that act otherwise in a `CallScope`, where variables have values that are tensors.

A tape records what is computed from variables, a `tf.function` keeps what its first call has found, and a custom
gradient gives gradients to its arguments and to variables. None of the three knows the values of a scope by itself.
In the scope of a strategy, `reset_default_graph` acts otherwise.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.linux import process_wide
from tf2dist.model.scopes import current_scope, inlines
from tf2dist.tf_internals.tensorflow import body_of, replace_custom_gradients


def prepare_process() -> None:
    """Makes tapes, functions and custom gradients of this process know the scopes that they are in."""
    with process_wide:
        _prepare_once()


@functools.cache
def _prepare_once() -> None:
    _prepare_tapes()
    _prepare_functions()
    _prepare_resets()
    replace_custom_gradients(_custom_gradient)


def _prepare_tapes() -> None:
    kind = tf.GradientTape
    enter, leave, reset = kind.__enter__, kind.__exit__, kind.reset

    def begin(tape: tf.GradientTape) -> tf.GradientTape:
        entered = enter(tape)
        try:
            if scope := current_scope():
                scope.begin(tape)
        except BaseException:
            leave(tape, None, None, None)  # or it would record all that follows
            raise
        return entered

    def end(tape: tf.GradientTape, *error: Any) -> None:
        if scope := current_scope():
            scope.end(tape)
        leave(tape, *error)

    def begin_again(tape: tf.GradientTape) -> None:
        reset(tape)
        if scope := current_scope():
            scope.end(tape)
            scope.begin(tape)

    def following(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def derive(tape: tf.GradientTape, target: Any, sources: Any, *more: Any, **options: Any) -> Any:
            if scope := current_scope():
                return scope.differentiated(lambda *both: method(tape, *both, *more, **options), tape, target, sources)
            return method(tape, target, sources, *more, **options)

        return derive

    kind.__enter__, kind.__exit__, kind.reset = begin, end, begin_again
    kind.gradient, kind.jacobian = following(kind.gradient), following(kind.jacobian)


def _prepare_functions() -> None:
    kind = type(tf.function(lambda: None, autograph=False))
    call = kind.__call__

    @functools.wraps(call)
    def inlined(function: Any, *args: Any, **options: Any) -> Any:
        # Of a saved model the function is of a subclass, and has no body in Python.
        if type(function) is not kind or not inlines():
            return call(function, *args, **options)
        # Its graph would keep the tensors of the scope in which it was traced, or the variables if that was elsewhere.
        signature = function.input_signature or ()
        given = [tf.nest.map_structure(_of_spec, spec, value) for spec, value in zip(signature, args, strict=False)]
        return _with_tensors(body_of(function)(*given, *_with_tensors(args[len(given) :]), **_with_tensors(options)))

    kind.__call__ = inlined


def _prepare_resets() -> None:
    reset = tf.compat.v1.reset_default_graph

    @functools.wraps(reset)
    def reset_outside_strategies() -> None:
        # The scope of a strategy stands on the default graph, which is empty in eager execution. A builder may call
        # `keras.utils.clear_session`, which resets it.
        if not tf.distribute.has_strategy():
            reset()

    tf.compat.v1.reset_default_graph = reset_outside_strategies


def _of_spec(spec: tf.TypeSpec, value: Any) -> Any:
    return tf.convert_to_tensor(value, spec.dtype) if isinstance(spec, tf.TensorSpec) else value


def _with_tensors(tree: Any) -> Any:
    """A tree in which arrays are tensors, as in the arguments and results of a `tf.function`."""
    return tf.nest.map_structure(
        lambda value: tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value, tree
    )


def _custom_gradient(
    original: Callable[..., Any], function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> Any:
    """The result of a function with a custom gradient, which in a scope has gradients for the values of variables, too.

    Args:
        original: TensorFlow's own, with the other three as arguments.
        function: of tensors; returns its result, and the function of the gradients.
    """
    scope = current_scope()
    if scope is None or options:
        return original(function, args, options)
    args = tf.nest.map_structure(tf.convert_to_tensor, list(args), expand_composites=True)
    scope.has_custom_gradients = True
    with scope.recording_reads() as read:
        result, gradients_of = function(*args)
    # TensorFlow gives them in the order of their names there.
    with scope.left():
        order = sorted(read, key=lambda key: str(read[key][0].value.name))
    values = [read[key][1] for key in order]
    parameters = inspect.signature(gradients_of).parameters
    if values and not ("variables" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())):
        names = ", ".join(variable.path for variable, _ in read.values())
        raise ConfigError(
            f"model: a function with a custom gradient reads {names}, and the function of its gradients takes no "
            "argument variables; see tf.custom_gradient"
        )
    results, given = tf.nest.flatten(result, expand_composites=True), tf.nest.flatten(args, expand_composites=True)

    def linked(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def backward(*upstream: tf.Tensor) -> list[Any]:
            packed = tf.nest.flatten(tf.nest.pack_sequence_as(result, upstream, expand_composites=True))
            with scope.inside():
                if not values:
                    return [*([None] * len(results)), *tf.nest.flatten(gradients_of(*packed))]
                of_args, of_values = gradients_of(*packed, variables=values)
            return [*([None] * len(results)), *tf.nest.flatten(of_args), *of_values]

        return [tf.identity(tensor) for tensor in tensors[: len(results)]], backward

    outputs = original(linked, [*results, *given, *values], {})
    return tf.nest.pack_sequence_as(result, outputs, expand_composites=True)
