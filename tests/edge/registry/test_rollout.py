"""One model gives way to the next while requests come in: none is lost,
and none is answered by two models.
"""

import io
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from broker_config.security import trust
from broker_config.storage.hash_chain import follow
from edge.bundle.bundle_format import BundleError
from edge.bundle.verification import Verifier
from edge.inference.model_trial import ModelTrial
from edge.inference.pipeline import NullConsumer, Pipeline
from edge.registry import bundle_store, line_record
from edge.registry.bundle_store import BundleStore, line_store
from edge.registry.control_requests import Answer, Request, send_request
from edge.registry.pre_rollout_checks import Gate
from edge.registry.rollout import Rollout
from edge_node.cli.line import choose
from tests.support.bundle_stores import OTHERS, stored, tiny
from tests.support.daemon_process import serving_daemon
from tests.support.federation_keys import FederationKeys
from tests.support.plants import here
from tests.support.tiny_bundle import (
    BLUE,
    CLASSES,
    GREEN,
    MEASURED,
    NEAR_GUESSING,
    RED,
    greedy_onnx,
    looping_onnx,
    tiny_bundle,
)
from tests.support.waiting import wait_until

SWAPS = 24


class CountingTrial(ModelTrial):
    """A trial that counts what it has tried."""

    checks = 0

    def check(self, bundle, images=()):
        self.checks += 1
        return super().check(bundle, images)


def wanted(store: BundleStore, digest: str) -> Answer:
    return send_request(
        store.folder, Request(action="activate", by="test", bundle=digest), 30, store.is_locked
    )


@pytest.fixture
def lenient(tmp_path) -> Path:
    """Settings under which models may answer differently."""
    path = tmp_path / "line.toml"
    path.write_text("[gate]\nagreement = 0.0\nslower = 1000.0\n")
    return path


@pytest.mark.slow
def test_under_load_every_answer_is_that_of_the_model_that_it_names(tmp_path, lenient):
    store, digests = stored(
        tmp_path / "bundles" / "line-1", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2, OTHERS)
    )
    meaning = dict(zip(digests, (CLASSES, OTHERS), strict=True))
    stop = threading.Event()
    answers: Counter[tuple[str, str]] = Counter()
    with serving_daemon(tmp_path, "--config", lenient) as line, ThreadPoolExecutor(4) as pool:

        def load(seed: int) -> Counter[str]:
            """Judge images over a connection of its own until all is done;
            which models answered.
            """
            heard: Counter[str] = Counter()
            numbers = random.Random(seed)
            with httpx.Client(base_url=line.url, timeout=60) as client:
                while not stop.is_set():
                    number = numbers.randrange(3)
                    answer = client.post("/classify", content=(RED, GREEN, BLUE)[number])
                    assert answer.status_code == 200
                    verdict = answer.json()
                    classes = meaning[verdict["model"]]
                    assert verdict["label"] == classes[number]
                    assert verdict["bundle"] == f"tiny@{1 + digests.index(verdict['model'])}"
                    assert list(verdict["probabilities"]) == list(classes)
                    heard[verdict["model"]] += 1
            return heard

        loads = [pool.submit(load, random.randrange(2**32)) for _ in range(4)]
        for swap in range(1, SWAPS + 1):
            digest = digests[swap % 2]
            assert wanted(store, digest).done
            assert line.client.get("/").json()["bundle"] == f"tiny@{1 + swap % 2}"
        stop.set()
        for each in loads:
            answers += each.result(60)
        assert line.end()[0] == 0
    assert min(answers[digest] for digest in digests) > SWAPS
    activated = [
        each.bundle
        for each in store.state().history
        if each.what == "activated" and each.by == "test"
    ]
    assert activated[1:] == [digests[swap % 2] for swap in range(1, SWAPS + 1)]


