"""Demo of a federation on one machine: broker, coordinator and trainers,
then exported bundles and a daemon.

Everything runs as separate processes of the commands that a plant would type.
"""

import http.client
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from broker_config.broker.embedded import start_broker
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Spec
from edge.bundle import bundle_format
from edge.inference.batch import Image, classify_images
from edge.inference.pipeline import Inspection
from edge.inference.predictor import Predictor
from edge.inference.served_model import load_model
from trainer import progress
from trainer.data import class_folders, drawn_surfaces, partition
from trainer.data.class_folders import LabelledImages
from trainer.data.image_groups import group_entries
from trainer.data.partition import Share
from trainer.data.partitions import DEFAULT
from trainer.demo.demo_processes import Processes, clear_folder
from trainer.federation import run_summary
from trainer.federation.server.spec import Request, draft
from trainer.report import report_page
from trainer.training import personal_model
from trainer.training.evaluation import accuracy, predict_in_service

_PER_CLASS = 120  # drawn images
_REQUESTS = 60  # images sent to the daemon
_TIMEOUT = 10.0  # seconds for an answer


def run(
    request: Request,
    folder: Path | None,
    out: Path,
    report: progress.Report,
    *,
    nodes: int,
    classes_per_node: int,
    samples: int,
) -> run_summary.RunReport:
    """Run the demo and leave report.json, report.html, bundles and logs in `out`.

    Args:
        request: the federation.
        folder: class folders, or None to draw images.
        out: cleared first if it is of an earlier demo.
        report: receives the progress.
        nodes: number of trainer processes.
        classes_per_node: of the default partition.
        samples: training images per node.

    Raises:
        EdgeNodeError: what failed, with the log of the process that did.
    """
    clear_folder(out)
    if folder is None:
        report(
            progress.Step(
                what=f"drawing {_PER_CLASS} images of each of {len(drawn_surfaces.CLASSES)} classes"
            )
        )
        folder = out / "images"
        for plant in range(nodes):
            drawn_surfaces.write_plant(folder, -(-_PER_CLASS // nodes), 64, request.seed, plant)
    catalogue = class_folders.scan(folder)
    scheme = partition.Scheme(
        DEFAULT, nodes, samples, request.seed, {"classes_per_node": classes_per_node}
    )
    shares = scheme.shares(catalogue, groups=group_entries(catalogue.entries, {}))
    partition.write_shares(shares, out / "data")
    spec, _ = draft(
        request, federation="demo", classes=catalogue.classes, nodes=nodes
    )  # fails early if the request is invalid

    started = time.monotonic()
    with Processes(out / "logs") as processes:
        with start_broker(out / "broker") as broker:
            report(progress.Note(text=f"broker: {broker.kind} at {broker.url}"))
            report(progress.Step(what=f"starting a coordinator and {nodes} trainers"))
            federated = _federate(
                processes, broker.url, request, spec, shares, out, report, started
            )
        report(progress.Step(what=f"exporting {nodes} models to ONNX"))
        exporter = processes.start(
            "export",
            "export",
            *_models(shares, out),
            "--out",
            str(out / "bundles"),
            "--json",
            events=True,
        )
        for _, event in processes.read_events(exporter):
            if isinstance(event, progress.Step | progress.Exported):
                report(event)
        everyone = class_folders.load(
            class_folders.merge([share.test for share in shares]),
            spec.classes,
            spec.preprocessing.size,
        )
        rows = []
        for share in shares:
            row = _node(share, everyone, out, spec)
            first = federated.first.get(share.node)
            rows.append(msgspec.structs.replace(row, first=first))
        report(progress.Step(what=f"sending held-out images of {shares[0].node} to a daemon"))
        served = _serve(processes, shares[0], out)
    result = run_summary.RunReport.from_spec(
        spec,
        rows,
        weights=request.weights,
        data=str(folder),
        bytes_up=federated.finished.bytes_up,
        bytes_down=federated.finished.bytes_down,
        model_bytes=federated.contribution,
        serving=served,
        seconds=time.monotonic() - started,
    )
    (out / "report.json").write_bytes(result.encode())
    report_page.write(out, out / "report.html", report)
    return result


# The federation


class _Federated(NamedTuple):
    """What the demo has seen of the federation."""

    finished: progress.FederationFinished
    contribution: int  # bytes of the largest one
    first: dict[str, run_summary.FirstModel]  # by node


def _federate(
    processes: Processes,
    url: str,
    request: Request,
    spec: Spec,
    shares: Sequence[Share],
    out: Path,
    report: progress.Report,
    started: float,
) -> _Federated:
    """Run coordinator and trainers until every node has its model.

    Reports the coordinator's events, except for activities and broadcasts, which the nodes report
    more precisely.
    """
    classes = ",".join(spec.classes)
    coordinator = processes.start(
        "coordinator",
        "coordinate",
        url,
        "--json",
        "--federation",
        spec.federation,
        "--classes",
        classes,
        "--nodes",
        str(spec.nodes),
        "--state",
        str(out / "coordinator"),
        *_flags(request),
        events=True,
    )
    trainers = [
        processes.start(
            share.node,
            "join",
            url,
            "--name",
            share.node,
            "--data",
            str(out / "data" / share.node / "train"),
            "--test",
            str(out / "data" / share.node / "test"),
            "--state",
            str(out / share.node),
            "--telemetry",
            "--json",
            events=True,
        )
        for share in shares
    ]
    finished = None
    contribution = 0
    first: dict[str, run_summary.FirstModel] = {}
    for process, event in processes.read_events(coordinator, *trainers):
        from_node = process is not coordinator
        if from_node == isinstance(event, progress.Activity | progress.Received):
            report(event)
        if isinstance(event, progress.ModelReady):
            seconds = time.monotonic() - started
            first[event.node] = run_summary.FirstModel(
                seconds=seconds, accuracy=event.accuracy, low=event.low, high=event.high
            )
            if len(first) == len(shares):
                text = f"each plant has a model {seconds:.0f} s after the start; training goes on"
                report(progress.Note(text=text))
        if from_node:
            continue
        if isinstance(event, progress.Contribution):
            contribution = max(contribution, event.bytes)
        elif isinstance(event, progress.FederationFinished):
            finished = event
    if finished is None:
        raise EdgeNodeError("the federation did not finish", f"see the logs in {out / 'logs'}")
    return _Federated(finished, contribution, first)


def _flags(request: Request) -> list[str]:
    """The request as command line options of coordinate and simulate."""
    flags = ["--method", request.method, "--model", request.model]
    flags += ["--rounds", str(request.rounds)] if request.rounds else []
    flags += [
        "--seed",
        str(request.seed),
        "--threads",
        str(request.threads),
        "--size",
        str(request.size),
    ]
    flags += ["--weights", request.weights] if request.weights else []
    for flag, pairs in (("--option", request.options), ("--training", request.training)):
        for name, value in pairs.items():
            flags += [flag, f"{name}={value}"]
    return flags


# Bundles and the daemon


def _models(shares: Sequence[Share], out: Path) -> list[str]:
    return [str(out / share.node / "model") for share in shares]


def _node(share: Share, everyone: LabelledImages, out: Path, spec: Spec) -> run_summary.NodeReport:
    """A node's results: as it measured them, and its bundle in onnxruntime on the held-out
    images of all.
    """
    metadata = personal_model.load_metadata(out / share.node / "model")
    predictor = Predictor(bundle_format.read_bundle(out / "bundles" / share.node))
    probabilities = predictor.run_one_by_one(everyone.images).probabilities
    own = [spec.classes.index(name) for name in metadata.trained]
    mine = np.isin(everyone.digests, [entry.digest for entry in share.test.entries])
    others = ~np.isin(everyone.labels, own)
    right = probabilities.argmax(1) == everyone.labels
    logits = np.log(np.maximum(probabilities[mine], 1e-30))
    accuracy_others = float(right[others].mean()) if others.any() else None
    return msgspec.structs.replace(
        run_summary.NodeReport.from_metadata(metadata),
        accuracy_all=float(right.mean()),
        accuracy_others=accuracy_others,
        onnx_accuracy=accuracy(predict_in_service(logits, own), everyone.labels[mine]),
    )


def _serve(processes: Processes, share: Share, out: Path) -> run_summary.Serving:
    """Start the daemon on one bundle and send it held-out images over HTTP."""
    folder = out / "bundles" / share.node
    daemon = processes.start(
        "daemon", "serve", str(folder), "--port", "0", "--state", str(out / "line")
    )
    address = urlsplit(processes.wait_until_ready(daemon))
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT)
    entries = share.test.entries[:_REQUESTS]
    agreeing = 0
    right = 0
    times = []
    directly = classify_images(
        load_model(folder), [Image(entry.path.name, entry.path) for entry in entries]
    )
    for entry, found in zip(entries, directly, strict=True):
        started = time.perf_counter()
        connection.request("POST", "/classify", body=entry.path.read_bytes())
        answer = msgspec.json.decode(connection.getresponse().read())
        times.append(1000 * (time.perf_counter() - started))
        agreeing += isinstance(found, Inspection) and answer["label"] == found.verdict.label
        right += answer["label"] == entry.class_name
    connection.close()
    processes.stop(daemon)
    return run_summary.Serving(
        node=share.node,
        images=len(entries),
        agreeing=agreeing,
        accuracy=right / len(entries),
        milliseconds_p50=median(times),
    )
