"""Support of models: what each way of training refuses of a model and its optimizer, why, and the way out.

A way of training is a mode, an algorithm or an option. Each has a table of the features that it refuses; docs/modes.md
shows all of them in one table. `model_checks` finds those features that only show when a step is run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tf2dist.errors import ConfigError
from tf2dist.model import features
from tf2dist.model.features import Feature
from tf2dist.model.own_step import Group, OwnStep
from tf2dist.model.scopes import WAY_OUT
from tf2dist.model.step import Step


class Way(NamedTuple):
    """A way of training, with the features that it refuses.

    Attributes:
        option: that chooses it.
        refuses: by feature the reason and the way out, in which {it} is what has the feature, and {option} the option.
    """

    option: str
    refuses: dict[Feature, str]


def check_model(way: Way, model_name: str, model: keras.Model) -> None:
    """Refuses what a model shows before one of its steps is traced."""
    _check(way, model_name, {"model": model}, {})


def check_step(way: Way, model_name: str, step: Step, **facts: object) -> None:
    """Refuses what a model and the trace of its step show.

    Args:
        facts: further values in the texts.
    """
    own = {"train_step" if isinstance(step, OwnStep) else "losses": step}
    _check(way, model_name, {"step": step, "model": step.model} | own, facts)


def check_optimizer(way: Way, optimizer: keras.Optimizer, variables: Sequence[keras.Variable] = ()) -> None:
    """Refuses what an optimizer shows.

    Args:
        variables: that it trains, whole ones.
    """
    _check(way, type(optimizer).__name__, {"optimizer": Group(optimizer, [*variables])}, {})


def _check(way: Way, name: str, subjects: Mapping[str, Any], facts: Mapping[str, object]) -> None:
    for feature in way.refuses:
        if feature.of in subjects and (it := feature.find(subjects[feature.of])) is not None:
            raise refusal(way, feature, name, it, **facts)


def refusal(way: Way, feature: Feature, name: str, it: str = "", **facts: object) -> ConfigError:
    """The error that says which feature is refused, why, and what to do instead."""
    subject = "optimizer" if feature.of == "optimizer" else "model"
    return ConfigError(f"{subject} ({name}): {way.refuses[feature].format(it=it, option=way.option, **facts)}")


# The ways of training. A feature that several refuse has one text where the reason is the same.

SCALED = (
    "a LossScaleOptimizer leaves out the updates whose gradients overflow, of which with {option} nobody sees all; use "
    "mode=sync, or give its inner optimizer, with loss_scale_factor if need be, and auto_scale_loss=False to "
    "model.compile, or devices.precision=bfloat16, which needs no scaling"
)
WAITS = "{it} is synchronized, and with {option} no worker waits for the others while it computes; "
AT_THE_END = (
    "its train_step goes on with what it has updated, and with {option} all updates are applied at the end of a step; "
    "use mode=sync with algorithm=plain, or mode=async"
)
NO_MEAN_OF_TYPE = "{it}, and its changes on several workers have no mean; make it float32 or int32, or use mode=async"
TAKES_MEAN = (
    "{it}, and with {option} the workers take the mean of their changes; use mode=sync with algorithm=plain, or "
    "mode=async"
)

COMPILED = Way(
    "",
    {
        features.EAGER: (
            "has run_eagerly=True, but the tasks compile their steps; leave it out, and use tf.print to see values "
            "inside the model"
        ),
    },
)
BUILT = Way(
    "",
    {
        features.NOTHING_TRAINED: "has no trainable variables; make some of them trainable",
        features.OVERWRITTEN: (
            "{it} takes its gradient as its value, as in float8 training; use devices.precision=bfloat16"
        ),
    },
)
ALL = Way(
    "",
    {
        features.MADE_LATE: (
            "{it} is made in the first step and would not be trained; make it in __init__ or build of the model"
        ),
        features.NO_SUM: (
            "the metric variable {it} is no sum over the examples of one epoch, so several workers cannot add it up; "
            "leave the metric out, and compute it with the trained model"
        ),
        features.FOREIGN: (
            "its call changes {it}, which is no variable of the model, so every step would find it unchanged; make it "
            "a weight of a layer (add_weight), or for random functions a keras.random.SeedGenerator of a layer; a "
            "recurrent layer needs stateful=False"
        ),
        features.BYPASSED: (
            f"its call reads {{it}} as a variable of TensorFlow, as a function does that was traced before, and would "
            f"not train it; {WAY_OUT}"
        ),
        features.UNGRADED: f"{{it}} gets no gradient here, and gets one in keras.Model.fit; {WAY_OUT}",
        features.NO_REDUCTION: "has a loss that gives no single number; give it reduction='sum_over_batch_size'",
    },
)
ASYNC = Way(
    "mode=async",
    {
        features.LOSS_SCALE: SCALED,
        # Keras applies a constraint to the weights after an update. On a ps another worker's may come in between.
        features.CONSTRAINT: (
            "{it} has a constraint, which concurrent updates of several workers would break; use mode=sync"
        ),
        features.ASSIGNED: (
            "its call assigns {it}, which is trained: with {option} the updates that other workers made meanwhile "
            "would be lost; use mode=sync"
        ),
        # A worker pushes all updates of a step at its end, and has computed them from the values at its beginning.
        features.REPEATS: (
            "its train_step applies an optimizer, or trains a variable, more than once, and with {option} all updates "
            "of a step are computed from the values at its beginning; use mode=sync"
        ),
        # Each ps has accumulated by itself, and the norm is that over all ps.
        features.CLIPS_ACCUMULATED: (
            "with {option} global_clipnorm cannot clip what gradient_accumulation_steps has added up on the parameter "
            "servers; use clipnorm, or mode=sync"
        ),
    },
)
SYNC = Way("mode=sync", {features.UNSIGNED: NO_MEAN_OF_TYPE})
SYNC_IN_PHASES = Way(
    "mode=sync",
    {
        features.ASSIGNED_UPDATED: (
            "its train_step updates {it} by an optimizer and assigns it, too; use a constraint of the layer"
        ),
    },
)
# Replicas that share a step, where the gradient over a whole step must follow from the gradients of the replicas.
SEVERAL = Way(
    "",
    {
        # A mean is weighted by the replica's share of the step, a sum is not: their total is neither.
        features.SUM_BESIDE: (
            "a loss with reduction=sum beside others cannot be shared by synchronous workers; use sum_over_batch_size,"
            " or mode=async"
        ),
        features.PARTS_BESIDE: (
            "has several losses, of which one is divided by the parts of the outputs that a mask or weights leave, or "
            "by the length of a batch, and no synchronous worker alone knows how many these are; give sample_weight "
            "instead of a mask and batches of one length, or use mode=async"
        ),
        features.BATCH_SUM: (
            "its loss is a sum over the batch, of which several synchronous workers would take the mean; give the mean"
            " over the examples, or to compile a loss with reduction='sum', or use mode=async"
        ),
        features.GRADIENT_SUM: (
            "the gradients of its train_step are a sum over the batch, of which several synchronous workers would take"
            " the mean; take the mean over the examples, or use mode=async"
        ),
        features.STATE_SUM: (
            "every step adds to {it} a sum over its batch, of which several synchronous workers would take the mean; "
            "say which you mean, as in add_weight(aggregation='sum'), or use mode=async"
        ),
        features.STATE_NO_MEAN: (
            "every step gives {it} a value that is not shown to be a mean over its batch, and several synchronous "
            "workers would take the mean of theirs; {compute} tf2dist.gather(...) of what it takes from the batch, or "
            "say that the mean is meant, as in add_weight(aggregation='mean'), or use mode=async"
        ),
    },
)
SYNC_REPLICAS = Way(
    "mode=sync_replicas",
    {features.LOSS_SCALE: SCALED, features.IN_PHASES: AT_THE_END, features.UNSIGNED: NO_MEAN_OF_TYPE},
)
SEVERAL_REPLICAS = Way(
    "mode=sync_replicas",
    {
        features.PARTS: (
            "its loss is divided by the parts of the outputs that a mask or weights leave, which differ between the "
            "workers, and with {option} all gradients count alike; use mode=sync or mode=async"
        ),
        features.NOT_MEAN: TAKES_MEAN,
        features.SYNCHRONIZED: WAITS + "leave synchronized out, or use mode=sync",
    },
)
LOCAL_SGD = Way(
    "algorithm=local_sgd",
    {
        features.LOSS_SCALE: SCALED,
        features.IN_PHASES: AT_THE_END,
        features.SYNCHRONIZED: WAITS + "leave synchronized out, or use algorithm=plain",
        features.UNSIGNED_SLOT: (
            "{it}, of which several workers have no mean; make it float32 or int32, or use algorithm=plain"
        ),
    },
)
SEVERAL_LOCAL = Way("algorithm=local_sgd", {features.NOT_MEAN: TAKES_MEAN})
LOCAL_SGD_ON_STREAMS = Way(
    "algorithm=local_sgd",
    {
        # From its own batch a worker can estimate the sum over those of a step only if it knows the others' sizes.
        features.SUMMED: (
            "has a loss with reduction=sum, and with {option} no worker knows how large the batches of the others' "
            "streams are; use sum_over_batch_size, or algorithm=plain"
        ),
    },
)
OUTER_STEPS = Way(
    "algorithm=local_sgd",
    {
        features.FINAL_WEIGHTS: (
            "its final weights are averages over the steps of the workers, which leave out those of the outer "
            "optimizer; leave out algorithm.outer_momentum and algorithm.outer_learning_rate"
        ),
    },
)
SEVERAL_PS = Way(
    "",
    {features.OWN_APPLY: "{it} of its own, and would get only the variables of one ps there; use one ps, or mode=sync"},
)
SYNC_REPLICAS_ON_SEVERAL_PS = Way(
    "mode=sync_replicas",
    {
        features.GLOBAL_CLIPNORM: (
            "with {option} and several ps global_clipnorm cannot clip, since each ps has a part of the gradients; use "
            "clipnorm, or cluster.num_ps=1"
        ),
    },
)
PARTITIONED = Way(
    "cluster.placement=partitioned",
    {
        features.NOT_ELEMENTWISE: (
            "with {option} {it} may need the whole of it in an update; use cluster.placement=balanced"
        ),
        features.CLIPNORM: (
            "with {option} {it} is cut over several ps, and clipnorm needs the norm of its whole gradient; use "
            "cluster.placement=balanced"
        ),
        features.CONSTRAINT_OF_PARTS: (
            "with {option} {it} is cut over several ps, and its constraint needs the whole of it; use "
            "cluster.placement=balanced"
        ),
    },
)
XLA = Way(
    "devices.xla=true",
    {
        features.IN_PHASES: (
            "its train_step goes on with what it has updated, which {option} cannot compile; leave it out, or apply "
            "all updates at the end of train_step"
        ),
    },
)
# XLA cannot compile an all-reduce.
XLA_ON_SEVERAL = Way(
    "devices.xla=true",
    {
        features.SYNCHRONIZED: (
            "{it} is synchronized, which {option} cannot compile for several workers; leave one of the two out"
        ),
        features.GATHERS: (
            "calls tf2dist.gather, which {option} cannot compile for several workers; leave one of the two out"
        ),
    },
)
# A worker without an example computes one of padding, with weight 0. A synchronized layer would count it like others.
UNEVEN = Way(
    "mode=sync",
    {
        features.SYNCHRONIZED: (
            "{it} is synchronized, and the last step of a pass over the data has {last_batch} examples for "
            "{num_workers} workers; choose another train.batch_size_per_worker"
        ),
    },
)
INIT_FROM = Way(
    "init_from",
    {
        features.SCHEDULE_FREE: (
            "ScheduleFreeAdamW has a sequence that begins with the model's own first weights, which {option} replaces;"
            " use another optimizer"
        ),
    },
)
