"""Shell completion in bash, by Hydra's own implementation, for the command ``tf2dist``.

Hydra's bash function expands the completions, so that a value or a file named ``$(command)`` would be executed. Only
completions that bash takes literally are offered.
"""

import contextlib
import io
import re
from typing import Any

from hydra._internal.core_plugins.bash_completion import BashCompletion

from tf2dist.config.arguments import ACTIONS, SHORT, VALUES, parse
from tf2dist.config.choices import HIDDEN, PLUGIN_GROUPS
from tf2dist.config.compose import UNREADABLE
from tf2dist.config.paths import is_folder
from tf2dist.config.source import Source, opened
from tf2dist.errors import ConfigError, RequestError

LITERAL = re.compile(r"[\w.,:=/+@%-]+")
# What Hydra would complete and `compose` refuses: settings of Hydra itself, and names that are set by a choice.
REFUSED = re.compile(
    rf"hydra\b|({'|'.join(PLUGIN_GROUPS)})\.name=|({'|'.join(PLUGIN_GROUPS)})={HIDDEN}$|cluster\.kind="
)


class Completion(BashCompletion):
    """Hydra's completion, for our command and without what is refused or unsafe."""

    @staticmethod
    def _get_exec() -> str:
        # Hydra would take the script that runs, which is not a command of its own here.
        return "tf2dist"

    def offered(self, source: Source, words: str) -> list[str]:
        """The completions of the last word of a command line."""
        return self._query(source.name, words)

    def _query(self, config_name: str | None, line: str) -> list[str]:
        found: list[str] = super()._query(config_name, line)
        return [text for text in found if LITERAL.fullmatch(text) and not REFUSED.match(text)]


def answer(request: list[str], line: str) -> str:
    """The output of ``--shell-completion``.

    Args:
        request: the words after it: install=bash or uninstall=bash, for the user to evaluate, or query=bash.
        line: for a query, the command line so far.

    Raises:
        ConfigError: it is none of these.
    """
    if request == ["query=bash"]:
        return " ".join(_offered(line.split(" ")[1:])) + "\n"
    if request not in (["install=bash"], ["uninstall=bash"]):
        raise ConfigError(
            f'--shell-completion ({" ".join(request)}): must be install=bash or uninstall=bash; write eval "$(tf2dist '
            '--shell-completion install=bash)"'
        )
    completion = Completion(_loader_of(Source()))
    # Hydra prints instead of returning a text.
    with contextlib.redirect_stdout(io.StringIO()) as text:
        completion.install() if request == ["install=bash"] else completion.uninstall()
    return text.getvalue()


def _loader_of(source: Source) -> Any:
    with opened(source) as hydra:
        return hydra.config_loader


def _offered(words: list[str]) -> list[str]:
    """The completions of the last word, which may be empty; none if the words before it cannot be parsed."""
    before, word = [each for each in words[:-1] if each], words[-1] if words else ""
    if word.startswith("-"):
        return sorted(flag for flag in (*ACTIONS, *VALUES, *SHORT, "--resolve") if flag.startswith(word))
    try:
        arguments = parse(before)
        source = arguments.source
        if source.folder and not is_folder(source.folder):
            return []
        with opened(source) as hydra:
            return Completion(hydra.config_loader).offered(source, " ".join([*arguments.overrides, word]))
    except (RequestError, *UNREADABLE):  # a line that is being typed; a message would end up in the prompt
        return []
