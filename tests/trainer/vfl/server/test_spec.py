"""Validation of a vertical federation's spec, before anybody waits for a head."""

from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from broker_config.protocol.errors import UsageError
from edge.cli.main import app
from tests.support.vfl_runs import vfl_spec
from trainer.vfl.server import spec


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"policy": "dedline"}, "there is no policy 'dedline'"),
        ({"sensors": ("press", "head")}, "a sensor cannot be named 'head'"),
        ({"reading": "expectation", "classes": ("0", "nan")}, "the classes are to be numbers"),
        ({"reading": "expectation", "classes": ("0", "1", "inf")}, "the classes are to be numbers"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_begins(asked: dict[str, Any], complaint: str) -> None:
    spec.validate(vfl_spec())
    with pytest.raises(UsageError, match=complaint):
        spec.validate(replace(vfl_spec(), **asked))


def test_a_deadline_is_a_finite_number_of_seconds() -> None:
    found = CliRunner().invoke(app, ["vfl", "serve", "bundle", "--deadline", "inf"])
    assert isinstance(found.exception, UsageError)
    assert "a deadline of inf seconds" in found.exception.what
