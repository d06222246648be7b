"""Bundles of a vertical federation's models: what their graphs compute, and who may serve them."""

import itertools
import json
import shutil
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker_config.broker.embedded import start_broker
from broker_config.security.trust import Trust
from edge.bundle import bundle_format
from edge.bundle.bundle_format import BundleError
from edge.bundle.verification import Verifier
from edge_node.extensions.vfl.algorithm import Head
from edge_node.extensions.vfl.imputer import Imputer
from edge_node.extensions.vfl.line.party_bundle import MANIFEST, read_bundle
from edge_node.extensions.vfl.line.party_model import load_head, load_sensor
from edge_node.extensions.vfl.line.sensor_rows import Scaling
from edge_node.extensions.vfl.messages import Denoising, Recipe, VflSpec
from edge_node.extensions.vfl.networks import build_feature_model, embedding_size
from edge_node.extensions.vfl.party_export import (
    ExportSchedule,
    HeadBundleWriter,
    SensorBundleWriter,
)
from edge_node.extensions.vfl.party_graph import (
    VflParityError,
    build_head_graph,
    build_sensor_graph,
    impute_means,
)
from export.parity import open_session
from tests.support.provisioned_federation import make
from tests.support.tiny_bundle import tiny_bundle
from tests.support.vfl_models import COLUMNS, TrainedRun, rows
from tests.support.vfl_runs import Threads, draw, left, source, vfl_spec


@pytest.fixture(scope="module")
def learnt() -> TrainedRun:
    return TrainedRun(seed=3, noise=True, reading="expectation")


