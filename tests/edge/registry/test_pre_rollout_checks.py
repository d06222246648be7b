"""A new bundle must prove itself beside the running one, and for a while in service;
else the line goes back.
"""

import asyncio
import contextlib
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.bundle.verification import Verifier
from edge.inference.class_prior import Prior
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import BrokenModelError, Frame, Pipeline
from edge.inference.predictor import Outputs, Predictor
from edge.inference.served_model import Model, load_model
from edge.inference.tiling import View
from edge.registry import pre_rollout_checks
from edge.registry.bundle_listing import format_bundles, list_bundles
from edge.registry.bundle_store import BundleStore
from edge.registry.pre_rollout_checks import (
    ENOUGH,
    OF_A_CLASS,
    SAMPLE,
    Gate,
    Sample,
    assess_candidate,
)
from edge.registry.rollout import RefusedError, Rollout
from tests.support.bundle_stores import OTHERS, stored, tiny
from tests.support.federation_keys import FederationKeys
from tests.support.running_pipeline import COLORS, Kept, Running, running, simulated_latencies
from tests.support.tiny_bundle import tiny_bundle
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def latencies() -> Iterator[dict[int, float]]:
    """All models are equally fast, unless a test says otherwise."""
    with simulated_latencies() as found:
        yield found


@pytest.fixture
def line(tmp_path) -> Iterator[Running]:
    """Serves the first of two bundles that answer alike."""
    with running(
        *stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2)), Gate()
    ) as found:
        yield found


def test_a_bundle_that_does_as_well_is_served_and_the_findings_say_what_was_looked_at(line):
    one, two = line.digests
    line.judge(SAMPLE + 5)
    findings = line.rollout.activate(two, "me")
    assert f"it agrees with the running one on {SAMPLE} of the last {SAMPLE} images" in findings
    assert any("no signature" in each for each in findings)
    [verdict] = line.judge()
    assert (verdict.model, verdict.bundle) == (two, "tiny@2")
    assert line.outbox.notices == [f"tiny@2 ({two}) is served from now on"]
    assert (line.store.state().active, line.store.state().previous) == (two, one)


def refused(line: Running, digest: str, **options: bool) -> str:
    """Why a bundle is not served; the line serves what it served."""
    before = line.line.model
    with pytest.raises(EdgeNodeError) as caught:
        line.rollout.activate(digest, "me", **options)
    assert caught.value.remedy
    assert line.line.model is before
    assert line.store.state().active == before.digest
    assert line.store.state().history[-1].what == "refused"
    assert line.store.state().history[-1].why == caught.value.what
    assert caught.value.what in line.outbox.notices[-1]
    return caught.value.what


def test_a_bundle_that_disagrees_is_refused_unless_somebody_insists(tmp_path):
    other = tiny(tmp_path / "2", 2, OTHERS)
    with running(*stored(tmp_path / "store", tiny(tmp_path / "1"), other), Gate()) as line:
        line.judge(ENOUGH - 1)
        assert any("too few" in each for each in line.rollout.activate(line.digests[1], "me"))
        line.rollout.roll_back("me")
        line.judge(ENOUGH)
        assert f"agrees with the running one on 0 of the last {2 * ENOUGH - 1}" in refused(
            line, line.digests[1]
        )
        line.rollout.activate(line.digests[1], "me", force=True)
        assert line.judge()[0].label == "green"


SURE, DOUBTED = SimpleNamespace(doubts=()), SimpleNamespace(doubts=("novelty",))


def test_a_bundle_may_disagree_where_the_running_one_was_in_doubt():
    """As one does that has learnt from the labels of these images."""
    model: Any = SimpleNamespace(manifest=SimpleNamespace(classes=("red", "green")), digest="old")
    sample = Sample()
    for number in range(2 * ENOUGH):
        seen: Any = SimpleNamespace(
            model=model,
            tiled=SimpleNamespace(pixels=np.zeros((1, 8, 8, 3), np.uint8)),
            inference_seconds=0.01,
            tile=0,
            outputs=Outputs(np.float32([[0.6, 0.4]] if number % 2 else [[0.1, 0.9]])),
            verdict=DOUBTED if number % 2 else SURE,
        )
        sample.add(seen)
    assert [each.label for each in sample.inputs_of(model)] == ["green"] * ENOUGH


