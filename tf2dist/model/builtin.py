"""The built-in models and optimizers by name. The classifiers take images as bytes and return logits."""

import inspect
from typing import Any

import keras
from keras.optimizers import LossScaleOptimizer

from tf2dist.config.checks import LAZY_ROWS
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, naming, reason_of
from tf2dist.model import model_checks
from tf2dist.model.optimizer_checks import check_optimizer
from tf2dist.registry import MODELS, OPTIMIZERS, call, look_up, register_model

OPTIMIZERS.update(
    sgd=keras.optimizers.SGD,
    momentum=keras.optimizers.SGD,  # conf/optimizer/momentum.yaml gives it a momentum
    adam=keras.optimizers.Adam,
    adamw=keras.optimizers.AdamW,
    adagrad=keras.optimizers.Adagrad,
    rmsprop=keras.optimizers.RMSprop,
)
WARMUP = 0.05  # as a share of the steps of a schedule


@register_model("softmax")
def softmax(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    logits = layers.Dense(num_classes, name="logits")
    return keras.Sequential([keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten(), logits])


@register_model("dnn")
def dnn(input_shape: tuple[int, ...], num_classes: int, hidden_units: list[int]) -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(units, "relu", name=f"hidden{i}") for i, units in enumerate(hidden_units, start=1)]
    logits = layers.Dense(num_classes, name="logits")
    return keras.Sequential([keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten(), *hidden, logits])


@register_model("cnn")
def cnn(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0, batch_norm: bool = False) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input(input_shape), layers.Rescaling(1 / 255)])
    for number, (filters, strides) in enumerate(((32, 1), (64, 2)), start=1):
        # The bias is redundant before a batch normalisation, which has one of its own.
        model.add(layers.Conv2D(filters, 3, strides, "same", use_bias=not batch_norm, name=f"conv{number}"))
        if batch_norm:
            model.add(layers.BatchNormalization(name=f"norm{number}"))
        model.add(layers.ReLU())
    model.add(layers.MaxPooling2D(2))
    model.add(layers.Flatten())
    model.add(layers.Dense(64, "relu", name="hidden1"))
    if dropout:
        model.add(layers.Dropout(dropout))
    model.add(layers.Dense(num_classes, name="logits"))
    return model


@register_model("tanh")
def tanh(input_shape: tuple[int, ...], num_classes: int | None, units: int = 10) -> keras.Model:
    layers = keras.layers
    # Compiled, since the loss of a model that is not is that of a classifier. Without an optimizer, so that the options
    # choose it. `num_classes` is None here.
    hidden = layers.Dense(units, "tanh", name="hidden1")
    model = keras.Sequential([keras.Input(input_shape), hidden, layers.Dense(1, name="output")])
    model.compile(None, "mse")
    return model


@register_model("two_tower")
def two_tower(
    input_shape: dict[str, tuple[int, ...]], num_classes: int | None, num_users: int, num_items: int, columns: int = 16
) -> keras.Model:
    layers = keras.layers
    x = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")}
    x["context"] = keras.Input(input_shape["context"], name="context")
    user = layers.Concatenate()([layers.Embedding(num_users, columns, name="users")(x["user"]), x["context"]])
    item = layers.Embedding(num_items, columns, name="items")(x["item"])
    towers = [layers.Dense(columns, name="user_tower")(user), layers.Dense(columns, name="item_tower")(item)]
    model = keras.Model(x, layers.Activation("sigmoid", name="click")(layers.Dot(1, name="match")(towers)))
    model.compile(None, keras.losses.BinaryCrossentropy(), metrics=[keras.metrics.AUC(name="auc")])
    return model


def build_model(arguments: dict[str, Any], splits: Splits) -> keras.Model:
    """Calls the registered function of the model that `arguments["name"]` names, with the other arguments."""
    name, function = arguments["name"], look_up(MODELS, "model", arguments["name"])
    options = {key: value for key, value in arguments.items() if key != "name"}
    fixed = {"input_shape": splits.input_shape, "num_classes": splits.num_classes}
    with naming(f"model ({name})"):
        model_checks.check_builder(name, function, fixed)
        # A user's model may fit any data, and a plugin may have replaced a model under one of these names.
        if function in (softmax, dnn, cnn):
            model_checks.check_images(splits)
        if function is two_tower:
            model_checks.check_impressions(splits)
    model: keras.Model = call("model", name, function, options, fixed)
    return model


def build_optimizer(arguments: dict[str, Any], total_steps: int) -> keras.Optimizer:
    """Builds the optimizer that `arguments["name"]` names, for a run of `total_steps` updates.

    A plugin's function that has a parameter `total_steps` gets them, unless the user gives another number.
    """
    function = look_up(OPTIMIZERS, "optimizer", arguments["name"])
    arguments = dict(arguments)  # it is called again for each ps
    name = arguments.pop("name")
    arguments.pop(LAZY_ROWS, None)  # says how the optimizer is used, see `row_choice`
    if arguments.pop("schedule", "constant") == "cosine":
        # Warm up from 0: the first steps of Adam are as large as the rate, and stale ones of several workers add up.
        warmup = int(WARMUP * total_steps)
        rate = float(arguments["learning_rate"])  # from an int Keras would compute a schedule of ints
        begin, peak = (0.0, rate) if warmup else (rate, None)
        arguments["learning_rate"] = keras.optimizers.schedules.CosineDecay(
            begin, total_steps - warmup, warmup_target=peak, warmup_steps=warmup
        )
    wants_steps = "total_steps" in inspect.signature(function).parameters and "total_steps" not in arguments
    fixed = {"total_steps": total_steps} if wants_steps else {}
    try:
        optimizer: keras.Optimizer = call("optimizer", name, function, arguments, fixed)
    except ValueError as error:
        if function.__module__.startswith("keras."):  # it refuses a value of the user's
            raise ConfigError(f"optimizer ({name}): {reason_of(error)}") from None
        raise  # an error of the user's code
    check_optimizer(name, optimizer)
    # As Keras does when it compiles a model.
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, LossScaleOptimizer):
        return LossScaleOptimizer(optimizer)
    return optimizer
