"""``python -m tf2dist.compare [NAME=VALUE ...]``

Trains the same model in several modes, with equal workers and with a slow one, and says which is first to the same
accuracy. Each contender runs as a command of its own, in turns with the others. The folder of the comparison gets
report.html, which any browser shows without a network, its pictures as PNG, and compare.json with everything for
programs.

Options of the comparison, with their defaults:

    modes=[sync,async,sync_replicas]    what is compared
    delays=[0,0.05]                     by how many seconds each step of the last worker takes longer
    common_delay=0                      by how many seconds each step of every worker takes longer
    backups=[1]                         with sync_replicas: how many workers a step does not wait for; of several
                                        numbers each is a contender
    workers=3                           all on this machine
    seeds=2                             how often each contender trains, with another seed each time
    until=0.95                          where a run ends: at this validation accuracy; or until=2000steps, until=30s
    eval_every_examples=N               training examples between two evaluations; by default an eighth of the data
    compare_dir=outputs/DATE_TIME-compare
                                        the folder; the same command with the same folder goes on where it was stopped

All other options are those of python -m tf2dist, such as model=cnn or train.epochs=10, after which a run ends in any
case; without optimizer= it is optimizer=momentum optimizer.learning_rate=0.04. Several values, as in
model=softmax,dnn or algorithm=plain,staleness_aware, make contenders of each. An option that only some modes have is
given to those alone. --config-dir and --config-name are as there.

    python -m tf2dist.compare                                                     in about five minutes
    python -m tf2dist.compare 'delays=[0,0.02,0.05]' model=softmax,dnn,cnn        a map of which mode is first
    python -m tf2dist.compare modes=sync_replicas 'backups=[0,1,2]' workers=4     what backup workers bring
    python -m tf2dist.compare common_delay=0.05 workers=8           computing takes longer, and two cores suffice
"""

import os
from typing import NoReturn

from tf2dist import signals as handling


def main(argv: list[str] | None = None) -> NoReturn:
    """Compares what the command line asks for, and exits."""
    handling.end_at_once()
    from tf2dist.launch.single_run import run_command  # importing takes a while, and signals may come meanwhile

    run_command(run, argv)


def run(arguments: list[str], started_at: float, signals: handling.Signals) -> None:
    """Compares, and prints the verdict and the folder.

    Raises:
        RequestError: the request is wrong; nothing has been run.
        SomeFailed: at least one run failed; all were tried.
        Interrupted: by a signal; the runs that are done are kept, and there is no report.
    """
    from tf2dist.cluster.sources import of_engine
    from tf2dist.config.flags import check_for_one_run, parse, source_of
    from tf2dist.errors import ConfigError
    from tf2dist.launch.console import show_lines
    from tf2dist.tools.comparing.comparison import compare

    args = parse(arguments)
    if args.help:
        show_lines((__doc__ or "").strip())
        return
    check_for_one_run(args, "is not for a comparison; see --help")
    if os.environ.get("TF_CONFIG"):
        raise ConfigError("TF_CONFIG: is set, and a comparison runs on this machine alone; unset it")
    if engine := of_engine(os.environ):
        raise ConfigError(
            f"cluster ({engine}): an engine has started this process as one of several, each of which would run the "
            "whole comparison; start it once, outside of the engine"
        )
    compare(arguments, args.overrides, source_of(args), signals)


if __name__ == "__main__":
    main()
