"""What a run advises of before it begins."""

from typing import Any

import pytest

from tests.replica.test_epochs import BATCH, config_of, source_of


@pytest.mark.slow
def test_embedding_rows_that_are_looked_up_twice_cause_a_note(async_loop: Any, publishing: Any) -> None:
    for name, says in (("two outputs", "embedding"), ("recurrent", ""), ("regression", "")):
        source = source_of(name)
        publishing(source.load())
        advice = async_loop(config_of(BATCH), 1, 1, source=source).note
        assert says in advice and bool(says) == bool(advice), name  # noqa: PT018
