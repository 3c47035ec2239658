"""Runs one call of `fit`, from its checked arguments to the `Result` that it returns."""

import gc
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import keras

from tf2dist.checkpoint.snapshot import VARIABLES, read
from tf2dist.checkpoint.store import Checkpoints
from tf2dist.cluster.addresses import exposure_warning
from tf2dist.cluster.spec import Place
from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Layout
from tf2dist.data.splits import Splits
from tf2dist.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    FitError,
    LeaderLostError,
    NotFiniteError,
    TaskFailure,
    TaskLostError,
    TfDistError,
    kind_of,
    reason_of,
)
from tf2dist.fitting import mirror, refusals, shipping
from tf2dist.fitting.callbacks import Callbacks
from tf2dist.fitting.consoles import step_line
from tf2dist.fitting.mirror import Mirror, RatesAndSeeds
from tf2dist.fitting.readers import calls_with_weights, reads_progress
from tf2dist.fitting.request import FitArguments, Model, name_of, set_model_options
from tf2dist.fitting.session import FitSession
from tf2dist.launch.console import Console, number_of, result_lines
from tf2dist.launch.single_run import check_open_files, check_place, run_in_folder
from tf2dist.linux import process_wide
from tf2dist.messages import metrics_text
from tf2dist.model.own_step import has_own_step
from tf2dist.model.source import EpochPlan, copies_of
from tf2dist.process.tables_in_files import Tables
from tf2dist.registry import ARRAYS_OF_FIT, STREAM_OF_FIT
from tf2dist.signals import StopRequest
from tf2dist.tools.end_of_run import draw_training
from tf2dist.training.finished_model import lack_of_memory
from tf2dist.training.setup import sharding_of

LARGE_MODEL = 1 << 24  # weights; a collection of all garbage takes 0.2 s in a process that has imported TensorFlow


class OfLeader(dict[str, Any]):
    """A part of the result that the leader's host alone has; on others it is empty, and a look into it is an error."""

    where = ""

    @classmethod
    def elsewhere(cls, where: str) -> Self:
        """The empty one of another host."""
        made = cls()
        made.where = where
        return made

    def __missing__(self, key: str) -> Any:
        if not self.where:
            raise KeyError(key)
        raise TfDistError(
            f"{key}: the result is not on this host: {self.where}; put what needs it below `if result.summary:`"
        )


