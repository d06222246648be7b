"""The line's daemon, as a process: it serves, survives bad images,
and ends without losing an answer.
"""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from PIL import Image as Picture

from broker_config.broker.embedded import start_broker
from edge.bundle.bundle_format import Confidence, HeldOut
from tests.support.daemon_process import BLOCK_TORCH, daemon, serving_daemon, start
from tests.support.mosquitto import Mosquitto
from tests.support.mqtt_subscriber import subscriber
from tests.support.tiny_bundle import (
    BLUE,
    CLASSES,
    GREEN,
    RED,
    png,
    tiny_bundle,
    tiny_probabilities,
)
from trainer.data.drawn_surfaces import draw_images


@pytest.fixture
def bundle(tmp_path):
    """Its daemon's state is beside it: outcomes that a killed one had not delivered are none of
    the next test's.
    """
    return tiny_bundle(tmp_path / "bundle", node="press-3", round_=30).folder


@pytest.fixture
def watched(tmp_path):
    folder = tmp_path / "watched"
    folder.mkdir()
    return folder


# ---------------------------------------------------------------- serving


def test_the_daemon_says_what_it_serves_and_judges_images(bundle):
    with daemon(bundle) as line:
        assert line.client.get("/v2/health/live").json() == {"live": True}
        assert line.client.get("/v2/health/ready").json() == {"ready": True}
        about = line.client.get("/").json()
        assert (about["bundle"], about["classes"]) == ("press-3@30", list(CLASSES))
        model = line.client.get(about["model"]).json()
        assert model["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 16, 16, 3]}]
        assert line.client.get("/v2/models/other").status_code == 404

        answer = line.classify(GREEN, "part 7")
        assert answer.status_code == 200
        verdict = answer.json()
        assert (verdict["type"], verdict["image"], verdict["label"]) == (
            "Verdict",
            "part 7",
            "green",
        )
        expected = tiny_probabilities(np.full((1, 16, 16, 3), (0, 255, 0), np.uint8))[0]
        assert verdict["probabilities"] == pytest.approx(
            dict(zip(CLASSES, expected, strict=True)), abs=1e-6
        )
        assert verdict["confidence"] == max(verdict["probabilities"].values())
        assert verdict["bundle"] == "press-3@30"
        assert line.end() == (0, "", "")


def test_it_serves_where_torch_torchvision_and_onnx_cannot_be_imported(bundle):
    with daemon(bundle, before=BLOCK_TORCH) as line:
        assert line.classify(BLUE).json()["label"] == "blue"
        assert line.end()[0] == 0


def test_bad_images_get_an_error_with_a_remedy_and_the_next_one_is_judged(bundle):
    with daemon(bundle) as line:
        for bad in (b"", b"no image", RED[:-30]):
            answer = line.classify(bad, "part-8")
            assert answer.status_code == 400
            assert "part-8" in answer.json()["error"]
            assert answer.json()["remedy"]
        assert line.classify(RED).json()["label"] == "red"
        assert line.end()[0] == 0


def test_a_gray_frame_is_doubted_and_a_surface_is_not(bundle):
    surface = io.BytesIO()
    Picture.fromarray(draw_images(np.array([0]), 128, 1, 0)[0]).save(surface, "PNG")
    with daemon(bundle) as line:
        assert line.classify(png((130, 130, 130))).json()["doubts"] == ["blank"]
        assert line.classify(surface.getvalue()).json()["doubts"] == []
        assert line.end()[0] == 0


def test_the_daemon_tells_the_errors_of_its_model_and_warns_of_a_poor_one(tmp_path):
    labels = np.repeat([0, 1, 2], 10)
    probabilities = np.full((30, 3), 0.2)
    probabilities[np.arange(30), [*[0] * 8, 1, 2, *[1] * 9, 0, *[1] * 5, *[2] * 5]] = 0.6
    held_out = HeldOut.of(labels, probabilities, np.arange(30) % 3 == 0)
    classes = ("no_defect", "scratch", "dent")
    confidence = Confidence(images=30, held_out=held_out)
    with daemon(
        tiny_bundle(tmp_path / "bundle", classes=classes, confidence=confidence).folder
    ) as line:
        assert (
            "tiny@1: accuracy 73.3% (56 to 86; 22 of 30), with 95 % intervals; in doubt 67%"
            in line.said
        )
        assert (
            "missed defects 5.0% (1 to 24; 1 of 20), false rejects 20.0% (6 to 51; 2 of 10)"
            in line.said
        )
        assert "warning: tiny@1: 67% of its verdicts are in doubt" in line.said
        about = line.client.get("/").json()
        found = about["performance"]
        assert (found["missed"]["count"], found["false_rejects"]["images"]) == (1, 10)
        [warning] = about["warnings"]
        assert warning["id"] == "mostly_in_doubt"
        assert "67%" in warning["text"]
        metrics = line.client.get("/metrics").text
        assert "edge_node_model_missed_ratio 0.05\n" in metrics
        assert 'edge_node_model_warning{warning="mostly_in_doubt"} 1.0\n' in metrics
        assert line.end() == (0, "", "")


def test_the_daemon_warns_of_a_model_that_nobody_has_measured(bundle):
    with daemon(bundle) as line:
        warnings = line.client.get("/").json()["warnings"]
        assert [each["id"] for each in warnings] == ["not_measured"]
        for each in warnings:
            assert line.said.count(f"warning: press-3@30: {each['text']}\n") == 1


def test_a_body_announced_as_too_large_does_not_hold_up_others(bundle):
    with daemon(bundle) as line, socket.create_connection((line.url.host, line.url.port)) as liar:
        liar.sendall(
            b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\nabc"
        )
        assert line.classify(RED).json()["label"] == "red"


def test_verdicts_are_appended_to_the_output_file(bundle, tmp_path):
    output = tmp_path / "verdicts.jsonl"
    output.write_text('{"earlier": true}\n')
    with daemon(bundle, output=output) as line:
        line.classify(RED, "one")
        line.classify(b"no image", "two")
        assert line.end() == (0, "", "")
        lines = [json.loads(text) for text in output.read_text().splitlines()]
        assert [(found.get("type"), found.get("image")) for found in lines] == [
            (None, None),
            ("Verdict", "one"),
            ("Failure", "two"),
        ]


def test_a_full_disk_does_not_stop_the_line(bundle):
    with daemon(bundle, output="/dev/full") as line:
        assert line.classify(RED, "part-9").json()["label"] == "red"
        assert line.classify(GREEN).json()["label"] == "green"
        code, _, err = line.end()
        assert code == 0
        assert err.count("No space left on device; they wait in the outbox") == 1
        assert "2 outcome(s) wait for jsonl:/dev/full" in err


# ---------------------------------------------------------------- verdicts over MQTT


def test_every_verdict_reaches_a_subscriber_also_the_last_one_before_the_end(bundle, tmp_path):
    with (
        start_broker(tmp_path) as broker,
        subscriber(broker.url, "edge-node/v1/lines/line-1/verdicts") as messages,
    ):
        with daemon(bundle, mqtt=broker.url) as line:
            answers = [
                line.classify(image, name).json()
                for image, name in ((RED, "one"), (b"none", "two"))
            ]
            assert line.end() == (0, "", "")
        published = [json.loads(messages.get(timeout=60).payload) for _ in range(2)]
    seqs = [found.pop("seq") for found in published]
    assert seqs == [seqs[0], seqs[0] + 1]
    assert published == answers
    assert [found["type"] for found in published] == ["Verdict", "Failure"]


def test_a_broker_that_is_away_does_not_stop_the_line_and_gets_everything_when_it_is_back(
    bundle, tmp_path
):
    broker = Mosquitto(tmp_path / "broker", persistence=False)
    with daemon(bundle, mqtt=broker.url) as line:
        assert [line.classify(image).json()["label"] for image in (RED, GREEN)] == ["red", "green"]
        # an attempt to connect may take longer than two images
        if "nothing listens" not in line.said:
            assert line.process.stderr
            line.said += next(text for text in line.process.stderr if "nothing listens" in text)
        code, _, err = line.end()
    assert code == 0
    assert (line.said + err).count("nothing listens") == 1
    assert "2 outcome(s) wait for mqtt:" in err
    broker.start()
    watching = subscriber(broker.url, "edge-node/v1/lines/line-1/verdicts")
    with watching as messages, daemon(bundle, mqtt=broker.url) as line:
        assert line.classify(BLUE).json()["label"] == "blue"
        assert [json.loads(messages.get(timeout=60).payload)["label"] for _ in range(3)] == [
            "red",
            "green",
            "blue",
        ]
        assert line.end() == (0, "", "")
    broker.kill()


# ---------------------------------------------------------------- starting


def refused(bundle: Path, **options: object) -> str:
    """What the daemon says when it does not start."""
    with start(bundle, **options) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert out == ""
    assert "ready http" not in err
    assert "Traceback" not in err
    assert "What to do:" in err
    return err


def test_a_port_that_is_taken_is_named(bundle):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port}" in refused(bundle, port=port)


