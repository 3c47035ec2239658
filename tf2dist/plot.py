"""``python -m tf2dist.plot RUN_DIR``

Draws RUN_DIR/training.png: loss and metrics against steps and time, and the staleness of an asynchronous run. A run
draws it at its end; with this it can be drawn while the run goes on, and after figure=false.

Exit code 0 done, 2 the request is wrong, or there is nothing to draw yet.
"""

from typing import NoReturn

from tf2dist.errors import ConfigError, InstallationError, first_line
from tf2dist.launch.console import show_lines
from tf2dist.tools.finished import shell


def main() -> NoReturn:
    """Draws what the command line asks for, and exits."""
    shell.main(run, __doc__)


def run(arguments: list[str]) -> None:
    """Draws, and prints the path of the picture.

    Raises:
        RequestError: the request is wrong, or there is nothing to draw.
        InstallationError: matplotlib cannot be imported.
    """
    run_dir = shell.read_command_line(arguments, (), max_operands=0).run_dir
    try:
        from tf2dist.tools.plotting import draw_run

        path = draw_run(run_dir)
    except ImportError as error:
        reason = first_line(str(error))
        raise InstallationError(f"matplotlib: cannot be imported ({reason}); install it again") from None
    except FileNotFoundError:
        raise ConfigError(f"RUN_DIR ({run_dir}): has no metrics.jsonl; name the directory of a run") from None
    except OSError as error:
        raise ConfigError(f"RUN_DIR ({run_dir}): training.png cannot be drawn ({error.strerror})") from None
    if path is None:
        raise ConfigError(f"RUN_DIR ({run_dir}): metrics.jsonl has no numbers; wait for the first steps")
    show_lines(str(path))


if __name__ == "__main__":
    main()
