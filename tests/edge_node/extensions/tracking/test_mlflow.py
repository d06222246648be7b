"""A real MLflow server has what a federation told it, and may be killed meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mlflow_server import MLflowServer, mlflow_server
from tests.support.ports import free_port
from tests.support.tracked_run import BEGIN, END, RUN, SETTINGS, round_events
from tests.support.waiting import wait_until
from trainer.progress import AnyEvent, Note, ignore
from trainer.progress.trackers import Limits, track, tracking

pytestmark = pytest.mark.slow  # the server takes ten seconds to start


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[MLflowServer]:
    with mlflow_server(tmp_path, port) as found:
        yield found


def test_metrics_and_settings_are_there_also_of_a_run_that_was_suspended(
    server: MLflowServer,
) -> None:
    with track({"mlflow": server.url}, ignore) as report:
        for event in [*BEGIN, *round_events(1, 0.5)]:
            report(event)
    [run] = server.runs("steel")
    assert run["info"]["status"] == "KILLED"
    with track({"mlflow": server.url}, ignore) as report:
        for event in [*BEGIN, *round_events(2, 0.75), *END]:
            report(event)
    [again] = server.runs("steel")
    number = again["info"]["run_id"]
    assert number == run["info"]["run_id"]
    assert (again["info"]["status"], again["info"]["run_name"]) == ("FINISHED", RUN)
    assert {each["key"]: each["value"] for each in again["data"]["params"]} == {
        k: str(v) for k, v in SETTINGS.items()
    }
    assert server.history(number, "accuracy/plant-1") == [(1, 0.5), (2, 0.75)]
    assert server.history(number, "round/bytes_up") == [(1, 1.8e7), (2, 1.8e7)]


def test_a_server_that_is_killed_is_told_once_and_the_values_wait_for_it(
    tmp_path: Path, port: int
) -> None:
    # Takes seconds, also where no test runs
    from edge_node.extensions.tracking.mlflow import MLflow  # noqa: PLC0415

    mlflow, seen = MLflow(f"http://127.0.0.1:{port}"), list[AnyEvent]()

    def told() -> list[str]:
        return [each.text for each in seen if isinstance(each, Note)]

    with tracking("mlflow", mlflow, seen.append, Limits(retry=0.2)) as report:
        with mlflow_server(tmp_path, port) as server:
            for event in [*BEGIN, *round_events(1, 0.5)]:
                report(event)
            wait_until(
                lambda: server.runs("steel") and server.runs("steel")[0]["data"].get("metrics")
            )
        for event in round_events(2, 0.75):
            report(event)
        wait_until(lambda: report(Note(text="")) or any(told()))
        with mlflow_server(tmp_path, port) as server:
            for event in [*round_events(3, 1.0), *END]:
                report(event)
            wait_until(
                lambda: (
                    len(server.history(server.runs("steel")[0]["info"]["run_id"], "round/seconds"))
                    == 3
                )
            )
    [note] = filter(None, told())
    assert note.startswith("mlflow records nothing now: ")
    assert f"start the MLflow server at http://127.0.0.1:{port}" in note


def test_a_server_that_was_never_there_is_given_up_at_the_end_of_a_federation(port: int) -> None:
    seen: list[AnyEvent] = []
    with track({"mlflow": f"http://127.0.0.1:{port}"}, seen.append) as report:
        for event in [*BEGIN, *round_events(1, 0.5), *END]:
            report(event)
    notes = [each.text for each in seen if isinstance(each, Note)]
    assert len(notes) == 2
    assert "refused" in notes[0]
    assert notes[1] == "mlflow lacks 13 values of this run"
