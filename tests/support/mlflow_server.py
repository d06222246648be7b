"""A real MLflow server: its own web application over a SQLite file,
without the pages that people look at.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.ports import HOST
from tests.support.waiting import wait_until


class MLflowServer:
    """What its REST API says."""

    def __init__(self, port: int):
        self.url = f"http://{HOST}:{port}"

    def is_there(self) -> bool:
        try:
            # its first answer takes as long as making the database
            self.ask("experiments/search", {"max_results": 1})
        except httpx.HTTPError:
            return False
        return True

    def ask(self, what: str, question: dict[str, Any] | None = None) -> Any:
        url = f"{self.url}/api/2.0/mlflow/{what}"
        answer = (
            httpx.post(url, json=question, timeout=30) if question else httpx.get(url, timeout=30)
        )
        return answer.raise_for_status().json()

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        """The runs of an experiment; none if there is no such experiment."""
        found = self.ask(
            "experiments/search", {"max_results": 10, "filter": f"name = '{experiment}'"}
        )
        numbers = [each["experiment_id"] for each in found.get("experiments", [])]
        return (
            list(self.ask("runs/search", {"experiment_ids": numbers}).get("runs", []))
            if numbers
            else []
        )

    def history(self, run: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) of each that was logged."""
        answer = self.ask(f"metrics/get-history?run_id={run}&metric_key={metric}")
        return [(each["step"], each["value"]) for each in answer["metrics"]]


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[MLflowServer]:
    """A server in a process of its own; it is killed at the end. Its database is in `folder`."""
    environment = {
        **os.environ,
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    server = MLflowServer(port)
    with (folder / "mlflow.log").open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flask",
                "--app",
                "mlflow.server:app",
                "run",
                "--host",
                HOST,
                "--port",
                str(port),
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(server.is_there)
        yield server
    finally:
        process.kill()
        process.wait()