@pytest.fixture(scope="module")
def bundles(learnt: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return learnt.write(tmp_path_factory.mktemp("bundles"))


def embedded(bundles: dict[str, Path], raw: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [load_sensor(bundles[name]).embed(raw[name][..., None]) for name in COLUMNS]


def test_bundles_predict_from_raw_rows_what_the_trained_federation_predicts(
    learnt: TrainedRun, bundles: dict[str, Path]
) -> None:
    raw, _ = rows(40, seed=9)
    found = load_head(bundles["coordinator"]).predict(
        embedded(bundles, raw), np.ones((40, 3), bool)
    )
    expected = learnt.predicted(raw)
    assert np.abs(found.probabilities - expected).max() < 1e-5
    assert found.expectation is not None
    assert np.abs(found.expectation - expected @ np.arange(4)).max() < 1e-4


@pytest.mark.parametrize("pattern", list(product([True, False], repeat=3)))
def test_absent_sensors_are_imputed_from_those_that_are_there(
    learnt: TrainedRun, bundles: dict[str, Path], pattern: tuple[bool, ...]
) -> None:
    raw, _ = rows(10, seed=8)
    received = embedded(bundles, raw)
    lacking = [
        each if there else np.full_like(each, 7.0)
        for each, there in zip(received, pattern, strict=True)
    ]
    found = load_head(bundles["coordinator"]).predict(lacking, np.tile(pattern, (10, 1)))
    imputer = Imputer([each.shape[1] for each in received])
    imputer.update(learnt.embedded())
    denoised = learnt.simulation.head.denoiser([torch.from_numpy(each) for each in received])
    filled = imputer.impute(
        [each if there else None for each, there in zip(denoised, pattern, strict=True)], 10
    )
    expected = torch.softmax(learnt.simulation.head.logits(filled), 1).numpy()
    assert np.abs(found.probabilities - expected).max() < 1e-5


def test_a_partial_prediction_is_nearer_to_the_whole_one_than_a_blind_one(
    bundles: dict[str, Path],
) -> None:
    raw, _ = rows(300, seed=7)
    head, received = load_head(bundles["coordinator"]), embedded(bundles, raw)

    def of(*present: bool) -> np.ndarray:
        return head.predict(received, np.tile(present, (300, 1))).probabilities

    whole = of(True, True, True)
    assert (
        np.abs(of(True, True, False) - whole).mean()
        < 0.5 * np.abs(of(False, False, False) - whole).mean()
    )


def test_rows_of_one_batch_may_lack_different_sensors(bundles: dict[str, Path]) -> None:
    raw, _ = rows(8, seed=6)
    head, received = load_head(bundles["coordinator"]), embedded(bundles, raw)
    patterns = np.array(list(product([True, False], repeat=3)))
    together = head.predict(received, patterns).probabilities
    for row in range(8):
        alone = head.predict(
            [each[row : row + 1] for each in received], patterns[row : row + 1]
        ).probabilities
        assert np.abs(alone - together[row]).max() < 1e-6


@pytest.mark.parametrize(
    ("network", "shape", "clip"),
    [("conv", (14, 15), 0.0), ("dense", (5, 3), 0.7), ("vgg_small", (3, 16, 16), 0.0)],
)
def test_every_network_has_a_graph(network: str, shape: tuple[int, ...], clip: float) -> None:
    model, size = (
        build_feature_model(network, shape, 4, "press", clip),
        embedding_size(network, shape),
    )
    random = np.random.default_rng(2)
    scaling = Scaling(
        random.normal(100, 50, shape[0]).astype(np.float32), np.full(shape[0], 9, np.float32)
    )
    golden = build_sensor_graph(model, shape, size, scaling).golden
    assert golden["embedding"].shape == (5, size)
    assert not clip or np.linalg.norm(golden["embedding"], axis=1).max() == pytest.approx(
        clip, rel=1e-4
    )


@pytest.mark.parametrize("settings", [[1], [4, 2], [14, 15]])
def test_a_graph_scales_by_the_condition_of_each_row_of_a_sample(settings: list[int]) -> None:
    shape, random = (14, 15), np.random.default_rng(3)
    model, size = build_feature_model("conv", shape, 4, "press", 0.0), embedding_size("conv", shape)
    mean, deviation = random.normal(100, 50, (6, 14)), random.uniform(1, 9, (6, 14))
    conditions = random.integers(0, 50, (6, len(settings)))
    scaling = Scaling(
        *(np.float32(each) for each in (mean, deviation, conditions)), np.array(settings)
    )
    content, golden = build_sensor_graph(model, shape, size, scaling)
    raw = golden["samples"]
    assert raw.shape == (len(raw), max(14, 1 + max(settings)), 15)
    # [N, C, cycles]
    distance = ((raw[:, None, settings] - conditions[None, :, :, None]) ** 2).sum(2)
    which = distance.argmin(1)
    assert len(set(which[0])) > 1, "conditions change within a sample"
    scaled = (raw[:, :14] - mean[which].transpose(0, 2, 1)) / deviation[which].transpose(0, 2, 1)
    with torch.no_grad():
        expected = model(torch.from_numpy(scaled.astype(np.float32))).numpy()
    [found] = open_session(content).run(None, {"samples": raw})
    assert np.abs(found - expected).max() < 1e-4


def test_of_many_sensors_absent_ones_are_filled_by_their_means() -> None:
    sizes, random = [10] * 9, np.random.default_rng(4)
    head = Head(sizes, 131, Denoising(rounds=1), Recipe(), 0)
    means = torch.from_numpy(random.normal(0, 1, sum(sizes)).astype(np.float32))
    built = build_head_graph(
        head, sizes, lambda _: (torch.ones(sum(sizes), sum(sizes)), means), None
    )
    received = [random.normal(0, 1, (5, size)).astype(np.float32) for size in sizes]
    given = {f"embedding_{index}": each for index, each in enumerate(received)}
    given |= {"present": np.tile([True, False, True] * 3, (5, 1))}
    [probabilities] = open_session(built.content).run(None, given)
    filled = head.denoiser([torch.from_numpy(each) for each in received])
    for absent in (1, 4, 7):
        filled[absent] = torch.split(means, sizes)[absent].expand(5, -1)
    assert (
        np.abs(probabilities - torch.softmax(head.logits(filled), 1).detach().numpy()).max() < 1e-5
    )


def test_what_has_diverged_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = TrainedRun(1)
    embeddings = broken.embedded()
    with torch.no_grad():
        broken.simulation.head.model.weight.fill_(torch.inf)
    HeadBundleWriter(tmp_path / "head")(
        broken.spec, 1, broken.simulation.head, embeddings, last=True
    )
    assert "no bundle of round 1" in caplog.text
    assert not (tmp_path / "head").exists()


def test_a_layer_without_a_counterpart_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 3), torch.nn.GELU())
    with pytest.raises(VflParityError, match="GELU"):
        build_sensor_graph(
            model, (2, 1), 3, Scaling(np.zeros(2, np.float32), np.ones(2, np.float32))
        )


def test_a_changed_file_and_the_wrong_member_are_refused(
    learnt: TrainedRun, tmp_path: Path
) -> None:
    found = learnt.write(tmp_path)
    with pytest.raises(BundleError, match=r"head.*sensor"):
        load_sensor(found["coordinator"])
    graph = found["oven"] / "sensor.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"Relu", b"Tanh"))
    with pytest.raises(BundleError, match="hash"):
        load_sensor(found["oven"])