def test_a_bundle_that_misses_a_rare_class_is_refused_however_seldom_that_comes():
    """A line of good parts: 16 tiles each, and one bad tile in one part of a hundred,
    which no other tile shows.
    """
    manifest = SimpleNamespace(
        classes=("no_defect", "scratch"), trained={}, input=SimpleNamespace(size=8)
    )
    says_no_defect = SimpleNamespace(
        manifest=manifest, labels=lambda images: ["no_defect"] * len(images)
    )
    old: Any = SimpleNamespace(manifest=manifest, digest="old")
    new: Any = SimpleNamespace(manifest=manifest, digest="new", predictor=says_no_defect)
    sample, pixels = Sample(), SimpleNamespace(pixels=np.zeros((16, 8, 8, 3), np.uint8))
    for part in range(100 * OF_A_CLASS):
        probabilities = np.tile(np.float32([0.99, 0.01]), (16, 1))
        tile = 7 if part % 100 == 50 else 0
        if tile:
            probabilities[tile] = 0.01, 0.99
        seen: Any = SimpleNamespace(
            model=old,
            tiled=pixels,
            outputs=Outputs(probabilities),
            inference_seconds=16.0,
            tile=tile,
            verdict=SURE,
        )
        sample.add(seen)
    assert len(sample.inputs_of(old)) == SAMPLE
    finding = assess_candidate(new, old, sample.inputs_of(old), Gate(), threading.Event())[-1]
    assert not finding.good
    assert (
        f"on {SAMPLE - OF_A_CLASS} of the last {SAMPLE} images, on 0 of {OF_A_CLASS} that "
        "are scratch"
    ) in finding.text
    assert f"{OF_A_CLASS} from scratch to no_defect" in finding.text


def test_a_bundle_with_other_classes_is_refused_unless_somebody_insists(tmp_path):
    other = tiny(tmp_path / "2", 2, ("red", "green", "rust"))
    with running(
        *stored(tmp_path / "store", tiny(tmp_path / "1"), other), Gate(agreement=0)
    ) as line:
        assert "new rust; gone blue" in refused(line, line.digests[1])
        line.rollout.activate(line.digests[1], "me", force=True)
        assert line.judge(3)[2].label == "rust"


def test_the_admission_of_a_bundle_tells_which_classes_it_was_taught_since(tmp_path):
    bundles = [
        tiny_bundle(tmp_path / str(number), round_=number, trained=trained).folder
        for number, trained in ((1, {"red": 4}), (2, {"red": 4, "blue": 3}))
    ]
    with running(*stored(tmp_path / "store", *bundles), Gate()) as line:
        findings = line.rollout.activate(line.digests[1], "me")
        assert any("blue" in text and "red" not in text for text in findings)


def test_a_bundle_over_the_latency_budget_or_much_slower_than_the_running_one_is_refused(
    line, latencies
):
    latencies[2] = 0.02
    line.judge(ENOUGH)
    assert "more than 3 times" in refused(line, line.digests[1])
    line.rollout.gate = Gate(latency=0.01)
    assert "[gate] latency allows 10 ms" in refused(line, line.digests[1])
    line.rollout.gate = Gate(latency=0.1, slower=1e6)
    line.rollout.activate(line.digests[1], "me")


