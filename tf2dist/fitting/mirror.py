"""The model in the caller's process: what the cluster trains, as callbacks see it between two of its steps."""

import keras
import numpy as np

from tf2dist.checkpoint.state import counter_of, named_variables
from tf2dist.data.layout import Layout, Tree
from tf2dist.errors import FitError, InstallationError, TrainingError, first_line
from tf2dist.model.checks import check_inputs
from tf2dist.model.step import generators
from tf2dist.process.tf_internals import build_metrics, learning_rate_of
from tf2dist.training.hooks import NamedArrays


class Mirror:
    """Puts what the cluster has into a model, and finds what callbacks have changed in it.

    Args:
        model: compiled and built, the one that callbacks see.
        twin: made as the tasks make theirs, so that its variables have the names by which the cluster calls them;
            None if `model` itself is. It has the same layers in the same order.
    """

    def __init__(self, model: keras.Model, twin: keras.Model | None = None) -> None:
        self.model = model
        self._named = _named(model, twin or model)
        self._generators = generators(model)
        self._put: NamedArrays = {}
        self._counter = counter_of(self.optimizer)  # `iterations` is no variable of one that accumulates
        self._earlier_updates = int(self._counter.numpy())  # of an earlier training
        self._rate: float | None = None
        self._step = self._earlier_updates

    @property
    def optimizer(self) -> keras.Optimizer:
        return self.model.optimizer

    def put(self, arrays: NamedArrays, learning_rate: float, step: int) -> None:
        """Takes over the variables of the cluster at a step.

        Raises:
            TrainingError: it has variables that this model does not have.
        """
        for name, array in arrays.items():
            variable = self._named.get(name, self._generators.get(name))
            if variable is None:
                raise TrainingError(
                    f"model: the tasks have {name}, and the model in this process has not; the function that builds "
                    "it must give the same layers at each call"
                )
            variable.assign(array)
        self._step = self._earlier_updates + step
        self._counter.assign(self._step)
        if isinstance(learning_rate_of(self.optimizer), keras.Variable):
            self.optimizer.learning_rate = learning_rate
        self.settle()

    def settle(self) -> None:
        """Takes what the model holds now for what the cluster has."""
        self._put = self._values()
        self._rate = self._learning_rate()

    def changes(self) -> tuple[NamedArrays, float | None]:
        """The arrays that differ from what the cluster has, and the learning rate if that does.

        Raises:
            FitError: the number of updates differs, which the cluster alone counts.
        """
        if (found := int(self._counter.numpy())) != self._step:
            raise FitError(
                f"callbacks: optimizer.iterations was {self._step} and is {found} now, and the cluster counts the "
                "updates itself; leave that out"
            )
        now = self._values()
        changed = {name: now[name] for name in now if not np.array_equal(now[name], self._put[name], equal_nan=True)}
        rate = self._learning_rate()
        return changed, rate if rate != self._rate else None

    def _values(self) -> NamedArrays:
        return {name: _value(variable) for name, variable in self._named.items()}

    def _learning_rate(self) -> float | None:
        """None for a schedule, which no callback can change."""
        rate = learning_rate_of(self.optimizer)
        return float(keras.ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else None


def _named(model: keras.Model, twin: keras.Model) -> dict[str, keras.Variable]:
    """The variables of the model and of its optimizer by the names that those of its twin have in checkpoints."""
    for each in {id(model): model, id(twin): twin}.values():
        if not each.optimizer.built:
            each.optimizer.build(each.trainable_variables)
    names = {name: variables[0] for name, variables in named_variables(twin, twin.weights, [twin.optimizer]).items()}
    theirs = {id(variable): name for name, variable in names.items()}
    pairs = [*zip(twin.weights, model.weights, strict=True)]
    pairs += zip(twin.optimizer.variables, model.optimizer.variables, strict=True)
    return {theirs[id(one)]: other for one, other in pairs if id(one) in theirs}


def _value(variable: keras.Variable) -> np.ndarray:
    """As in a checkpoint: numpy's files do not know bfloat16, and float32 holds it exactly."""
    array = np.array(keras.ops.convert_to_numpy(variable))
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def build(model: keras.Model, name: str, layout: Layout) -> None:
    """Makes the variables of a model that has none yet, and those of its metrics, as `keras.Model.fit` does.

    Args:
        name: of the model, for messages.
        layout: of the data.

    Raises:
        FitError: the model, its losses and its metrics do not fit the data.
    """
    check_inputs(name, model, layout)
    if not model.built:
        x, _, _ = layout.symbolic()
        model(keras.tree.map_structure(lambda each: keras.Input(each.shape[1:], dtype=each.dtype), x))
    try:
        build_metrics(model, layout.symbolic())
    except InstallationError:
        raise
    except Exception as error:  # Keras raises errors of many types, and user code of any
        raise FitError(_misfit(model, name, layout, first_line(str(error)))) from error


def _misfit(model: keras.Model, name: str, layout: Layout, reason: str) -> str:
    """What is wrong with the data of a model whose metrics cannot be built, and the way out."""
    x, y, _ = layout.symbolic()
    try:
        outputs = model.compute_output_spec(x)
    except Exception:
        return f"model ({name}): cannot be called with x of the data, {layout} ({reason}); give what it takes"
    if y is None:
        return f"y: is None, and model ({name}) has losses or metrics that compare with it ({reason}); give y"
    if not _have_same_structure(y, outputs):
        return (
            f"y ({_shape_of(y)}): must be built like the outputs of the model, {_shape_of(outputs)}; give an array for "
            "each output, in the same dicts and lists"
        )
    return (
        f"model ({name}): its losses or metrics do not take {layout} ({reason}); compile it with others, or give other "
        "data"
    )


def _have_same_structure(one: Tree, other: Tree) -> bool:
    try:
        keras.tree.assert_same_structure(one, other)
    except ValueError:
        return False
    return True


def _shape_of(tree: Tree) -> str:
    """Such as {'a': *, 'b': [*, *]}."""
    return str(keras.tree.map_structure(lambda _: "*", tree)).replace("'*'", "*")