def test_the_command_lists_adds_activates_and_goes_back_with_and_without_a_daemon(tmp_path):
    one, two, other = (
        tiny(tmp_path / "1"),
        tiny(tmp_path / "2", 2),
        tiny(tmp_path / "3", 3, ("red", "green", "rust")),
    )

    def bundle(*arguments: object) -> str:
        done = here("bundle", *arguments, "--state", tmp_path)
        return done.stdout if done.returncode == 0 else f"{done.returncode} {done.stderr}"

    def listed() -> dict[str, str]:
        found = json.loads(bundle("list", "--json"))
        return {"active": found["active"], "previous": found["previous"]}

    with serving_daemon(tmp_path, one, "--output", tmp_path / "outcomes.jsonl") as line:
        first = line_store(tmp_path, "line-1").state().active
        second = bundle("add", two).split()[0]
        assert "tiny@2 is served" in bundle("activate", second[:6])
        assert listed() == {"active": second, "previous": first}
        assert line.classify(RED).json()["model"] == second
        assert "active, on probation" in bundle("list")
        third = bundle("add", other).split()[0]
        assert "new rust; gone blue" in bundle("activate", third)
        assert "tiny@1 is served" in bundle("rollback")
        assert line.classify(RED).json()["model"] == first
        assert line.end()[0] == 0
    assert "new rust; gone blue" in bundle("activate", third)
    assert "tiny@2 (" in bundle("activate", second)
    with serving_daemon(tmp_path) as line:
        assert line.classify(RED).json()["model"] == second
    assert "begin with 'ffff'" in bundle("activate", "ffff")
    assert bundle("rollback").startswith("- its signature is looked at")
    assert listed() == {"active": first, "previous": second}
    store = line_store(tmp_path, "line-1")
    heads = [
        head.digest for _, head in follow(line_record.read(store.folder, store.state().history))
    ]
    outcomes = [json.loads(text) for text in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    told = [each["details"]["record"] for each in outcomes if each.get("kind") == "model"]
    # activated, refused, rolled back: who keeps outcomes keeps heads of the record
    assert len(told) == 3
    assert set(told) <= set(heads)


@pytest.mark.slow
def test_a_restarted_line_goes_on_with_what_was_activated_and_a_new_bundle_is_served(tmp_path):
    one, two, three = (tiny(tmp_path / str(number), number) for number in (1, 2, 3))
    with serving_daemon(tmp_path / "state", one) as line:
        first = line.classify(RED).json()["model"]
        second = here("bundle", "add", two, "--state", tmp_path / "state").stdout.split()[0]
        assert here("bundle", "activate", second, "--state", tmp_path / "state").returncode == 0
        assert line.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with serving_daemon(tmp_path / "state", one) as line:
        assert line.classify(RED).json()["model"] == second
        assert f"{one} was served before: the line goes on with {second}" in line.said
        assert f"edge-node bundle activate {first}" in line.said
    with serving_daemon(tmp_path / "state", three) as line:
        assert line.classify(RED).json()["bundle"] == "tiny@3"
    with serving_daemon(tmp_path / "state", one) as line:  # another command than the last one
        assert line.classify(RED).json()["model"] == first


def test_the_command_finds_the_store_of_the_line_that_runs_or_says_what_it_needs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    nothing = here("bundle", "list", "--line", "press-7")
    assert nothing.returncode == 2
    assert "press-7" in nothing.stderr
    assert str(tmp_path / "home") in nothing.stderr
    with serving_daemon(tmp_path / "elsewhere", tiny(tmp_path / "1"), "--line", "press-7") as line:
        assert json.loads(here("bundle", "list", "--line", "press-7", "--json").stdout)["active"]
        second = here("bundle", "add", tiny(tmp_path / "2", 2), "--line", "press-7").stdout.split()[
            0
        ]
        assert here("bundle", "activate", second, "--line", "press-7").returncode == 0
        assert line.classify(RED).json()["model"] == second
        other = here("bundle", "activate", second, "--line", "press-8")
        assert f"--line press-7 --state {tmp_path / 'elsewhere'}" in other.stderr
        with serving_daemon(tmp_path / "third", tmp_path / "1", "--line", "press-7"):
            assert "2 lines called press-7" in here("bundle", "list", "--line", "press-7").stderr


def test_a_request_that_nobody_answers_or_can_read_does_no_harm(tmp_path):
    store, digests = stored(
        tmp_path / "bundles" / "line-1", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2)
    )
    requests = store.folder / "requests"
    requests.mkdir()
    stale = {"action": "activate", "by": "somebody, last week", "bundle": digests[1]}
    (requests / "stale.json").write_text(json.dumps(stale))
    with serving_daemon(tmp_path) as line:
        for number, content in enumerate(
            (b"", b"\xff", b'{"action": "destroy", "by": "x"}', b"[" * 100_000)
        ):
            (requests / f"{number}.json").write_bytes(content)
        answer = send_request(
            store.folder,
            Request(action="activate", by="x", bundle="../../etc"),
            30,
            store.is_locked,
        )
        assert not answer.done
        assert "begin with" in answer.text
        assert line.classify(RED).json()["model"] == digests[0]
        assert list(requests.iterdir()) == []


# ---------------------------------------------------------------- kills

KILLED = """
import os, sys
from pathlib import Path
from broker_config.security import trust
from broker_config.storage.hash_chain import follow
from broker_config.storage import disk
from edge.inference.pipeline import Pipeline
from edge.registry.pre_rollout_checks import Gate
from edge.registry.rollout import Rollout
from edge.registry.bundle_store import BundleStore
from edge.bundle.verification import Verifier

memory, file, left, newer = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
class Outbox:
    def put(self, outcome): pass
def step(function):
    def run(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        done = function(*arguments, **options)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return done
    return run
disk.replace_bytes, Path.replace = map(step, (disk.replace_bytes, Path.replace))
rollout = Rollout(BundleStore(memory / "bundles"), Gate(), Verifier(trust.read(file), memory))
line = Pipeline(rollout.load_first(None), Outbox(), monitors=[rollout])
with rollout.manage(line):
    rollout.activate(newer, "me")
    line.on_model_error(line.model, RuntimeError("no memory"))
    while rollout.store.state().active == newer:
        pass
    rollout.activate(newer, "me", force=True)
    rollout.roll_back("me")
line.close()
"""