def test_only_what_the_member_itself_has_signed_is_served(
    learnt: TrainedRun, tmp_path: Path
) -> None:
    members = make(tmp_path / "federation", nodes=tuple(COLUMNS))
    found = learnt.write(tmp_path, members.kits)

    def verifier(name: str) -> Verifier:
        kit = members.kits[name]
        trust = Trust(
            federation=kit.federation, node=name, authority=kit.authority, charter=kit.charter
        )
        return Verifier(trust, tmp_path / "memory")

    for name in COLUMNS:
        assert load_sensor(found[name], verifier(name)).manifest.node == name
    first = load_head(found["coordinator"], verifier("coordinator")).manifest
    with pytest.raises(BundleError, match="press"):
        read_bundle(found["press"], verifier("oven"))
    older = shutil.copytree(found["coordinator"], tmp_path / "older")
    learnt.write(tmp_path, members.kits, round_=99)
    newer = load_head(found["coordinator"], verifier("coordinator")).manifest
    assert newer.version > first.version
    with pytest.raises(BundleError, match="is older"):
        read_bundle(older, verifier("coordinator"))
    manifest = json.loads((found["press"] / MANIFEST).read_text())
    (found["press"] / MANIFEST).write_text(json.dumps(manifest | {"round": 1000}))
    with pytest.raises(BundleError, match=r"not signed.*press"):
        read_bundle(found["press"], verifier("press"))
    unsigned = learnt.write(tmp_path / "unsigned")
    with pytest.raises(BundleError, match=r"not signed.*charter"):
        read_bundle(unsigned["oven"], verifier("oven"))
    assert newer.expires is not None
    assert newer.expires > datetime.now(UTC)


def test_each_kind_of_service_refuses_the_other_kind_of_bundle(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="of a head"):
        bundle_format.read_bundle(bundles["coordinator"])
    tiny_bundle(tmp_path / "images")
    with pytest.raises(BundleError, match="sensor or head"):
        load_head(tmp_path / "images")


def test_an_agent_that_decides_local_iterations_travels_with_the_head(tmp_path: Path) -> None:
    (tmp_path / "agent.onnx").write_bytes(b"an agent")
    found = TrainedRun(1, policy=str(tmp_path / "agent.onnx")).write(tmp_path / "bundles")[
        "coordinator"
    ]
    manifest = load_head(found).manifest
    assert [*manifest.roles] == ["head", "policy"]
    assert (found / manifest.roles["policy"].file).read_bytes() == b"an agent"


def bundle_writers(spec: VflSpec, folder: Path, data: Path, seconds: float) -> dict[str, Any]:
    """Of each party, whose bundle it writes into a folder of that name."""
    sensors = {
        name: SensorBundleWriter(folder / name, source(data, name), seconds=seconds)
        for name in spec.sensors
    }
    return {"head": HeadBundleWriter(folder / "head", seconds=seconds), **sensors}


def test_a_federation_that_trains_leaves_its_last_models(tmp_path: Path) -> None:
    spec, rounds, bundles = vfl_spec(), 7, tmp_path / "bundles"  # no multiple of its commits
    draw(tmp_path / "data", 60, seed=2)
    writers = bundle_writers(spec, bundles, tmp_path / "data", 30.0)
    with (
        start_broker(tmp_path / "broker", kind="mosquitto") as broker,
        Threads(spec, broker.url, tmp_path / "data", tmp_path, rounds, deploys=writers) as parties,
    ):
        parties.start("head", *spec.sensors)
        parties.end()
    head, states = load_head(bundles / "head").manifest, left(spec, tmp_path, rounds)
    assert (head.run, head.round) == (spec.run, rounds)
    for name in spec.sensors:
        assert load_sensor(bundles / name).manifest.round == rounds
        graph = (bundles / name / "sensor.onnx").read_bytes()
        assert all(values in graph for values in states[name].values())


@pytest.mark.parametrize("last", ["labels", "press"])
def test_a_federation_whose_rounds_pause_leaves_the_model_of_its_newest_round(
    last: str, tmp_path: Path
) -> None:
    """Whichever file has the fewest rows."""
    spec = vfl_spec()
    draw(tmp_path / "data", 60, seed=4)
    rows = (tmp_path / "data" / f"{last}.csv").read_text().splitlines(keepends=True)
    newest = 7
    (tmp_path / "data" / f"{last}.csv").write_text("".join(rows[: 1 + spec.window.span(newest)[1]]))
    writers = bundle_writers(spec, tmp_path / "bundles", tmp_path / "data", 0.1)
    with (
        start_broker(tmp_path / "broker", kind="mosquitto") as broker,
        Threads(spec, broker.url, tmp_path / "data", tmp_path, 1000, deploys=writers) as parties,
    ):
        parties.start("head", *spec.sensors)
        parties.until(
            lambda: all(_written(tmp_path / "bundles" / name) == newest for name in writers)
        )
        assert not parties.has_ended("head")