def test_a_corrupted_model_is_refused_before_ready(tmp_path):
    folder = tiny_bundle(tmp_path / "bundle").folder
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"\0")
    assert "model.onnx" in refused(folder)


def test_a_model_that_fails_its_self_test_is_refused_before_ready(tmp_path):
    folder = tiny_bundle(tmp_path / "bundle").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["golden"]["probabilities"].reverse()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "self-test" in refused(folder)


def test_what_cannot_be_watched_or_written_or_understood_is_named(bundle, tmp_path):
    assert "no folder" in refused(bundle, watch=tmp_path / "none")
    assert "none/verdicts" in refused(bundle, output=tmp_path / "none" / "verdicts.jsonl")
    assert "not a bundle" in refused(tmp_path)
    assert "has no scheme" in refused(bundle, mqtt="broker")


# ---------------------------------------------------------------- ending


def wait_until_refused(address: tuple[str, int]) -> None:
    """Wait until new connections are no longer taken."""
    with contextlib.suppress(OSError):
        answered = b"yes"
        while answered:
            with socket.create_connection(address, 10) as late:
                late.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answered = late.recv(100)


def test_a_request_in_flight_at_sigterm_is_answered_and_the_exit_code_is_0(bundle):
    with daemon(bundle) as line:
        address = (line.url.host, line.url.port)
        with socket.create_connection(address) as client, client.makefile("rb") as answer:
            client.sendall(
                b"POST /classify HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            )
            client.sendall(b"Content-Length: %d\r\n\r\n" % len(RED))
            assert b"100" in answer.readline()  # the daemon is waiting for the image
            client.sendall(RED[:10])
            line.process.send_signal(signal.SIGTERM)
            wait_until_refused(address)
            client.sendall(RED[10:])
            assert b'"label":"red"' in answer.read()
        assert line.process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_connection_does_not_hold_up_the_end(bundle, number):
    before = """
from edge.http import server
server._DRAIN = 1000  # seconds, which requests in hand get; it is a process, and this no setting
"""
    with daemon(bundle, before) as line:
        line.classify(RED)  # the client keeps its connection
        assert line.end(number) == (0, "", "")


def test_a_hang_up_while_the_model_is_loaded_is_heeded_when_the_line_is_ready(bundle):
    before = """
import os, signal
from edge.inference.served_model import Model
load = Model.from_bundle
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGHUP)
    return load(*arguments)
Model.from_bundle = interrupted
"""
    with daemon(bundle, before) as line:  # without settings to read again
        assert line.process.wait(60) == 0


def test_a_signal_amid_a_full_folder_ends_soon_and_leaves_whole_lines(bundle, watched):
    for number in range(3000):
        (watched / f"{number}.png").write_bytes(RED)
    with daemon(bundle, watch=watched) as line:
        line.outcomes(1)
        code, out, _ = line.end()
        assert code == 0
        whole = out.splitlines()[1:]  # of the first, reading one outcome may have read the head
        assert len(whole) < 2998
        assert {json.loads(text)["label"] for text in whole} <= {"red"}


def test_a_thread_that_hangs_does_not_keep_the_line_from_ending_and_is_shown(
    bundle, watched, tmp_path
):
    in_hand = tmp_path / "in hand"
    in_hand.mkdir()
    before = f"""
import pathlib, threading
from edge.daemon import daemon
from edge.inference import pipeline
daemon._LAST_RESORT = 0.5  # it is a process, and this no setting
def hang(path, *_):
    pathlib.Path({str(in_hand)!r}, path.name).touch()
    threading.Event().wait()
pipeline.read_image = hang
"""
    (watched / "part.png").write_bytes(RED)
    with daemon(bundle, before, watch=watched) as line:
        while not any(in_hand.iterdir()):
            assert line.process.poll() is None
        code, _, said = line.end()
    assert code == 1
    assert "Timeout" in said
    assert "in _prepare" in said


# ---------------------------------------------------------------- the watched folder


def test_a_file_that_brings_the_line_down_twice_is_set_aside_and_its_neighbours_are_judged(
    bundle, watched
):
    before = """
import os
from edge.inference import pipeline
read = pipeline.read_image
pipeline.read_image = lambda path, *rest: os.abort() if b"fatal" in path.read_bytes() else \
read(path, *rest)
"""
    for number, content in enumerate((BLUE, RED + b"fatal", GREEN, BLUE)):
        (watched / f"{number}.png").write_bytes(content)
        os.utime(watched / f"{number}.png", (number, number))
    found: dict[str, list[str]] = {}
    for _ in range(2):
        with daemon(bundle, before, watch=watched) as line:
            out, _ = line.process.communicate(timeout=60)
            assert line.process.returncode == -signal.SIGABRT
            found |= {each["image"]: each["label"] for each in map(json.loads, out.splitlines())}
    with daemon(bundle, before, watch=watched) as line:
        while len(found) < 4:
            [each] = line.outcomes(1)
            found[each["image"]] = each.get("label") or each["error"]
        assert line.end()[0] == 0
    assert found.pop("1.png") == "1.png was in hand when the line crashed, 2 times: it is set aside"
    assert found == {"0.png": "blue", "2.png": "green", "3.png": "blue"}


def grow(files: list[BinaryIO], content: Iterator[int], until: Future[Any]) -> Any:
    """Write one byte to each file, and again, until the future has its result."""
    while not until.done():
        byte = bytes([next(content)])
        for file in files:
            file.write(byte)
        wait([until], timeout=0.05)
    return until.result()


def test_a_burst_of_files_is_judged_once_each_also_those_that_still_grow(bundle, watched):
    noise = io.BytesIO()
    Picture.effect_noise((64, 64), 50).save(noise, "PNG")
    content = iter(noise.getvalue())
    growing = [watched / f"growing-{number}.png" for number in range(10)]
    quick = [watched / f"{number}.png" for number in range(40)]
    (watched / "early.png").write_bytes(RED)
    with (
        contextlib.ExitStack() as files,
        daemon(bundle, watch=watched) as line,
        ThreadPoolExecutor(1) as reader,
    ):
        open_files = [files.enter_context(path.open("wb", buffering=0)) for path in growing]
        [early] = grow(open_files, content, reader.submit(line.outcomes, 1))
        for path in quick:
            path.write_bytes(BLUE)
        burst = grow(open_files, content, reader.submit(line.outcomes, 40))
        rest = bytes(content)
        for file in open_files:
            file.write(rest)
        grown = line.outcomes(10)
        assert line.end() == (0, "", "")
    assert (early["image"], early["label"]) == ("early.png", "red")
    assert sorted(outcome["image"] for outcome in burst) == sorted(path.name for path in quick)
    assert {outcome["label"] for outcome in burst} == {"blue"}
    assert sorted(outcome["image"] for outcome in grown) == [path.name for path in growing]
    assert {outcome["type"] for outcome in grown} == {"Verdict"}
    assert len(list(watched.iterdir())) == 51


def test_a_bad_file_is_reported_and_the_next_one_is_judged(bundle, watched):
    with daemon(bundle, watch=watched) as line:
        (watched / "bad.png").write_bytes(b"no image")
        [failure] = line.outcomes(1)
        assert (failure["type"], failure["image"]) == ("Failure", "bad.png")
        (watched / "good.png").write_bytes(RED)
        [verdict] = line.outcomes(1)
        assert verdict["label"] == "red"
        assert line.classify(GREEN).json()["label"] == "green"


def test_a_file_that_a_pipe_replaces_once_it_was_seen_costs_one_failure(bundle, watched):
    """Between the check that it is a file and its decoding, and once more before it is kept."""
    before = """
import os
from edge.inference import pipeline
read = pipeline.read_image
def swapped(path, *rest):
    if path.name == "pipe.png":
        path.unlink()
        os.mkfifo(path)
    return read(path, *rest)
pipeline.read_image = swapped
"""
    (watched / "pipe.png").write_bytes(RED)
    with daemon(bundle, before, watch=watched) as line:
        [failure] = line.outcomes(1)
        assert failure["error"] == "pipe.png cannot be read: it is a pipe or a device"
        (watched / "good.png").write_bytes(BLUE)
        assert line.outcomes(1)[0]["label"] == "blue"
        assert line.end() == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 4])
def test_a_line_that_may_open_few_files_says_so_and_blames_none_of_them(
    bundle: Path, tmp_path: Path, left: int
) -> None:
    """Neither what it remembers nor the model is damaged."""
    code = f"""
import os, resource
import edge.daemon.daemon, onnxruntime
from edge_node.cli.main import main
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
resource.setrlimit(resource.RLIMIT_NOFILE, 2 * (held[-1] + 1 + {left},))
main()
"""
    with serving_daemon(tmp_path, bundle) as line:
        assert line.end()[0] == 0
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        str(bundle),
        "--port",
        "0",
        "--state",
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "too many files" in ended.stderr
    assert "remove" not in ended.stderr
    assert ended.returncode
