"""What the line tells Prometheus: names and types as its conventions ask, counts that are true."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from edge.bundle.bundle_format import Confidence, HeldOut
from edge.http.login import Accounts
from edge.http.prometheus_metrics import CountingConsumer, Metrics, Reading
from edge.inference.outcomes import Notice, Outcome
from edge.inference.pipeline import Frame, Inspection, Pipeline
from edge.inference.served_model import load_model
from tests.support.counted_calls import count_calls
from tests.support.daemon_process import Daemon, daemon, serving_daemon
from tests.support.paths import REPOSITORY
from tests.support.tiny_bundle import BLUE, RED, tiny_bundle
from tests.support.waiting import wait_until

UNITS = ("_seconds", "_bytes", "_info", "_total", "_ratio")
SERVICE = {
    (f"edge_node_service_{name}", "gauge")
    for name in (
        "accuracy_ratio",
        "accuracy_low_ratio",
        "accuracy_high_ratio",
        "labelled",
        "promise_missed",
    )
}
PLAIN = {  # counts of what is there now, which need no unit
    "edge_node_drifted",
    "edge_node_http_waiting",
    "edge_node_model_warning",
    "edge_node_labels_damaged",
    "edge_node_service_labelled",
    "edge_node_service_promise_missed",
    "process_open_fds",
    "process_max_fds",
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(
        tmp_path_factory.mktemp("metrics") / "bundle", node="press-3", round_=30
    ).folder


@pytest.fixture(scope="module")
def line(bundle: Path) -> Iterator[Daemon]:
    with daemon(bundle) as running:
        running.classify(RED)
        running.classify(BLUE)
        running.classify(b"no image")
        running.client.get("/nowhere")
        running.client.get("/v2/models/other")
        yield running


@pytest.fixture(scope="module")
def families(line: Daemon) -> dict[str, Metric]:
    answer = line.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return parse(answer.text)


def parse(exposition: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(exposition)}


def value(families: dict[str, Metric], name: str, sample: str = "", **labels: str) -> float:
    [found] = [
        each.value
        for each in families[name].samples
        if each.name == name + sample and labels.items() <= each.labels.items()
    ]
    return found


def test_names_end_in_base_units_and_everything_is_explained(families: dict[str, Metric]) -> None:
    for name, family in families.items():
        assert name.startswith(("edge_node_", "process_")), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert family.documentation, name
        written = f"{name}_total" if family.type == "counter" else name
        assert written in PLAIN or written.endswith(UNITS), name
        assert ("_total" in written) == (family.type == "counter"), name


def test_every_metric_stands_in_the_documentation(families: dict[str, Metric]) -> None:
    assert served(families) <= documented(), served(families) - documented()


def served(families: dict[str, Metric]) -> set[tuple[str, str]]:
    """Names and types of what a line serves."""
    return {
        (f"{name}_total" if family.type == "counter" else name, family.type)
        for name, family in families.items()
        if name.startswith("edge_node_")
    }


def documented() -> set[tuple[str, str]]:
    """The same of what the documentation lists."""
    page = (REPOSITORY / "docs" / "line.md").read_text()
    rows = re.findall(r"^\| `(edge_node_\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    return set(rows)


def test_the_accuracy_in_service_stands_beside_the_promise_once_people_have_labelled(
    tmp_path: Path,
) -> None:
    truths = np.arange(90) % 3
    promise = Confidence(
        images=90, held_out=HeldOut.of(truths, np.eye(3)[truths] * 0.7 + 0.1, truths >= 0)
    )
    bundle = tiny_bundle(tmp_path / "bundle", confidence=promise).folder
    (tmp_path / "line.toml").write_text(
        '[keep]\npath = "kept"\nsample = 1.0\n[labels]\npath = "images"\n'
    )
    Accounts(tmp_path / "state").set("anna", "correct horse")
    with serving_daemon(tmp_path / "state", bundle, "--config", tmp_path / "line.toml") as line:
        kept = [line.classify(RED).json()["kept"] for _ in range(4)]
        wait_until(lambda: line.client.get("/labels/queue?count=1").json()["waiting"] == 4)
        assert served(parse(line.client.get("/metrics").text)) & SERVICE == set()
        line.client.post("/login", json={"name": "anna", "password": "correct horse"})
        for label, name in zip(("red", "blue", "blue", "blue"), sorted(kept), strict=True):
            line.client.post("/labels/label", json={"images": [name], "label": label})
        wait_until(lambda: "edge_node_service_labelled 4.0\n" in line.client.get("/metrics").text)
        families = parse(line.client.get("/metrics").text)
    low, share, high = (
        value(families, f"edge_node_service_accuracy{which}_ratio")
        for which in ("_low", "", "_high")
    )
    # Wilson's
    assert (low, share, high) == (
        pytest.approx(0.0456, abs=1e-4),
        0.25,
        pytest.approx(0.6994, abs=1e-4),
    )
    assert value(families, "edge_node_model_accuracy_ratio") == 1
    assert value(families, "edge_node_service_promise_missed") == 1
    assert served(families) & documented() >= SERVICE
    test_names_end_in_base_units_and_everything_is_explained(families)


def test_outcomes_are_counted_by_what_they_are(families: dict[str, Metric]) -> None:
    for label in ("red", "blue"):
        flags = {"defect": "true", "doubted": "true", "source": "http"}  # of one colour: blank
        assert value(families, "edge_node_verdicts", "_total", label=label, **flags) == 1
    assert value(families, "edge_node_failures", "_total", source="http") == 1


def test_latencies_are_histograms_of_every_image(families: dict[str, Metric]) -> None:
    for what in ("decoding", "inference", "judging"):
        name = f"edge_node_{what}_seconds"
        assert value(families, name, "_count") == 2
        assert 0 < value(families, name, "_sum") < 1
    parts = [
        value(families, f"edge_node_{what}_seconds", "_sum")
        for what in ("decoding", "inference", "judging")
    ]
    assert parts[0] + parts[1] < parts[2]


def test_requests_are_counted_by_route_and_status_never_by_what_clients_write(
    families: dict[str, Metric],
) -> None:
    requests = "edge_node_http_requests"
    assert value(families, requests, "_total", path="/classify", code="200") == 2
    assert value(families, requests, "_total", path="/classify", code="400") == 1
    assert value(families, requests, "_total", path="other", code="404") == 1
    assert value(families, requests, "_total", path="/v2/models/{name}", code="404") == 1


def test_the_model_and_the_process_are_told(line: Daemon, families: dict[str, Metric]) -> None:
    digest = line.client.get("/").json()["digest"]
    assert value(families, "edge_node_model_info", node="press-3", round="30", digest=digest) == 1
    assert 20e6 < value(families, "process_resident_memory_bytes") < 200e6
    assert value(families, "process_cpu_seconds", "_total") > 0


def test_other_parts_add_readings_of_their_own() -> None:
    metrics, waiting = Metrics(), [1, 2, 3]
    metrics.register(
        lambda: [
            Reading(
                GaugeMetricFamily,
                "spool_items",
                "Outcomes that wait",
                len(waiting),
                {"sink": "mqtt"},
            ),
            Reading(GaugeMetricFamily, "spool_items", "Outcomes that wait", 0, {"sink": "jsonl"}),
            Reading(
                CounterMetricFamily, "dropped", "Outcomes that were dropped", 7, {"sink": "jsonl"}
            ),
        ]
    )
    waiting.append(4)
    families = {family.name: family for family in metrics.collect()}
    assert value(families, "edge_node_spool_items", sink="mqtt") == 4
    assert value(families, "edge_node_dropped", "_total", sink="jsonl") == 7
    assert len(families) == 2


class Kept:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_counting_changes_no_outcome_and_costs_no_more_than_some_single_counts(
    bundle: Path,
) -> None:
    metrics, kept = Metrics(), Kept()
    counted = CountingConsumer(metrics, kept)
    line = Pipeline(load_model(bundle), counted, monitors=[metrics.observe])
    seen = line.inspect_sync(Frame("part", RED))
    assert isinstance(seen, Inspection)
    verdict = seen.verdict
    notice = Notice(kind="drift", text="", time="")
    counted.put(notice)
    assert kept.outcomes == [verdict, notice]
    single = count_calls(lambda: metrics._judging.observe(0.01))
    assert (
        count_calls(lambda: metrics.observe(seen)) + count_calls(lambda: metrics.count(verdict))
        < 12 * single
    )
    line.close()
