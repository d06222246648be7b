"""Runs on an MLflow tracking server: an experiment for each federation,
a run for each of its runs.
"""

import os
import re
from collections.abc import Sequence

from broker_config.protocol.errors import UsageError
from trainer.progress.trackers import Point, Run

# MLflow reads these when it is imported. Nobody is told that it is used here, and a server that is
# away is our concern.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

_TAG = "edge-node.run"
_PARAMS = 100  # that the server takes at once
_LONGEST = 6000  # characters of a param's value


class MLflow:
    """Sends to a server. Who we are there comes from MLflow's own environment variables."""

    def __init__(self, url: str):
        """UsageError for what is no URL of a server."""
        if not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", url):
            raise UsageError(
                f"{url!r} is not the URL of an MLflow server",
                "write http://HOST:PORT or https://HOST; user and password come from "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            )
        self._client = MlflowClient(url)
        self._run = ""
        self.remedy = (
            f"start the MLflow server at {url}, or correct --track; a server that asks who we "
            "are takes MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN"
        )

    def begin(self, run: Run) -> None:
        """Found by its tag when it goes on, or when an earlier attempt came to nothing half-way."""
        client = self._client
        experiment = client.get_experiment_by_name(run.federation)
        number = (
            experiment.experiment_id if experiment else client.create_experiment(run.federation)
        )
        known = client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if known:
            self._run = known[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            self._run = client.create_run(number, tags={_TAG: run.id}, run_name=run.id).info.run_id
        params = [Param(name, str(value)[:_LONGEST]) for name, value in run.settings.items()]
        for start in range(0, len(params), _PARAMS):
            client.log_batch(self._run, params=params[start : start + _PARAMS])

    def record(self, points: Sequence[Point]) -> None:
        """Log metrics; a value that is sent again is the same value."""
        metrics = [
            Metric(each.name, each.value, int(1000 * each.time), each.round) for each in points
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, *, finished: bool) -> None:
        """A run that is suspended counts as killed until it goes on."""
        status = "FINISHED" if finished else "KILLED"
        self._client.set_terminated(self._run, status)