def test_however_large_a_new_model_s_inputs_are_few_are_held_at_once(tmp_path, monkeypatch):
    """64 of the largest would be 3 GB, in the process of the line."""
    alive = set[int]()
    most = 0
    resize = pre_rollout_checks.resize

    def counting(*arguments: Any) -> Any:
        nonlocal most
        pixels = resize(*arguments)
        alive.add(id(pixels))
        weakref.finalize(pixels, alive.discard, id(pixels))
        most = max(most, len(alive))
        return pixels

    monkeypatch.setattr(pre_rollout_checks, "resize", counting)
    larger = tiny_bundle(tmp_path / "2", round_=2, size=32).folder
    with running(*stored(tmp_path / "store", tiny(tmp_path / "1"), larger), Gate()) as line:
        line.judge(SAMPLE)
        line.rollout.activate(line.digests[1], "me")
    assert 0 < most <= 2


def test_a_new_model_that_is_far_too_slow_is_refused_before_it_has_computed_all(
    line, latencies, monkeypatch
):
    line.judge(SAMPLE)
    latencies[2] = 7.0
    calls = 0
    labels = Predictor.labels

    def counting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return labels(*arguments)

    monkeypatch.setattr(Predictor, "labels", counting)
    assert "more than 3 times" in refused(line, line.digests[1])
    assert calls == 3


def test_a_line_that_ends_does_not_wait_for_the_gate(tmp_path, monkeypatch):
    store, digests = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    monkeypatch.setattr(pre_rollout_checks, "REST", 1e9)
    begun = threading.Event()
    labels = Predictor.labels

    def begin(*arguments: Any) -> Any:
        begun.set()
        return labels(*arguments)

    with ThreadPoolExecutor() as threads:
        with running(store, digests, Gate()) as line:
            line.judge(1)
            monkeypatch.setattr(Predictor, "labels", begin)
            activating = threads.submit(line.rollout.activate, digests[1], "me")
            wait_until(begun.is_set)
        with pytest.raises(EdgeNodeError, match="the line ends"):
            activating.result()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"view": View(no_defect="sound")},
            "[view] no_defect = 'sound' is none of the model's classes",
        ),
        (
            {"prior": Prior(classes={"sound": 2})},
            "the prior has a weight for 'sound', none of the model's classes",
        ),
    ],
    ids=["no_defect", "prior"],
)
def test_a_bundle_that_lacks_a_class_of_the_settings_is_gone_back_to_only_from_a_failing_one(
    tmp_path, settings, why
):
    other = tiny(tmp_path / "2", 2, ("sound", "green", "blue"))
    with running(*stored(tmp_path / "store", tiny(tmp_path / "1"), other), Gate()) as line:
        one, two = line.digests
        line.rollout.activate(two, "me", force=True)
        for name, value in settings.items():
            setattr(line.line, name, value)
        with pytest.raises(UsageError, match=re.escape(why)):
            line.rollout.roll_back("me")
        assert line.line.model.digest == line.store.state().active == two
        line.rollout._fail(line.line.model, "it fails")
        line.until(one)
    assert f"is served again, though {why}" in line.outbox.notices[-1]


def test_a_bundle_that_fails_its_self_test_is_refused_whoever_insists(tmp_path):
    broken = tiny(tmp_path / "2", 2)
    manifest = broken / "manifest.json"
    content = msgspec.json.decode(manifest.read_bytes())
    content["golden"]["probabilities"].reverse()
    manifest.write_bytes(msgspec.json.encode(content))
    with running(*stored(tmp_path / "store", tiny(tmp_path / "1"), broken), Gate()) as line:
        assert "self-test" in refused(line, line.digests[1], force=True)


# ---------------------------------------------------------------- with --trust


@pytest.fixture(scope="module")
def ours() -> FederationKeys:
    return FederationKeys()


@pytest.fixture
def trusting(ours, tmp_path) -> Iterator[Running]:
    """Serves the middle one of three signed bundles; the fourth is another node's."""
    older, middle, newer = (
        ours.bundle(tmp_path / str(version), version=version) for version in (7, 8, 9)
    )
    foreign = ours.bundle(tmp_path / "foreign", key=ours.keys["plant-b"], node="plant-b")
    store, (one, *rest) = stored(tmp_path / "memory" / "bundles", middle, older, newer, foreign)
    with running(store, [one, *rest], Gate(), Verifier(ours.trust(), tmp_path / "memory")) as found:
        yield found