class History(OfLeader):
    """For each metric a list with a number for each epoch."""

    @property
    def history(self) -> "History":
        """The same: `keras.Model.fit` returns an object that has the lists in this attribute."""
        return self


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Attributes:
        history: a dict of lists, as Keras's `History.history`: for each metric a number for each epoch. Empty on hosts
            without the leader. `history.history` is the same.
        summary: the content of summary.json, of which docs/results.md describes each key; empty on hosts without the
            leader, and after `TerminateOnNaN` has ended the run.
        run_dir: the directory of the run on this host.
    """

    history: History
    summary: dict[str, Any]
    run_dir: Path
    _model: keras.Model | Callable[[], keras.Model] | None
    _where: str = ""

    def __repr__(self) -> str:
        """The result in a few lines, as the command prints it, with the numbers of the last epoch."""
        lines = result_lines(self.summary, "").splitlines() if self.summary else []
        last_epoch = {name: values[-1] for name, values in self.history.items() if values}
        lines += [f"last epoch: {metrics_text(last_epoch)}"] if last_epoch else []
        return "\n".join(["tf2dist.Result", *lines, str(self.run_dir)])

    @cached_property
    def model(self) -> keras.Model:
        """The compiled model with the final weights.

        One with large tables of embeddings that was made by a function is read from `run_dir` when it is asked for.

        Raises:
            TfDistError: it is on another host, which the message names, or `run_dir` does not have it any more.
        """
        # Only the leader's process has a mirror of the model. An error here, rather than in `fit`, lets the same script
        # run to its end on every host.
        if self._model is None:
            raise TfDistError(f"the model is not on this host: {self._where}; tf2dist.load_model reads it there")
        return self._model if isinstance(self._model, keras.Model) else self._model()


FolderAndSummary = tuple[Path, dict[str, Any]]  # the run directory and the summary
# The class of a task's error. Its name comes out of the task's process; of a task on another host, or one that could
# write nothing, only the exit code does.
KINDS = {kind.__name__: kind for kind in (CheckpointError, ClusterError, DataError)}
ERRORS: dict[int, type[TfDistError]] = {
    ConfigError.exit_code: ConfigError,
    NotFiniteError.exit_code: NotFiniteError,
    TaskLostError.exit_code: TaskLostError,
    LeaderLostError.exit_code: LeaderLostError,
}


@dataclass(frozen=True)
class FitRun:
    """A call of `fit`.

    Attributes:
        arguments: as `request.checked` gives them.
        started_at: `time.time()` of the call.
    """

    arguments: FitArguments
    splits: Splits
    plan: EpochPlan
    config: RunConfig
    place: Place
    console: Console
    started_at: float

    @property
    def num_workers(self) -> int:
        return self.place.cluster.num_workers

    def execute(self) -> Result:
        """Runs the cluster to its end; raises what `fit` raises."""
        with alone_with(self.arguments.model):
            num_workers = self.num_workers
            batches = self.config.batches_per_update(num_workers)
            batch_size = None if self.splits.stream else self.config.train.batch_size_per_worker
            self.console.note(step_line(self.config.mode, batches, batch_size))
            # Without streams only: how many examples those have is not known here.
            if not self.splits.stream and (num := len(self.splits.train)) < num_workers:
                has = number_of(num, "example")
                raise FitError(f"x: has {has} to train on, for {num_workers} workers; use fewer workers")
            if self.place.task.job == "evaluator" and not self.splits.evaluated:
                raise FitError(
                    f"validation_data: must be given for {self.place.task}, which evaluates it; or start no evaluator"
                )
            with private_folder() as job:
                return self._run_in(job)

    def _run_in(self, job: Path) -> Result:
        given, name = self.arguments.model, name_of(self.arguments.model)
        tables = Tables(job / shipping.TABLES)
        # A model that is given is trained in place, and one that callbacks look at has all of its weights.
        needs_weights = isinstance(given, keras.Model) or bool(calls_with_weights(self.arguments.callbacks))
        in_place = nullcontext if needs_weights else tables.left_empty
        with in_place():
            model = local_model(given, self.splits.layout)
        calls = calls_with_weights(self.arguments.callbacks)
        if calls and tables.num_made:  # a function of a callback refers to the model by now
            tables, in_place = Tables(job / shipping.TABLES), nullcontext
            model = local_model(given, self.splits.layout)
        if not tables.num_made:
            calls.add("end")  # for the result
        refusals.check_model(name, model, self.config.mode)
        set_model_options(self.config, model, name, STREAM_OF_FIT if self.splits.stream else ARRAYS_OF_FIT)
        # The tasks copy the optimizer. After the options, since with a policy that is refused there Keras has wrapped
        # it in one that scales the loss.
        if not has_own_step(model):
            copies_of(model.optimizer, model.trainable_variables, name)
        # A compiled model keeps the names that it was made with in this process; its copy has those of the tasks.
        is_read = reads_progress(self.arguments.callbacks)
        copy = shipping.ship(job, given, name, self.splits, self.plan, calls_with_weights=calls, reads_progress=is_read)
        if not self.place.leads:
            return self._follow(job)
        with in_place():
            mirror_of_own = Mirror(model, copy, self.splits.layout)
        is_large = copy is not None and sum(math.prod(weight.shape) for weight in copy.weights) >= LARGE_MODEL
        del copy  # it has the memory of a second model
        if is_large:
            gc.collect()  # a model refers to itself
        variables = [*model.variables, *mirror_of_own.optimizer.variables]
        refusals.check_memory(name, [v for v in variables if not tables.has(v)], bool(calls - {"end"}))
        return self._lead(mirror_of_own, tables.num_made > 0, job)

    def _lead(self, mirror_of_own: Mirror, has_empty_tables: bool, job: Path) -> Result:
        ends_with_data = self.splits.stream is not None and not self.splits.stream.repeats
        steps = None if ends_with_data else self.plan.steps_per_epoch or self._steps_per_pass()
        callbacks = Callbacks(self.arguments.callbacks, mirror_of_own, self.plan, int(self.arguments.verbose), steps)
        if advice := callbacks.advice():
            self.console.warn(advice)
        session = self._session(job, callbacks)
        with self._left_as_saved(mirror_of_own):
            try:
                folder, summary = self._run_tasks(session)
            except TaskFailure as failure:
                folder, summary = self._terminated(failure)
                # The mirror has the weights of the last call of the hooks.
                callbacks.end_not_finite(session.step)
        callbacks.end()
        history = History(callbacks.history.history)
        if not has_empty_tables:
            return Result(history, summary, folder, mirror_of_own.model)
        build = partial(local_model, self.arguments.model, self.splits.layout)
        state = mirror_of_own.rates_and_seeds()

        def read_model() -> keras.Model:
            model = finished_model(build, self.splits.layout, folder, session.step, state)
            callbacks.history.set_model(model)
            model.history = callbacks.history  # as `keras.Model.fit` leaves it
            return model

        return Result(history, summary, folder, read_model)

    @contextmanager
    def _left_as_saved(self, mirror_of_own: Mirror) -> Iterator[None]:
        """Gives a model the weights with which the run was saved last, if a stop or an error ends it."""
        try:
            yield
        except BaseException:
            # Nobody gets a model that was made here. Before the first call the checkpoints may be of another one.
            if isinstance(self.arguments.model, keras.Model) and mirror_of_own.step is not None:
                with suppress(TfDistError, OSError):
                    snapshot = Checkpoints(Path(self.config.run_dir or "", "checkpoints")).newest(lambda _: None)
                    if snapshot and snapshot.step > mirror_of_own.step:
                        mirror_of_own.put_saved(snapshot)
            raise

    def _steps_per_pass(self) -> int:
        """The steps of the cluster in which it takes all examples of the arrays once."""
        config, batch_size = self.config, self.config.train.batch_size_per_worker
        return sharding_of(config, config.mode, self.splits, self.plan, self.num_workers, batch_size).updates_per_pass

    def _warn_of_repeated_data(self) -> None:
        """Tells where Keras would end an epoch early, since the arrays are used up."""
        steps = self.plan.steps_per_epoch
        if steps and not self.splits.stream and (pass_steps := self._steps_per_pass()) % steps:
            self.console.warn(
                f"steps_per_epoch ({steps}): one pass over the data has {pass_steps} steps; keras.Model.fit would end "
                f"an epoch with the data, here the data begin again and every epoch has {steps} steps"
            )

    def _follow(self, job: Path) -> Result:
        try:
            folder, summary = self._run_tasks(self._session(job, None))
        except TaskFailure as failure:
            folder, summary = self._terminated(failure)
        leader = self.place.cluster.leader
        location = f"{leader} at {self.place.cluster.address(leader)} has it, in its run_dir"
        missing = OfLeader.elsewhere(location)
        return Result(History.elsewhere(location), summary or missing, folder, None, location)

    def _terminated(self, failure: TaskFailure) -> FolderAndSummary:
        """The result of a run that TerminateOnNaN has ended, without a summary; raises any other failure."""
        if failure.exit_code != NotFiniteError.exit_code or not refusals.has_terminator(self.arguments.callbacks):
            raise as_public_error(failure) from None
        self.console.note(f"TerminateOnNaN ended the run: {failure}")
        return Path(self.config.run_dir or ""), {}

    def _session(self, job: Path, callbacks: Callbacks | None) -> FitSession:
        return FitSession(job, identity_of(self.splits, self.plan), callbacks, self.plan.epochs)

    def _run_tasks(self, session: FitSession) -> FolderAndSummary:
        self._warn_of_repeated_data()
        try:
            folder, summary = run_tasks(self.config, self.place, self.console, self.started_at, session)
            if summary:
                self.console.note(result_lines(summary, str(folder)))
            return folder, summary
        finally:
            draw_training(self.config, self.place, self.console)


def finished_model(
    build: Callable[[], keras.Model], layout: Layout, run_dir: Path, step: int, state: RatesAndSeeds
) -> keras.Model:
    """The model of a function with its large tables, which this process has not had so far.

    Args:
        step: at which the run has ended.
        state: what its last checkpoint does not have.
    """
    try:
        snapshot = read(Checkpoints(run_dir / "checkpoints").path_of(step))
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"run_dir ({run_dir}): has no checkpoint of step {step}, from which the model is read ({reason})"
        ) from None
    arrays = [array.nbytes for name, array in snapshot.arrays.items() if name.startswith(VARIABLES)]
    if lack := lack_of_memory(arrays):
        raise TfDistError(f"the model {lack}; tf2dist.predict reads its tables by row")
    model = build()
    Mirror(model, None, layout).finish(snapshot, state)
    return model


def run_tasks(
    config: RunConfig, place: Place, console: Console, started_at: float, session: FitSession
) -> FolderAndSummary:
    """Runs the tasks of this host to their end."""
    check_open_files(place.cluster)
    if place.has_peers:
        check_place(config, *place, console)
        if text := exposure_warning(*place):
            console.warn(text)

    def run(stop: StopRequest) -> FolderAndSummary:
        return run_in_folder(config, place, console, started_at, stop, session)

    return session.follow(run, console)


_in_training: set[int] = set()  # the ids of the models that calls of `fit` in this process are training


@contextmanager
def alone_with(model: Model) -> Iterator[None]:
    """Refuses a model that another thread trains already: each would overwrite the weights of the other."""
    if not isinstance(model, keras.Model):  # a function builds a new one at each call
        yield
        return
    with process_wide:
        if id(model) in _in_training:
            raise FitError(f"model ({model.name}): another call of fit is training it; give each call its own model")
        _in_training.add(id(model))
    try:
        yield
    finally:
        _in_training.remove(id(model))


def local_model(model: Model, layout: Layout) -> keras.Model:
    """The model in this process, with its variables.

    Args:
        layout: of the data.
    """
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise FitError(f"model: is {kind_of(model)}; give a compiled keras.Model, or a function that builds one")
        return shipping.call_builder(model, name_of(model), layout)
    if not model.compiled:
        raise FitError(f"model ({name_of(model)}): is not compiled; call model.compile(optimizer, loss) first")
    mirror.build(model, name_of(model), layout)
    return model


def identity_of(splits: Splits, plan: EpochPlan) -> dict[str, Any]:
    """The facts that must be equal in the calls of all hosts, in a form that people can read."""
    # The number of examples, types and shapes stand for the arrays: hashing gigabytes would delay every start.
    identity = {"train": str(splits.stream or splits.train)}
    if validation := splits.validation_stream or splits.validation:
        identity["validation"] = str(validation)
    return {**identity, **asdict(plan)}


def as_public_error(failure: TaskFailure) -> TfDistError:
    """The failure of tasks as an error of the class of its cause, with the same text."""
    kind = KINDS.get(failure.records[0].kind) or ERRORS.get(failure.exit_code)
    return kind(str(failure)) if kind else failure


@contextmanager
def private_folder() -> Iterator[Path]:
    # It has mode 0700: what is pickled in it must come from this user alone. It is removed, too, if the program ends
    # while another thread is in the block.
    with tempfile.TemporaryDirectory(prefix="tf2dist-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