def test_a_store_that_lost_its_state_goes_on_with_the_newest_bundle_that_was_served(tmp_path):
    ours = FederationKeys()
    old, new = (ours.bundle(tmp_path / str(version), version=version) for version in (7, 8))
    (file := tmp_path / "plant-a.trust").write_bytes(trust.encode(ours.trust()))
    store, (_, two) = stored(tmp_path / "memory" / "bundles", old, new)
    for folder in (old, new):
        Rollout(store, Gate(), Verifier(trust.read(file), tmp_path / "memory")).load_first(folder)
    (store.folder / "state.json").unlink()
    assert (
        Rollout(store, Gate(), Verifier(trust.read(file), tmp_path / "memory"))
        .load_first(old)
        .digest
        == two
    )
    assert store.state().active == two


@pytest.mark.parametrize("graph", [looping_onnx(16, -1), greedy_onnx(16, 10**9)])
def test_a_graph_that_would_stop_the_line_is_refused_and_the_next_one_served(tmp_path, graph):
    bundles = [tiny(tmp_path / "one"), tiny(tmp_path / "three", 3)]
    bundles.insert(1, tiny_bundle(tmp_path / "two", round_=2, graph=graph).folder)
    store, (one, two, three) = stored(tmp_path / "bundles", *bundles)
    rollout = Rollout(store, Gate(), trial=ModelTrial(loading=2))
    line = Pipeline(rollout.load_first(None), NullConsumer(), monitors=[rollout])
    with closing(line), rollout.manage(line):
        with pytest.raises(BundleError):
            rollout.activate(two, "me", force=True)
        assert line.model.digest == one
        rollout.activate(three, "me")
        assert line.model.digest == three


@pytest.mark.parametrize("graph", [looping_onnx(16, -1), greedy_onnx(16, 10**9)])
def test_a_graph_that_would_stop_the_line_is_refused_when_the_line_begins_with_it(tmp_path, graph):
    hostile = tiny_bundle(tmp_path / "hostile", round_=2, graph=graph).folder
    store, (one,) = stored(tmp_path / "bundles", tiny(tmp_path / "one"))

    def rollout() -> Rollout:
        return Rollout(store, Gate(), trial=ModelTrial(loading=2))

    with pytest.raises(BundleError):
        rollout().load_first(hostile)
    assert rollout().load_first(None).digest == one

    # from an earlier version, which activated without a trial
    store.record_activation(store.add(hostile, "test"), "test", trial=False)
    assert rollout().load_first(None).digest == one


def test_a_bundle_is_tried_when_a_line_first_begins_with_it_and_not_again(tmp_path):
    first = tiny(tmp_path / "one")
    store, (one, two) = stored(tmp_path / "bundles", first, tiny(tmp_path / "two", 2))
    trial = CountingTrial()
    assert Rollout(store, Gate(), trial=trial).load_first(first).digest == one
    assert trial.checks == 1

    rollout = Rollout(store, Gate(), trial=trial)
    line = Pipeline(rollout.load_first(first), NullConsumer(), monitors=[rollout])
    assert trial.checks == 1
    with closing(line), rollout.manage(line):
        rollout.activate(two, "me")
    assert trial.checks == 2

    assert Rollout(store, Gate(), trial=trial).load_first(None).digest == two
    assert trial.checks == 2


def test_a_line_that_ends_does_not_wait_for_a_graph_that_never_ends(tmp_path):
    looping = tiny_bundle(tmp_path / "two", round_=2, graph=looping_onnx(16, -1)).folder
    store, (_, two) = stored(tmp_path / "bundles", tiny(tmp_path / "one"), looping)
    rollout = Rollout(store, Gate())
    with closing(Pipeline(rollout.load_first(None), NullConsumer(), monitors=[rollout])) as line:
        with ThreadPoolExecutor() as threads, rollout.manage(line):
            activating = threads.submit(rollout.activate, two, "me")
        with pytest.raises(BundleError, match="the line ends"):
            activating.result()