def test_only_a_newer_bundle_that_the_lines_own_node_has_signed_is_served(trusting):
    middle, older, newer, foreign = trusting.digests
    assert "is older" in refused(trusting, older, force=True)
    assert "plant-b" in refused(trusting, foreign, force=True)
    assert trusting.rollout.activate(newer, "me")[0].startswith("its signature is right")
    assert "is older" in refused(trusting, middle)


def test_the_list_says_which_bundles_are_signed(ours, tmp_path):
    signed = ours.bundle(tmp_path / "signed")
    store, digests = stored(tmp_path / "line", signed, tiny(tmp_path / "unsigned"))
    told = {each["bundle"]: each["signed"] for each in list_bundles(store)["bundles"]}
    assert told == dict(zip(digests, (True, False), strict=True))
    lines = [line for line in format_bundles(store) if line.split()[0] in digests]
    assert sorted("not signed" in line for line in lines) == [False, True]


def test_a_line_started_again_with_its_first_bundle_does_not_refuse_it_as_older(trusting, tmp_path):
    def start(version: int) -> str:
        return (
            Rollout(trusting.store, Gate(), trusting.rollout._verifier)
            .load_first(tmp_path / str(version))
            .digest
        )

    middle, _, newer, _ = trusting.digests
    assert start(8) == middle
    trusting.rollout.activate(newer, "me")
    assert start(8) == newer
    with pytest.raises(UsageError, match="is older"):
        start(7)


def test_going_back_is_for_the_bundle_before_alone_and_outlasts_a_restart(trusting, ours, tmp_path):
    middle, older, newer, _ = trusting.digests
    trusting.rollout.activate(newer, "me")
    trusting.rollout.roll_back("me")
    assert trusting.line.model.digest == middle
    assert "is older" in refused(trusting, older)
    assert (
        Rollout(trusting.store, Gate(), trusting.rollout._verifier).load_first(None).digest
        == middle
    )


def test_a_bundle_that_the_gate_refuses_does_not_count_as_served(trusting):
    """Else the running one would be older than it, and the line could not start again."""
    middle, _, newer, _ = trusting.digests
    trusting.rollout.gate = Gate(latency=1e-9)
    refused(trusting, newer)
    assert (
        Rollout(trusting.store, Gate(), trusting.rollout._verifier).load_first(None).digest
        == middle
    )


# ---------------------------------------------------------------- in service


def failing(monkeypatch: pytest.MonkeyPatch, round_: int, outcome: Exception | float) -> None:
    """Let the model of a round fail: raise an error, or give this for every probability."""
    run = Predictor.run

    def fail(self: Predictor, *arguments: Any) -> Outputs:
        outputs = run(self, *arguments)
        if self.manifest.round != round_:
            return outputs
        if isinstance(outcome, Exception):
            raise outcome
        return outputs._replace(probabilities=np.full_like(outputs.probabilities, outcome))

    monkeypatch.setattr(Predictor, "run", fail)


@pytest.mark.parametrize("outcome", [RuntimeError("no memory"), float("nan"), float("inf")])
def test_a_new_model_that_cannot_compute_costs_no_frame_and_is_never_taken_again(
    line, monkeypatch, outcome
):
    one, two = line.digests
    line.rollout.activate(two, "me")
    failing(monkeypatch, 2, outcome)
    assert {verdict.model for verdict in line.judge(5)} == {one}
    line.until(one)
    assert two in line.store.state().bad
    assert "cannot compute" in line.store.state().history[-1].why
    assert "has failed in service" in refused(line, two)
    with pytest.raises(RefusedError) as caught:
        line.rollout.activate(two, "me")
    named = f"edge-node bundle activate {two} --force --line {line.store.folder.name}"
    assert named in caught.value.remedy
    assert line.outbox.notices[1].startswith(f"the bundle {two} has failed")
    monkeypatch.undo()
    line.rollout.activate(two, "me", force=True)
    assert line.store.state().bad == {}