def test_who_is_stopped_leaves_the_model_of_its_newest_round_but_none_older_than_its_bundle(
    tmp_path: Path,
) -> None:
    """At its next start a sensor is at its last checkpoint,
    and learns nothing while the other one is away.
    """
    spec, data = vfl_spec(commit=50, patience=0.2), tmp_path / "data"
    draw(data, 4000, seed=4)
    bundles = tmp_path / "bundles"
    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        writers = bundle_writers(spec, bundles, data, 1000.0)
        with Threads(spec, broker.url, data, tmp_path, 1000, deploys=writers) as parties:
            parties.start("head", *spec.sensors)
            parties.reach(50)
            parties.stop("press")
            assert _written(bundles / "press") >= 50
            parties.stop("oven")
            parties.stop("head")
        assert abs(_written(bundles / "head") - _written(bundles / "press")) <= 1
        left = _written(bundles / "press")
        with Threads(
            spec, broker.url, data, tmp_path, 1000, deploys=bundle_writers(spec, bundles, data, 0.0)
        ) as parties:
            parties.start("head", "press")
            parties.until(lambda: "waits for oven" in parties.said("head"))
            parties.stop("press")
        assert _written(bundles / "press") == left


def _written(bundle: Path) -> int:
    """The round of a bundle; 0 if there is none."""
    path = bundle / MANIFEST
    return int(json.loads(path.read_text())["round"]) if path.exists() else 0


def clocked(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], ExportSchedule]:
    """A schedule of half minutes, and the clock that it looks at."""
    clock = [0.0]
    monkeypatch.setattr("edge_node.extensions.vfl.party_export.time.monotonic", lambda: clock[0])
    return clock, ExportSchedule(seconds=30.0)


def asked(
    clock: list[float], pace: ExportSchedule, rounds: int, seconds: float, late: float
) -> list[tuple[int, float]]:
    """The rounds of which a member writes bundles, and when; it is asked after each,
    and five times a second.
    """
    written = []
    for round_ in range(1, rounds):
        clock[0] = round_ * seconds + late
        while clock[0] < (round_ + 1) * seconds + late:
            if pace.due(round_):
                written.append((round_, clock[0]))
            clock[0] += 0.2
    return written


@pytest.mark.parametrize("seconds", [0.01, 0.7, 2.5, 5.0, 12.0, 40.0])
def test_members_write_bundles_of_the_same_rounds_about_every_half_minute(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a round lasts, and though one hears of it later, and has begun earlier."""
    rounds, found = int(max(1000, 7200 / seconds) if seconds < 1 else 7200 / seconds), []
    for late in (0.0, 0.15):
        clock, pace = clocked(monkeypatch)
        clock[0] = -100.0 * late
        found.append(asked(clock, pace, rounds, seconds, late))
    one, other = ({round_ for round_, _ in written} for written in found)
    assert len(one & other) > 0.8 * len(one | other)
    times = [at for _, at in found[0]]
    assert times[0] <= 65
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) <= max(65, 1.01 * seconds)
    assert min(gaps) >= 29


def test_members_of_unequal_speed_write_bundles_of_the_same_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (
        {round_ for round_, _ in asked(*clocked(monkeypatch), 100_000, seconds, 0.0)}
        for seconds in (0.01, 0.015)
    )
    assert len(one & other) > 0.4 * len(other)


def test_what_is_young_or_has_learnt_nothing_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pace = clocked(monkeypatch)
    assert not pace.due(0, last=True)
    clock[0] = 1.0
    assert not pace.due(3)
    clock[0] += 2.9
    assert not pace.due(3), "the next round may be on its way"
    clock[0] += 0.2
    assert pace.due(3), "serving need not wait"
    clock[0] += 1.0
    assert not pace.due(4)
    clock[0] += 20
    assert not pace.due(4), "the last one is of half a minute ago"
    assert pace.due(4, last=True)
    assert not pace.due(4, last=True)


@pytest.mark.parametrize(
    ("sensors", "size", "exact"), [(8, 10, True), (8, 28, False), (9, 10, False)]
)
def test_a_head_has_a_matrix_for_each_pattern_of_presence_as_long_as_these_are_soon_made(
    sensors: int, size: int, exact: bool
) -> None:
    sizes, asked = [size] * sensors, set()
    means = impute_means(torch.zeros(sensors * size), sizes)

    def fill(pattern: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        asked.add(pattern)
        return means(pattern)

    build_head_graph(Head(sizes, 131, Denoising(), Recipe(), 0), sizes, fill, None)
    assert len(asked) == (2**sensors if exact else 1), "the head trains nothing meanwhile"
