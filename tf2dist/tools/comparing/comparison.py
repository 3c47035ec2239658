"""A whole comparison, from its options to its report."""

from dataclasses import replace
from pathlib import Path

from tf2dist.config.compose import ConfigSource
from tf2dist.data import location
from tf2dist.errors import ConfigError, Interrupted, SomeFailed, TrainingError
from tf2dist.files import raising, write_whole
from tf2dist.launch.console import Console, print_result
from tf2dist.launch.run_dir import in_shell, locked
from tf2dist.signals import Signals
from tf2dist.tools.comparing.comparison_report import REPORT, report_of
from tf2dist.tools.comparing.matrix import Contender, Options, contenders_of, runs_of, split, with_data
from tf2dist.tools.comparing.results import results_of
from tf2dist.tools.comparing.running import OPTION, earlier_plan, new_folder, prepare_folder, run_all


def compare(arguments: list[str], overrides: list[str], source: ConfigSource, signals: Signals) -> None:
    """Runs a comparison and writes its report.

    Args:
        arguments: of the command line, as they were given.
        overrides: those among them that are not flags.
    """
    console = Console()
    options, run_overrides = split(overrides)
    if options.folder:
        earlier_plan(options.folder)  # before data are downloaded
    contenders = _with_resolved_data(options, run_overrides, source, console)
    runs = list(runs_of(contenders, options.seeds))
    folder = options.folder or new_folder()
    prepare_folder(folder, runs)
    with locked(folder, OPTION):
        try:
            with signals.deferred():
                outcomes = run_all(runs, folder, source.flags(), signals, options.until, console)
            if signals.signum:
                raise KeyboardInterrupt
            results = results_of(outcomes, folder, options.until)
            is_measured = any(result.measured for result in results)
            headline, report = report_of(options, arguments, results) if is_measured else ("", {})
            # One by one the files are whole or not there; all together they are of one comparison.
            with signals.deferred():
                _write(report, folder)
        except KeyboardInterrupt:
            raise Interrupted(signals.signum, f"; the same command with {in_shell(OPTION, folder)} goes on") from None
    if headline:
        print_result(f"{headline}\n{folder / REPORT}", console, "the verdict")
    if failed := [(str(outcome.run), outcome.exit_code) for outcome in outcomes if outcome.state == "failed"]:
        raise SomeFailed(failed, f"{len(outcomes)} runs", in_shell(OPTION, folder))


def _with_resolved_data(
    options: Options, run_overrides: list[str], source: ConfigSource, console: Console
) -> list[Contender]:
    """The contenders, after the data were found, downloaded, or replaced by others: by one process, before all runs."""
    contenders = contenders_of(options, run_overrides, source)
    for name in dict.fromkeys(contender.config.data.name for contender in contenders):
        config = next(contender.config for contender in contenders if contender.config.data.name == name)
        if options.until.kind == "accuracy" and name in location.MADE_UP:
            raise ConfigError(f"until ({options.until}): data={name} has no classes; give until=2000steps")
        resolved = location.resolve(replace(config.data), console.warn)
        if resolved.name != name:
            return contenders_of(options, with_data(run_overrides, resolved.name), source)
    return contenders


def _write(report: dict[str, str | bytes], folder: Path) -> None:
    with raising(
        "the report could not be written",
        f"make room, and give the same command with {in_shell(OPTION, folder)} again",
        TrainingError,
    ):
        for name, content in report.items():
            write_whole(folder / name, content)
