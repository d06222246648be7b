"""Validation of a vertical federation's spec, before anybody waits for a head."""

from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from broker_config.protocol.errors import UsageError
from edge_node.cli.main import app
from edge_node.extensions.vfl.messages import Channel, Denoising, Window
from edge_node.extensions.vfl.server import spec
from tests.support.vfl_runs import vfl_spec


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"policy": "dedline"}, "there is no policy 'dedline'"),
        ({"sensors": ("press", "head")}, "a sensor cannot be named 'head'"),
        ({"reading": "expectation", "classes": ("0", "nan")}, "the classes are to be numbers"),
        ({"reading": "expectation", "classes": ("0", "1", "inf")}, "the classes are to be numbers"),
        ({"reading": "expectation", "classes": ("0", "1e35")}, "one of them is beyond 1e\\+12"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_begins(
    asked: dict[str, Any], complaint: str
) -> None:
    spec.validate(vfl_spec())
    with pytest.raises(UsageError, match=complaint):
        spec.validate(replace(vfl_spec(), **asked))


def test_settings_that_differ_are_called_as_on_the_command_line_with_both_values() -> None:
    old = vfl_spec(denoising=Denoising(rounds=40))
    new = replace(
        old,
        window=Window(start=20, chunk=9, size=500),
        labels="server",
        denoising=Denoising(shared=False),
        channel=Channel(levels=3),
        classes=("good", "bad"),
        iterations=5,
    )
    assert set(spec.describe_changes(old, new).split("), ")) == {
        "--classes (was good,bad,ugly, now good,bad",
        "--chunk (was 4, now 9",
        "--window (was 24, now 500",
        "--labels-stay (was not given, now given",
        "--denoise (was 40, now 0",
        "--denoiser (was shared, now each",
        "--noise (was 0, now 3",
        "--iterations (was 2, now 5)",
    }
    assert spec.describe_changes(old, old) == ""


@pytest.mark.parametrize("eta", ["0", "-1", "nan"])
def test_a_step_that_learns_nothing_is_refused(eta: str) -> None:
    words = [
        "mqtt://127.0.0.1:1",
        "--sensors",
        "a",
        "--labels",
        "labels.csv",
        "--classes",
        "a,b",
        "--eta",
        eta,
    ]
    found = CliRunner().invoke(app, ["vfl", "coordinate", *words])
    assert isinstance(found.exception, UsageError)
    assert "nothing is learnt" in found.exception.what


def test_a_deadline_is_a_finite_number_of_seconds() -> None:
    found = CliRunner().invoke(app, ["vfl", "serve", "bundle", "--deadline", "inf"])
    assert isinstance(found.exception, UsageError)
    assert "a deadline of inf seconds" in found.exception.what
