"""What each way of training refuses of a model stands in one table, which the documentation shows."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import PAGES, REPOSITORY
from tf2dist.model import features, support
from tf2dist.model.features import Feature

WAYS = {name: value for name, value in vars(support).items() if isinstance(value, support.Way)}
# The columns of the table in docs/modes.md: the modes, and mode=sync with algorithm=local_sgd.
COLUMNS = ("async", "sync", "sync_replicas", "local_sgd")
NOWHERE = dict.fromkeys(COLUMNS, "no")
# By the name of a way of training, and by column, where what it refuses works all the same; "no" for nowhere.
WORKS = {
    "COMPILED": NOWHERE,
    "BUILT": NOWHERE,
    "ALL": NOWHERE,
    "ASYNC": {"async": "no"},
    "SYNC": {"sync": "no", "local_sgd": "no"},
    "SYNC_IN_PHASES": {"sync": "no"},
    "SEVERAL": {"sync": "one worker", "sync_replicas": "no", "local_sgd": "one worker"},
    "SYNC_REPLICAS": {"sync_replicas": "no"},
    "SEVERAL_REPLICAS": {"sync_replicas": "no"},
    "LOCAL_SGD": {"local_sgd": "no"},
    "SEVERAL_LOCAL": {"local_sgd": "one worker"},
    "LOCAL_SGD_ON_STREAMS": {"local_sgd": "arrays"},
    "OUTER_STEPS": {"local_sgd": "no outer steps"},
    "SEVERAL_PS": {"async": "one ps", "sync_replicas": "one ps"},
    "SYNC_REPLICAS_ON_SEVERAL_PS": {"sync_replicas": "one ps"},
    "PARTITIONED": {"async": "not cut", "sync_replicas": "not cut"},
    "XLA": {"sync": "no XLA"},
    "XLA_ON_SEVERAL": {"sync": "one worker or no XLA", "local_sgd": "one worker or no XLA"},
    "UNEVEN": {"sync": "full last step"},
    "INIT_FROM": dict.fromkeys(COLUMNS, "no `init_from`"),
}
# The features as docs/modes.md has them.
SHOWN = {
    features.EAGER: "`run_eagerly`",
    features.NOTHING_TRAINED: "a model without trainable variables",
    features.OVERWRITTEN: "training in float8",
    features.CONSTRAINT: "constraints",
    features.CONSTRAINT_OF_PARTS: "constraints of variables that are cut",
    features.SYNCHRONIZED: "synchronized layers",
    features.MADE_LATE: "variables that are made in the first step",
    features.NO_SUM: (
        "metrics whose state cannot be added up over workers, such as a largest value, or is kept by `reset_state`"
    ),
    features.FOREIGN: (
        "a call that assigns something that is not a variable of the model, such as Keras' global random generator"
    ),
    features.BYPASSED: (
        "variables of the model that its call reads past Keras, as a `ConcreteFunction` does (pass them as arguments)"
    ),
    features.UNGRADED: "variables that a function with a custom gradient trains in Keras alone",
    features.NO_REDUCTION: "a loss without a reduction",
    features.SUM_BESIDE: 'a loss with `reduction="sum"` beside others',
    features.PARTS_BESIDE: "a mask, `ignore_class` or batches of several lengths beside another loss",
    features.PARTS: "a masked output, `ignore_class`",
    features.SUMMED: 'a loss with `reduction="sum"`',
    features.ASSIGNED: "layers that assign trained variables, such as SpectralNormalization",
    features.IN_PHASES: "a `train_step` that goes on with what it has updated",
    features.REPEATS: "such a `train_step` that applies an optimizer, or trains a variable, more than once",
    features.ASSIGNED_UPDATED: "such a `train_step` that also assigns what it has updated",
    features.UNSIGNED: "untrained weights of type bool or unsigned integers",
    features.NOT_MEAN: 'weights with an aggregation other than `"mean"`',
    features.GATHERS: "`tf2dist.gather`",
    features.BATCH_SUM: 'a loss, compiled or added, that is a sum over the batch without `reduction="sum"`',
    features.GRADIENT_SUM: "a `train_step` whose gradients are a sum over the batch",
    features.STATE_SUM: 'a weight that sums over the batch without saying so (`add_weight(aggregation="sum")`)',
    features.STATE_NO_MEAN: (
        "a weight that takes from a batch neither a mean nor a sum, such as a largest value or a queue, unless it is "
        '[gathered](#sync) or has `aggregation="mean"`'
    ),
    features.LOSS_SCALE: "a `LossScaleOptimizer`",
    features.CLIPS_ACCUMULATED: "`global_clipnorm` with `gradient_accumulation_steps`",
    features.GLOBAL_CLIPNORM: "`global_clipnorm`",
    features.OWN_APPLY: "optimizers with an `apply` or `apply_gradients` of their own",
    features.NOT_ELEMENTWISE: "optimizers of your own; Lamb, Adafactor, Muon",
    features.CLIPNORM: "`clipnorm`",
    features.UNSIGNED_SLOT: "optimizers with variables of type bool or unsigned integers",
    features.FINAL_WEIGHTS: "optimizers with final weights of their own, such as `use_ema`",
    features.SCHEDULE_FREE: "ScheduleFreeAdamW",
}
# Refusals that say nothing of a way of training, by how they begin.
OTHERS = (
    *("its builder makes other variables on", "not the same on"),  # workers compare what they have made
    "two variables are called",  # a checkpoint names them
    *("is compiled without an optimizer", "needs {} GB more memory"),  # `fit` alone can be asked so
)
# By a feature another one that everything with it has, too.
CASE_OF = {
    features.CONSTRAINT_OF_PARTS: features.CONSTRAINT,
    features.REPEATS: features.IN_PHASES,
    features.ASSIGNED_UPDATED: features.IN_PHASES,
}


def works(feature: Feature) -> dict[str, str]:
    """By column of the table in docs/modes.md where a feature works."""
    refused = {feature, CASE_OF.get(feature)}
    ways = [WORKS[name] for name, way in WAYS.items() if any(one in way.refuses for one in refused)]
    found = {column: dict.fromkeys(works[column] for works in ways if column in works) for column in COLUMNS}
    return {column: "no" if "no" in cells else ", ".join(cells) or "yes" for column, cells in found.items()}


def table() -> tuple[list[str], list[str]]:
    """The rows of the table in docs/modes.md, and the lines of the list of what works in no column."""
    cells = {name: list(works(feature).values()) for feature, name in SHOWN.items()}
    rows = [f"| {name} | {' | '.join(row)} |" for name, row in cells.items() if set(row) != {"no"}]
    return rows, [f"* {name}" for name, row in cells.items() if set(row) == {"no"}]


def test_the_page_shows_the_table() -> None:
    lines = PAGES["docs/modes.md"].splitlines()
    rows, nowhere = table()
    begin = lines.index(f"| a model with | {' | '.join(f'`{column}`' for column in COLUMNS)} |") + 2
    assert lines[begin : lines.index("", begin)] == rows
    begin = lines.index(nowhere[0])
    assert lines[begin : lines.index("", begin)] == nowhere


CHINESE = {
    "yes": "是",
    "no": "否",
    "one worker": "单个节点",
    "one worker or no XLA": "单个节点或无 XLA",
    "one worker or no XLA, full last step": "单个节点或无 XLA、末步足够大",
    "no XLA": "无 XLA",
    "one ps": "单个 ps",
    "arrays": "数组",
    "not cut": "未切分",
    "no outer steps": "无外层更新",
    "no `init_from`": "无 `init_from`",
}


def test_the_chinese_page_has_the_same_cells() -> None:
    lines = PAGES["docs/zh/modes.md"].splitlines()
    begin = lines.index(f"| 模型中有 | {' | '.join(f'`{column}`' for column in COLUMNS)} |") + 2
    cells = [line.strip("| ").split(" | ")[1:] for line in lines[begin : lines.index("", begin)]]
    rows, nowhere = table()
    assert cells == [[CHINESE[cell] for cell in row.strip("| ").split(" | ")[1:]] for row in rows]
    begin = lines.index("* `run_eagerly`")
    assert lines.index("", begin) - begin == len(nowhere)


def test_every_feature_is_refused_somewhere_and_shown() -> None:
    known = {name for name, value in vars(features).items() if isinstance(value, Feature)}
    refused = {feature for way in WAYS.values() for feature in way.refuses}
    assert {name for name in known if getattr(features, name) not in refused & SHOWN.keys()} == set()
    assert WORKS.keys() == WAYS.keys()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_refusal_has_a_way_out(way: support.Way) -> None:
    facts = {"compute": "compute it from", "last_batch": 2, "num_workers": 3}
    for feature in way.refuses:
        told = str(support.refusal(way, feature, "mine", "it", **facts))
        assert told.startswith(("model (mine): ", "optimizer (mine): "))
        assert "; " in told
        assert "{" not in told


def texts_about_models(room: str) -> Iterator[tuple[str, str]]:
    """The texts in a room that begin as the refusal of a model or an optimizer, each with its file."""
    for path in sorted((REPOSITORY / "tf2dist" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                if text.startswith(("model (", "optimizer (", "model: ", "optimizer: ")):
                    yield path.name, text.partition(": ")[2]


def test_no_way_of_training_has_refusals_of_its_own() -> None:
    found = [text for room in ("training", "process", "checkpoint") for text in texts_about_models(room)]
    found += [(name, text) for name, text in texts_about_models("fitting") if name == "refusals.py"]
    assert [(name, text) for name, text in found if not text.startswith(OTHERS)] == []
