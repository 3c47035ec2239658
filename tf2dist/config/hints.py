"""Suggestions for an option that does not exist."""

import difflib
from collections.abc import Mapping


def for_unknown(word: str, known: list[str], others: Mapping[str, list[str]]) -> str:
    """The end of the message about the unknown option `word`: the best guess, or what exists instead.

    Args:
        known: the options that exist with the choices of this command line, and the groups.
        others: the options that would exist with other choices, each with these choices.
    """
    section, _, last = word.rpartition(".")
    names = {option: option.rpartition(".")[2] for option in known}
    # From the most certain guess to the vaguest: a wrong section is more likely than a wrong name.
    if same := [option for option in known if names[option] == last]:
        return f"; did you mean {same[0]}?"
    if chosen := [option for option in others if option == word or (not section and option.endswith(f".{last}"))]:
        return f"; {chosen[0]} is an option of {' and '.join(others[chosen[0]])}"
    inside = [option for option in known if section and option.startswith(f"{section}.")]
    if longer := [option for option in inside or known if names[option].startswith(f"{last}_")]:
        return f"; did you mean {longer[0]}?"
    close = difflib.get_close_matches(last, [names[option] for option in inside or known], n=1, cutoff=0.6)
    if close:
        return f"; did you mean {next(option for option in inside or known if names[option] == close[0])}?"
    return f"; it has {', '.join(names[option] for option in inside)}" if inside else "; see --help"
