"""What a line is asked to do, checked before anybody waits for it."""

from typing import Any

import pytest

from broker_config.errors import UsageError
from tests.lines import line_spec
from trainer.vertical.live import terms


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"policy": "dedline"}, "there is no policy 'dedline'"),
        ({"sensors": ("press", "head")}, "a sensor cannot be named 'head'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_begins(asked: dict[str, Any], complaint: str) -> None:
    terms.check(line_spec())
    with pytest.raises(UsageError, match=complaint):
        terms.check(line_spec(**asked))
