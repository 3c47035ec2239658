"""The comparisons of the benchmark, and the ratio that each should reach."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from tests.bench import figures, links, loopback, tables
from tests.bench.workload import TABLE_ROWS

Measure = Callable[[], float]
ACCURACY = 0.97  # to be reached
# Global steps that are timed: some seconds for the fastest contender. As many untimed steps come before, to warm up.
STEPS = {
    ("async", "softmax"): 12_000,
    ("async", "dnn"): 4_000,
    ("async", "cnn"): 500,
    ("sync", "softmax"): 2_000,
    ("sync", "dnn"): 600,
    ("sync", "cnn"): 150,
    ("async", "2 million"): 300,
    ("async", "12 million"): 60,
    ("async", "50 million"): 20,
    ("sync", "2 million"): 100,
    ("sync", "12 million"): 24,
    ("sync", "50 million"): 8,
    ("async", "tables"): 6_000,
    ("sync", "tables"): 2_000,
    ("async", "wide and deep"): 200,
    ("sync", "mobilenet"): 60,
    ("async", "mobilenet"): 60,
}
SMALL = ("softmax", "dnn", "cnn")
LARGE = ("2 million", "12 million", "50 million")  # parameters


@dataclass(frozen=True)
class Comparison:
    """Contenders that take turns.

    Attributes:
        unit: the unit of their figures.
        contenders: for each a function that measures it once.
        ratio: the two contenders whose medians are divided.
        target: the wanted ratio; None if the ratio is only reported.
        at_least: whether the ratio should be at least, or at most, the target.
    """

    name: str
    unit: str
    contenders: Mapping[str, Measure]
    ratio: tuple[str, str]
    target: float | None = None
    at_least: bool = True

    def is_met(self, ratio: float) -> bool | None:
        if self.target is None:
            return None
        return ratio >= self.target if self.at_least else ratio <= self.target


class Table:
    """All comparisons, over the same arrays.

    Args:
        arrays: see `Workload`.
        scale: a factor of all numbers of steps; less than 1 to check only that everything runs.
    """

    def __init__(self, arrays: str, scale: float = 1.0) -> None:
        self._arrays, self._scale = arrays, scale

    def __iter__(self) -> Iterator[Comparison]:
        yield from self._old_program()
        yield from self._sync_replicas()
        yield from self._stragglers()
        yield from self._torch()
        yield from self._keras_on_jax()
        yield from self._large()
        yield from self._tables()
        yield from self._wide_and_deep()
        yield from self._links()
        yield from self._deep()
        yield from self._one_process()
        yield from self._xla()
        yield from self._ourselves()
        yield from self._fit()
        yield from self._start()
        yield from self._memory()
        yield from self._coordinator()

    def _steps(self, mode: str, model: str, share: float = 1.0) -> int:
        return max(8, int(STEPS[mode, model] * self._scale * share))

    def _peer(self, contender: str, mode: str, model: str, num_workers: int = 3, share: float = 1.0) -> Measure:
        steps = self._steps(mode, model, share)
        return partial(figures.peer_rate, contender, mode, model, num_workers, steps, self._arrays)

    def _ours(
        self,
        mode: str,
        model: str,
        *more: str,
        num_workers: int = 3,
        optimizer: str = "sgd",
        plugin: str = "",
        share: float = 1.0,
    ) -> Measure:
        steps = self._steps(mode, model, share)
        return partial(figures.our_rate, mode, model, num_workers, steps, *more, optimizer=optimizer, plugin=plugin)

    def _old_program(self) -> Iterator[Comparison]:
        targets = {("async", "softmax"): 3.0, ("async", "dnn"): 2.0, ("sync", "softmax"): 1.5}
        for mode, model in itertools.product(("async", "sync"), SMALL):
            contenders = {
                "tf2dist": self._ours(mode, model),
                "old program": self._peer("old", mode, model, share=0.3),
                "old, our threads": self._peer("old, our threads", mode, model, share=0.3),
                "plain port": self._peer("plain", mode, model, share=0.1),
            }
            name, target = f"{mode} {model}", targets.get((mode, model))
            yield Comparison(name, "steps/s", contenders, ("tf2dist", "old program"), target)

    def _sync_replicas(self) -> Iterator[Comparison]:
        for model in ("softmax", "dnn", *LARGE[:2]):
            ours = partial(figures.our_rate, "sync_replicas", model, 3, self._steps("sync", model), optimizer="sgd")
            old = self._peer("old", "sync", model, share=0.3)
            contenders: dict[str, Measure] = {"tf2dist": ours, "old program": old}
            yield Comparison(f"sync_replicas {model}", "steps/s", contenders, ("tf2dist", "old program"), 1.5)

    def _stragglers(self) -> Iterator[Comparison]:
        """What one of four workers costs that takes five steps' time longer for each step; all others are alike."""
        alike = [figures.SLEEP_SECS] * 4
        delays = {"delayed": [*alike[1:], 6 * figures.SLEEP_SECS], "alike": alike}
        for mode, more, target in (
            ("sync_replicas", ["sync_replicas.replicas_to_aggregate=3"], 0.9),
            ("sync_replicas, all", [], None),
            ("sync", [], 0.3),
            ("async", [], None),
        ):
            name = mode.removesuffix(", all")
            steps = self._steps("sync", "softmax", 0.04) * (4 if mode == "async" else 1)
            contenders: dict[str, Measure] = {
                which: partial(figures.our_rate, name, "softmax", 4, steps, f"simulate.delay_secs={secs}", *more)
                for which, secs in delays.items()
            }
            ends = ("delayed", "alike")
            yield Comparison(f"straggler {mode}", "steps/s", contenders, ends, target, at_least=mode != "sync")

    def _torch(self) -> Iterator[Comparison]:
        for num_workers in (2, 3):
            for model in SMALL:
                contenders = {
                    "tf2dist": self._ours("sync", model, num_workers=num_workers),
                    "torch gloo": self._peer("torch", "sync", model, num_workers, share=0.6),
                }
                name = f"torch {model} {num_workers} workers"
                yield Comparison(name, "steps/s", contenders, ("tf2dist", "torch gloo"), 1.2)

    def _keras_on_jax(self) -> Iterator[Comparison]:
        peers = {"keras jax": ("keras jax", 0.2), "torch gloo": ("torch", 0.6), "old program": ("old", 0.3)}
        ends = ("tf2dist", "keras jax")
        for model in (*SMALL, LARGE[0]):
            rates = {"tf2dist": self._ours("sync", model, num_workers=2)}
            starts: dict[str, Measure] = {"tf2dist": partial(figures.secs_to_first_step, "sync", model, 2)}
            for name, (contender, share) in peers.items():
                rates[name] = self._peer(contender, "sync", model, 2, share)
                starts[name] = partial(figures.peer_first_step_secs, contender, "sync", model, 2, self._arrays)
            yield Comparison(f"jax {model}", "steps/s", rates, ends, 1.0)
            yield Comparison(f"jax start {model}", "s", starts, ends, 1.0, at_least=False)

    def _large(self) -> Iterator[Comparison]:
        """Where what counts is how often the parameters are copied, and no longer what a call costs."""
        for model, target in zip(LARGE, (1.3, 1.0, 1.0), strict=True):
            contenders = {
                "tf2dist": self._ours("async", model),
                "old program": self._peer("old", "async", model),
                "old, oneDNN": self._peer("old, oneDNN", "async", model),  # which large models of ours have by default
            }
            yield Comparison(f"large async {model}", "steps/s", contenders, ("tf2dist", "old program"), target)
        for num_workers, model in itertools.product((2, 3), LARGE):
            ours = self._ours("sync", model, num_workers=num_workers)
            contenders = {"tf2dist": ours, "torch gloo": self._peer("torch", "sync", model, num_workers)}
            name = f"large sync {model} {num_workers} workers"
            yield Comparison(name, "steps/s", contenders, ("tf2dist", "torch gloo"), 1.2)
        for model in ("softmax", "dnn", *LARGE):
            own = self._ours("sync", model)
            tensorflow = self._ours("sync", model, "cluster.all_reduce=tensorflow")
            contenders = {"own": own, "tensorflow": tensorflow}
            yield Comparison(f"large all-reduce {model}", "steps/s", contenders, ("own", "tensorflow"), 1.0)
        for mode, model in itertools.product(("async", "sync"), LARGE):
            size = figures.parameter_bytes(model)
            contenders = {
                "steps": partial(figures.exchanged_mb, mode, model, 2, self._steps(mode, model)),
                "loopback": partial(loopback.megabytes_per_sec, size, max(1, int(4e9 * self._scale / size))),
            }
            yield Comparison(f"large loopback {mode} {model}", "MB/s", contenders, ("steps", "loopback"))

    def _tables(self) -> Iterator[Comparison]:
        """Where a step touches a few hundred rows of tables of any size."""
        few, million, many = "1 thousand rows", "1 million rows", "10 million rows"

        def ours(mode: str, model: str) -> Measure:
            return partial(tables.our_rate, mode, model, self._steps(mode, "tables"))

        for mode, large, target in (("async", many, 0.8), ("sync", million, 0.7)):
            rates = {model: ours(mode, model) for model in (few, large)}
            yield Comparison(f"tables rows {mode}", "steps/s", rates, (large, few), target)
        for mode, least in (("async", 10.0), ("sync", None)):
            keras_fit = partial(figures.peer_rate, "keras_fit", mode, million, 1, max(8, int(30 * self._scale)), "")
            contenders: dict[str, Measure] = {"tf2dist": ours(mode, million), "keras fit": keras_fit}
            yield Comparison(f"tables keras {mode}", "steps/s", contenders, ("tf2dist", "keras fit"), least)
        for model in TABLE_ROWS:
            steps = self._steps("async", "tables", 0.3)
            old = partial(figures.peer_rate, "old", "async", model, tables.NUM_WORKERS, steps, "")
            contenders = {"tf2dist": ours("async", model), "old program": old}
            yield Comparison(f"tables old {model}", "steps/s", contenders, ("tf2dist", "old program"), 1.2)
        sent = partial(tables.sent_mb, million, int(6_000 * self._scale))
        contenders = {"sent": sent, "rows": partial(tables.rows_mb, million)}
        yield Comparison("tables bytes", "MB", contenders, ("sent", "rows"), 1.1, at_least=False)
        steps = max(20, int(1_000 * self._scale))
        for name, unit, measure, more in (
            ("memory", "MB", partial(tables.worker_mb, steps=steps), 50),
            ("start", "s", tables.first_step_secs, 5),
        ):
            ends = (many, f"{few} + {more}")
            contenders = {ends[0]: partial(measure, many), ends[1]: partial(tables.more_than, more, measure, few)}
            yield Comparison(f"tables {name}", unit, contenders, ends, 1.0, at_least=False)

    def _wide_and_deep(self) -> Iterator[Comparison]:
        """Where a step touches rows of 52 tables, and dense layers of three million parameters."""
        steps = self._steps("async", "wide and deep")
        contenders = {
            "tf2dist": partial(tables.wide_and_deep_rate, "async", 2, steps),
            "old program": partial(tables.old_wide_and_deep_rate, 2, steps),
            "tf2dist, sync": partial(tables.wide_and_deep_rate, "sync", 2, steps),
            "tf2dist, 1 worker": partial(tables.wide_and_deep_rate, "sync", 1, steps),
        }
        ends = ("tf2dist", "old program")
        yield Comparison("wide and deep", "examples/s of processor time", contenders, ends, 1.0)

    def _links(self) -> Iterator[Comparison]:
        """What crosses the links of hosts, and links that are slower than the hosts."""
        for mode, num_workers in (("async", 1), ("sync", 2)):
            # How many steps are refused at the end differs by those of a call or two, and each of them travels, too.
            for model, steps, at_once in (("dnn", 2_000, 10), ("2 million", 200, 1), ("12 million", 100, 1)):
                options = [*figures.model_of(model), f"train.steps_per_execution={at_once}"]
                sent = partial(links.megabytes_of_a_step, mode, num_workers, int(steps * self._scale), *options)
                # A pull and a push; or to the other worker, and from it.
                both = figures.parameter_bytes(model) * 2 / 1e6
                contenders: dict[str, Measure] = {"sent": sent, "parameters": partial(float, both)}
                ends = ("sent", "parameters")
                yield Comparison(f"links bytes {mode} {model}", "MB", contenders, ends, 1.02, at_least=False)
        million = figures.model_of("12 million")
        cut = [*million, "cluster.placement=partitioned"]
        # With four ps the links of six workers would be the limit, and with more workers the cores of a small machine.
        for num_ps, num_workers, slower, target in ((2, 6, 1, 1.6), (4, 12, 2, 3.2)):
            rate = partial(links.rate_over_links, "async", num_workers, bytes_per_sec=links.BYTES_PER_SEC // slower)
            by_ps: dict[str, Measure] = {f"{n} ps": partial(rate, n, 5 * num_workers, *cut) for n in (num_ps, 1)}
            yield Comparison(f"links {num_ps} ps", "steps/s", by_ps, (f"{num_ps} ps", "1 ps"), target)
        for mode in ("async", "sync"):
            by_type: dict[str, Measure] = {
                dtype: partial(links.rate_over_links, mode, 2, 1, 10, *million, f"cluster.transfer_dtype={dtype}")
                for dtype in ("bfloat16", "float32")
            }
            yield Comparison(f"links bfloat16 {mode}", "steps/s", by_type, ("bfloat16", "float32"))

    def _deep(self) -> Iterator[Comparison]:
        """Where a graph takes longer to prepare than the steps of a short run."""
        for model in ("mobilenet", "resnet50"):
            first = {mode: partial(figures.deep_first_step_secs, mode, model, 2) for mode in ("async", "sync")}
            yield Comparison(f"deep first step async {model}", "s", first, ("async", "sync"), 1.3, at_least=False)
            alone: dict[str, Measure] = {
                "sync": partial(figures.deep_first_step_secs, "sync", model, 3),
                "keras fit": partial(figures.keras_first_step_secs, model, self._arrays),
            }
            yield Comparison(f"deep first step sync {model}", "s", alone, ("sync", "keras fit"), 1.5, at_least=False)
            steps = max(20, int((1000 if model == "mobilenet" else 30) * self._scale))
            for workers in (2, 3):
                rates = {mode: partial(figures.deep_rate, mode, model, workers, steps) for mode in ("async", "sync")}
                yield Comparison(f"deep rate {model} {workers} workers", "examples/s", rates, ("async", "sync"), 0.8)
            stall: dict[str, Measure] = {
                "longest": partial(figures.deep_longest_stall, model, 2, steps),
                "limit": lambda: 0.5,
            }
            yield Comparison(f"deep stall {model}", "s", stall, ("longest", "limit"), 1.0, at_least=False)

    def _one_process(self) -> Iterator[Comparison]:
        for model, target in (("softmax", None), ("dnn", None), ("cnn", 0.9)):
            contenders = {
                "tf2dist": self._ours("async", model),
                "bare loop": self._peer("bare", "async", model, share=0.6),
                "keras fit": self._peer("keras_fit", "async", model, share=0.6),
            }
            yield Comparison(f"one process {model}", "steps/s", contenders, ("tf2dist", "bare loop"), target)

    def _xla(self) -> Iterator[Comparison]:
        """What compiling the step is worth, beside Keras's own `fit`, which compiles it by itself on a GPU.

        On a machine with one GPU all workers share it; there this takes ten minutes with one round.
        """
        for model, num_workers, mode in itertools.product(("dnn", "cnn", "mobilenet"), (1, 2, 4), ("sync", "async")):
            steps = self._steps(mode, model)
            rate = partial(figures.examples_rate, mode, model, num_workers, steps)
            contenders: dict[str, Measure] = {"xla": partial(rate, "devices.xla=true"), "tf2dist": rate}
            if num_workers == 1 and mode == "sync":
                contenders["keras fit"] = partial(figures.keras_examples_rate, model, steps, self._arrays)
            name = f"xla {mode} {model} {num_workers} worker{'s' * (num_workers > 1)}"
            yield Comparison(name, "examples/s", contenders, ("xla", "tf2dist"))

    def _ourselves(self) -> Iterator[Comparison]:
        sgd, adam = self._ours("async", "dnn"), self._ours("async", "dnn", optimizer="adam")
        yield Comparison("adam", "steps/s", {"adam": adam, "sgd": sgd}, ("adam", "sgd"), 0.75)
        with_it = self._ours("async", "softmax", share=2)
        without = self._ours("async", "softmax", plugin="unmeasured", share=2)
        contenders = {"measured": with_it, "unmeasured": without}
        yield Comparison("measuring", "steps/s", contenders, ("measured", "unmeasured"), 0.97)
        often = self._ours("async", "dnn", "checkpoint.every_secs=1", share=2)
        contenders = {"every second": often, "at the end": self._ours("async", "dnn", share=2)}
        yield Comparison("checkpoints", "steps/s", contenders, ("every second", "at the end"), 0.90)
        inputs = {how: partial(figures.input_rate, how, self._arrays) for how in ("ours", "per_element")}
        yield Comparison("input", "batches/s", inputs, ("ours", "per_element"), 4.0)
        for mode in ("async", "sync"):
            ours = partial(figures.secs_to_accuracy, mode, ACCURACY)
            old = partial(figures.peer_secs_to_accuracy, "old", mode, ACCURACY, self._arrays)
            contenders = {"tf2dist": ours, "old program": old}
            yield Comparison(f"to {ACCURACY} {mode}", "s", contenders, ("tf2dist", "old program"), 1.0, at_least=False)

    def _fit(self) -> Iterator[Comparison]:
        for mode in ("async", "sync"):
            steps = self._steps(mode, "dnn")
            fit = partial(figures.fit_rate, mode, steps, 2, self._arrays, "none")
            contenders: dict[str, Measure] = {"fit": fit, "command": self._ours(mode, "dnn")}
            yield Comparison(f"fit {mode}", "steps/s", contenders, ("fit", "command"), 0.97)
        steps = self._steps("async", "dnn")
        epochs = max(2, 2 * steps // 1_000)  # of 1,000 steps
        contenders = {
            which: partial(figures.fit_rate, "async", steps, epochs, self._arrays, which) for which in ("usual", "none")
        }
        yield Comparison("callbacks", "steps/s", contenders, ("usual", "none"), 0.98)

    def _start(self) -> Iterator[Comparison]:
        for mode in ("async", "sync"):
            first, whole = partial(figures.secs_to_first_step, mode), partial(figures.secs_of_one_step, mode)
            for name, measure, target in (("first step", first, 1.3), ("one step", whole, 1.4)):
                contenders: dict[str, Measure] = {"tf2dist": measure, "import": figures.import_secs}
                yield Comparison(f"{name} {mode}", "s", contenders, ("tf2dist", "import"), target, at_least=False)

    def _memory(self) -> Iterator[Comparison]:
        steps = max(20, int(1_000 * self._scale))
        contenders = {
            "3 workers": partial(figures.our_pss_mb, 3, steps),
            "one process": partial(figures.one_process_pss_mb, steps, self._arrays),
        }
        yield Comparison("memory", "MB", contenders, ("3 workers", "one process"), 2.5, at_least=False)
        for model in ("dnn", *LARGE):
            few = min(steps, STEPS["async", model])
            added: dict[str, Measure] = {
                "4th worker": partial(figures.added_worker_mb, model, 3, few),
                "limit": lambda: 120.0,
            }
            yield Comparison(f"added worker {model}", "MB", added, ("4th worker", "limit"), 1.0, at_least=False)

    def _coordinator(self) -> Iterator[Comparison]:
        few, many = (int(steps * self._scale) for steps in (10_000, 40_000))
        cpu = {f"{steps} steps": partial(figures.coordinator_cpu, steps) for steps in (few, many)}
        ends = (f"{many} steps", f"{few} steps")
        yield Comparison("coordinator", "CPU s for 1,000 steps", cpu, ends, 1.25, at_least=False)