def test_a_frame_on_which_an_exchanged_model_fails_is_judged_by_the_one_that_is_served(
    line, monkeypatch
):
    one, two = line.digests
    line.rollout.activate(two, "me")
    prepared = [line.line._prepare(Frame(str(number), COLORS[0]), 0, 5.0) for number in range(3)]
    failing(monkeypatch, 2, RuntimeError("no memory"))
    assert [seen.verdict.model for seen in map(line.line._inspect, prepared)] == [one] * 3
    monkeypatch.undo()
    failing(monkeypatch, 1, RuntimeError("no memory either"))
    assert isinstance(line.judge()[0], Failure)


def test_a_new_model_whose_outputs_a_watcher_chokes_on_is_taken_back_and_the_verdict_stands(
    tmp_path,
):
    def choking(seen: Any) -> Verdict:
        if seen.model.manifest.round == 2:
            raise IndexError("another length")
        return seen.verdict

    store, (one, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    with running(store, [one, two], Gate(), doubter=choking) as line:
        line.rollout.activate(two, "me")
        assert [verdict.model for verdict in line.judge(2)] == [two, one]
        line.until(one)
        assert "another length" in store.state().bad[two]


def test_a_new_model_that_is_too_slow_in_service_is_taken_back(line, latencies):
    one, two = line.digests
    line.rollout.gate = Gate(latency=0.005)
    line.rollout.activate(two, "me")
    latencies[2] = 0.01
    line.judge(40)
    line.until(one)
    assert "[gate] latency allows 5 ms" in line.store.state().bad[two]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_model_whose_verdicts_are_doubted_far_more_often_is_taken_back(tmp_path, restarted):
    doubted = iter([*[False] * 90, True, True, True])  # 3 % of the first, of the second all

    def doubter(seen: Any) -> Verdict:
        return msgspec.structs.replace(
            seen.verdict, doubts=("novel",) if next(doubted, True) else ()
        )

    store, (one, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(running(store, [one, two], Gate(), doubter=doubter))
        line.judge(93)
        line.rollout.activate(two, "me")
        if restarted:
            line.judge(10)
            stack.close()
            line = stack.enter_context(running(store, [one, two], Gate(), doubter=doubter))
        assert {verdict.model for verdict in line.judge(29)} == {two}
        line.judge()
        line.until(one)
        assert store.state().bad[two] == "100% of its verdicts are in doubt, of the model before 3%"


def test_a_model_that_has_passed_its_probation_is_forgiven_two_errors_but_not_three(
    line, monkeypatch
):
    one, two = line.digests
    line.rollout.gate = Gate(minutes=0, frames=3)
    line.rollout.activate(two, "me")
    line.judge(3)
    wait_until(lambda: not line.store.state().trial)
    assert line.store.state().history[-1].what == "confirmed"
    assert line.rollout._before is None
    failing(monkeypatch, 2, RuntimeError("no memory"))
    line.judge(2)
    monkeypatch.undo()
    line.judge()
    failing(monkeypatch, 2, RuntimeError("no memory"))
    line.judge(2)
    assert line.store.state().active == two
    line.judge()
    line.until(one)
    assert line.judge()[0].model == one


def test_single_errors_among_the_right_answers_to_programs_are_no_row_of_errors(
    tmp_path, monkeypatch
):
    store, (one, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    store.record_activation(two, "me", trial=False)
    image = np.zeros((1, 16, 16, 3), np.uint8)

    def ask(line: Running, model: Model, *, wrong: bool) -> None:
        with (
            monkeypatch.context() as patch,
            pytest.raises(BrokenModelError) if wrong else contextlib.nullcontext(),
        ):
            if wrong:
                patch.setattr(model.predictor, "run", lambda *_: 1 / 0)
            asyncio.run(line.line.infer(model, image))

    with running(store, [one, two], Gate()) as line:
        model = line.line.model
        for _ in range(4):
            ask(line, model, wrong=True)
            ask(line, model, wrong=False)
        for _ in range(4):
            ask(line, load_model(store.path(one)), wrong=True)  # which is not served any more
        assert not line.rollout._failures
        for _ in range(3):
            ask(line, model, wrong=True)
        line.until(one)


def test_a_model_that_fails_and_is_the_only_one_stays_and_that_is_said(tmp_path, monkeypatch):
    with running(*stored(tmp_path / "store", tiny(tmp_path / "1")), Gate()) as line:
        failing(monkeypatch, 1, RuntimeError("no memory"))
        line.judge(10)
        wait_until(lambda: line.outbox.notices)
        monkeypatch.undo()
        assert line.judge()[0].label == "red"
    [notice] = line.outbox.notices
    assert "no other to serve" in notice


def test_a_model_that_fails_while_the_one_before_is_damaged_stays_and_that_is_said_once(tmp_path):
    store, (one, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    store.record_activation(two, "me")
    Path(store.path(one) / "model.onnx").write_bytes(b"damaged")
    with running(store, [one, two], Gate(latency=1e-9)) as line:
        line.judge(30)
        wait_until(lambda: line.outbox.notices)
        assert {verdict.model for verdict in line.judge(40)} == {two}
        assert not line.rollout._failures
        assert (store.state().previous, store.state().trial, store.state().history[-1].what) == (
            "",
            0,
            "kept",
        )
    [notice] = line.outbox.notices
    assert f"the one before, {one}, cannot be served: " in notice
    assert notice.endswith(f"tiny@2 ({two}) goes on")


def test_a_model_under_which_the_daemon_dies_three_times_is_taken_back(tmp_path):
    store, (one, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    store.record_activation(two, "me")
    for _ in range(2):
        assert Rollout(store, Gate()).load_first(None).digest == two  # and is killed
    assert Rollout(store, Gate()).load_first(None).digest == one
    assert "died" in store.state().bad[two]


def test_a_bundle_on_probation_that_a_restart_names_goes_on_with_it_and_is_confirmed(tmp_path):
    store, (_, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    store.record_activation(two, "me")
    rollout = Rollout(store, Gate(minutes=0, frames=0))
    with (
        contextlib.closing(
            Pipeline(rollout.load_first(tmp_path / "2"), Kept(), monitors=[rollout])
        ) as line,
        rollout.manage(line),
    ):
        wait_until(lambda: not store.state().trial)
    assert store.state().history[-1].what == "confirmed"


def test_a_served_bundle_that_is_damaged_gives_way_to_the_one_before(tmp_path, caplog):
    store, (one, two) = stored(tmp_path / "store", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    store.record_activation(two, "me")
    Path(store.path(two) / "model.onnx").write_bytes(b"damaged")
    assert Rollout(store, Gate()).load_first(None).digest == one
    assert store.state().active == one
    assert "the one before it is tried" in caplog.text


def test_a_line_without_any_bundle_says_how_to_get_one(tmp_path):
    with pytest.raises(EdgeNodeError, match="no bundle") as caught:
        Rollout(BundleStore(tmp_path / "store"), Gate()).load_first(None)
    assert "edge-node serve BUNDLE" in caught.value.remedy


def test_the_gates_errors_carry_what_was_found(line):
    line.rollout.gate = Gate(latency=1e-9)
    with pytest.raises(RefusedError) as caught:
        line.rollout.activate(line.digests[1], "me")
    assert caught.value.findings[1] == "it tells 3 classes apart"
    assert len(caught.value.findings) == 4