def test_the_log_has_the_warnings_about_each_model_once_whenever_it_takes_over(tmp_path, caplog):
    good = tiny_bundle(tmp_path / "good", confidence=MEASURED).folder
    poor = tiny_bundle(tmp_path / "poor", round_=2, confidence=NEAR_GUESSING).folder
    store, (one, two) = stored(tmp_path / "bundles", poor, good)
    rollout = Rollout(store, Gate())
    outbox = NullConsumer()
    with closing(Pipeline(rollout.load_first(None), outbox, monitors=[rollout])) as line:
        counts = []

        def count() -> None:
            counts.append(sum("tiny@2: its accuracy" in text for text in caplog.messages))

        with rollout.manage(line):
            rollout.activate(two, "me")
            count()
            assert line.on_model_error
            line.on_model_error(line.model, RuntimeError("no memory"))
            wait_until(lambda: store.state().active == one and store.state().bad)
            wait_until(lambda: "tiny@2: its accuracy" in caplog.text)
            count()
            rollout.activate(two, "me", force=True)
            count()
            rollout.roll_back("me")
            count()
            rollout.activate(two, "me", force=True)
            rollout.activate(one, "me")
            count()
    assert counts == [0, 1, 1, 2, 3]


@pytest.mark.slow
def test_a_kill_at_any_durable_step_of_a_change_leaves_a_line_that_starts(tmp_path):
    """With a verifier, which has a memory of its own:
    it must admit whatever the store says is served.
    """
    ours = FederationKeys()
    old, new = (ours.bundle(tmp_path / str(version), version=version) for version in (7, 8))
    file = tmp_path / "plant-a.trust"
    file.write_bytes(trust.encode(ours.trust()))
    seen = Counter()
    for number in itertools.count():
        memory, step = tmp_path / f"memory-{number}", 1 + number * 9 + random.randrange(9)
        store, (one, two) = stored(memory / "bundles", old, new)
        verifier = Verifier(trust.read(file), memory)
        Rollout(store, Gate(), verifier).load_first(None)
        command = [sys.executable, "-c", KILLED, str(memory), str(file), str(step), two]
        code = subprocess.run(
            command, check=False, timeout=60, stderr=subprocess.DEVNULL
        ).returncode
        model = Rollout(store, Gate(), verifier).load_first(None)
        assert model.digest in (one, two)
        assert store.state().active == model.digest
        seen[model.digest == one] += 1
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert sum(seen.values()) > 2
    assert len(seen) == 2


def test_with_several_lines_of_a_name_a_bundle_goes_nowhere_until_one_is_named(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    one, two = (tiny(tmp_path / str(number), number) for number in (1, 2))
    mine = line_store(tmp_path / "home" / "edge-node", "press-9")
    other = line_store(tmp_path / "elsewhere", "press-9")
    here("bundle", "add", one, "--line", "press-9", "--state", tmp_path / "home" / "edge-node")
    with serving_daemon(tmp_path / "elsewhere", one, "--line", "press-9"):
        refused = here("bundle", "add", two, "--line", "press-9")
        assert refused.returncode == 2
        assert str(tmp_path / "elsewhere") in refused.stderr
        assert len(mine.digests()) == len(other.digests()) == 1
        named = "--line", "press-9", "--state", tmp_path / "elsewhere"
        added = here("bundle", "add", two, *named)
        assert added.returncode == 0
        assert f"--line press-9 --state {tmp_path / 'elsewhere'}" in added.stdout, "what comes next"
        assert (len(mine.digests()), len(other.digests())) == (1, 2)
    added = here("bundle", "add", two, "--line", "press-9")
    assert str(mine.folder) in added.stdout
    assert len(mine.digests()) == 2


def test_a_line_that_happens_to_run_is_not_taken_for_the_one_in_the_default_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    elsewhere = tmp_path / "elsewhere"
    for state in (tmp_path / "home" / "edge-node", elsewhere):
        here("bundle", "add", tiny(tmp_path / "1"), "--state", state)
    monkeypatch.setattr(bundle_store, "running_lines", lambda: [(elsewhere, "line-1")])
    refused = here("bundle", "rollback")
    assert refused.returncode == 2
    assert f"--state {elsewhere}" in refused.stderr
    assert here("bundle", "list", "--state", elsewhere).returncode == 0


def test_the_folder_of_a_line_is_still_found_by_its_earlier_name(tmp_path):
    store = line_store(tmp_path / "state", "line-1")
    here("bundle", "add", tiny(tmp_path / "1"), "--memory", tmp_path / "state")
    assert len(store.digests()) == 1


class Typed(io.StringIO):
    """What somebody types at a terminal, or sees there."""

    def isatty(self) -> bool:
        return True


def test_at_a_terminal_it_is_asked_which_line_is_meant(monkeypatch):
    shown = Typed()
    monkeypatch.setattr(sys, "stdin", Typed("3\n2\n"))
    monkeypatch.setattr(sys, "stderr", shown)
    assert choose("lines", ["press", "oven"], str) == "oven"
    assert "press" in shown.getvalue()
    assert choose("lines", ["press"], str) == "press"
