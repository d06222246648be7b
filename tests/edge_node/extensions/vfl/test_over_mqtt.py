"""A vertical federation over a real broker learns what a simulation learns, to the last bit."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode, encode
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Refusal, RoundState
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.client.join import join
from edge_node.extensions.vfl.client.sensor_trainer import SensorTrainer
from edge_node.extensions.vfl.client.session import take_part
from edge_node.extensions.vfl.client.target_round import MissingRows
from edge_node.extensions.vfl.frames import (
    LARGEST_FRAME,
    Embeddings,
    Opened,
    Represented,
    decode_frame,
    encode_frame,
)
from edge_node.extensions.vfl.line.sensor_rows import Samples
from edge_node.extensions.vfl.messages import (
    Channel,
    Denoising,
    Privacy,
    Recipe,
    VflHello,
    VflSpec,
    Window,
)
from edge_node.extensions.vfl.party_export import SensorBundleWriter
from edge_node.extensions.vfl.server.connection import HeadConnection
from edge_node.extensions.vfl.server.head_model import HeadModel
from edge_node.extensions.vfl.server.head_state import Timing
from edge_node.extensions.vfl.server.journal import Journal, history
from edge_node.extensions.vfl.server.labels import Labels
from edge_node.extensions.vfl.server.spec import new_run_id
from edge_node.extensions.vfl.server.startup import coordinate
from tests.support.vfl_runs import (
    Threads,
    draw,
    feed,
    in_threads,
    left,
    simulate_run,
    simulated,
    source,
    vfl_spec,
    written,
)
from tests.support.waiting import wait_until
from trainer import progress


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A mosquitto for one federation after another."""
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield running.url


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (1, {}),
        (
            2,
            {
                "channel": Channel(levels=3),
                "denoising": Denoising(rounds=4, epochs=2),
                "head_iterations": 5,
            },
        ),
        (
            3,
            {
                "labels": "server",
                "channel": Channel(sigma=0.3, loss=0.1),
                "recipe": Recipe(batches=7),
            },
        ),
    ],
    ids=["plain", "noise and denoiser", "labels at the head"],
)
def test_a_federation_over_a_broker_ends_with_the_same_bytes_as_the_simulation(
    seed: int, settings: dict[str, Any], broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec(("press", "oven", "lamp"), seed=seed, **settings)
    draw(tmp_path / "data", 100, seed)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=7)
    assert left(spec, tmp_path, 7) == simulated(spec, tmp_path / "data", 7)


def test_sensors_scale_by_their_operating_condition_also_after_a_restart(
    broker: str, tmp_path: Path
) -> None:
    """Speed is one of press's features; lamp's rows have conditions of two settings."""
    spec = vfl_spec(("press", "lamp"), seed=5)
    settings = {"press": ("speed",), "lamp": ("red", "blue")}
    draw(tmp_path / "data", 100, 5)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 9, settings=settings) as parties:
        parties.start("head", "press")
        parties.start("lamp")
        parties.reach(3)
        parties.stop("press")
        parties.start("press")
        parties.end()
    assert left(spec, tmp_path, 9) == simulated(spec, tmp_path / "data", 9, settings)
    assert left(spec, tmp_path, 9) != simulated(spec, tmp_path / "data", 9)
    with pytest.raises(UsageError, match=r"press .*condition.*speed"):
        take_part(
            spec,
            "press",
            source(tmp_path / "data", "press"),
            Endpoint.parse(broker),
            tmp_path / "press",
            report=progress.ignore,
        )


def test_a_clock_that_jumps_by_years_changes_no_byte(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, jumps = time.time, itertools.cycle((0.0, 3e8, -6e8))  # seconds
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    spec = vfl_spec(seed=4)
    draw(tmp_path / "data", 100, 4)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=7)
    assert left(spec, tmp_path, 7) == simulated(spec, tmp_path / "data", 7)


def test_frames_that_are_lost_are_asked_for_again_and_change_no_byte(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of what the head sends gets lost on its way."""
    publish, sent = HeadConnection.publish_frame, iter(range(10_000))

    def lossy(connection: HeadConnection, topic: str, payload: bytes) -> None:
        if next(sent) % 3 != 1:
            publish(connection, topic, payload)

    monkeypatch.setattr(HeadConnection, "publish_frame", lossy)
    spec = vfl_spec(seed=4)
    draw(tmp_path / "data", 100, 4)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=7, timing=Timing(again=0.05))
    assert left(spec, tmp_path, 7) == simulated(spec, tmp_path / "data", 7)


@pytest.mark.parametrize("rule", ["last", "impute"])
def test_a_federation_that_need_not_wait_goes_on_without_a_sensor_and_takes_it_back(
    rule: str, broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec(("press", "oven", "lamp"), absent=rule, patience=2.0)
    whole, data = tmp_path / "whole", tmp_path / "data"
    draw(whole, spec.window.span(18)[1], 6)
    feed(whole, data, spec.window.span(6)[1])
    with Threads(spec, broker, data, tmp_path, 18) as parties:
        parties.start("head", *spec.sensors)
        parties.reach(6)
        parties.stop("lamp")
        feed(whole, data, spec.window.span(12)[1])
        parties.reach(12)
        parties.start("lamp")
        parties.until(lambda: parties.events["head"].count(progress.NodeJoined(node="lamp")) == 2)
        feed(whole, data, spec.window.span(18)[1])
        parties.end()
    taken = [each.iterations[2] for each in history(tmp_path / "head")]
    assert len(taken) == 18
    assert 2 in taken[:6]
    assert taken[6:12] == [0] * 6
    assert 2 in taken[12:], (
        "not in each: on a busy machine it may take longer than the head's patience"
    )
    assert left(spec, tmp_path, 18).keys() == {"press", "oven", "lamp", "head"}


@pytest.mark.slow
def test_a_product_that_a_sensor_has_not_seen_holds_up_one_round_only(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up, check = set[tuple[str, ...]](), MissingRows.check

    def checked(
        rows: MissingRows, products: Sequence[str], *given: Any
    ) -> tuple[MissingRows, bool]:
        rows, waits = check(rows, products, *given)
        if waits:
            held_up.add(tuple(products))
        return rows, waits

    monkeypatch.setattr(MissingRows, "check", checked)
    spec = vfl_spec(absent="last", patience=4.0)  # of which half is waited
    draw(tmp_path / "data", 100, 7)
    oven = tmp_path / "data" / "oven.csv"
    rows = oven.read_text().splitlines(keepends=True)
    oven.write_text("".join(row for row in rows if not row.startswith(("p5,", "p22,"))))
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=9)
    assert 0 < len(held_up) <= 2, "p5 is in the first round already; p22 comes in the second"
    assert all(each.iterations == (2, 2) for each in history(tmp_path / "head"))


def test_a_second_head_and_a_second_sensor_of_one_name_are_turned_away(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 40, 8)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties:
        parties.start("head", *spec.sensors)
        parties.reach(3)
        with pytest.raises(UsageError, match="already has"):
            coordinate(
                spec,
                tmp_path / "data/labels.csv",
                Endpoint.parse(broker),
                tmp_path / "other",
                rounds=1,
                new=False,
                report=progress.ignore,
            )
        with pytest.raises(UsageError, match="'oven'"):
            join(
                Endpoint.parse(broker),
                "oven",
                source(tmp_path / "data", "oven"),
                tmp_path / "twin",
                federation=spec.federation,
                wait=5,
                report=progress.ignore,
            )
        with pytest.raises(UsageError, match="'lamp'"):
            join(
                Endpoint.parse(broker),
                "lamp",
                source(tmp_path / "data", "lamp"),
                tmp_path / "lamp",
                federation=spec.federation,
                wait=5,
                report=progress.ignore,
            )


class Liar:
    """Somebody else's sensor "oven", who says what it likes."""

    def __init__(self, broker: str, spec: VflSpec):
        self._spec, self.inbox = spec, queue.Queue[Any]()
        self.mqtt = MqttClient(Endpoint.parse(broker), "liar", inbox=self.inbox, persistent=False)
        self.mqtt.max_payload = LARGEST_FRAME
        federation = spec.federation
        self.gradients, self.down = (
            vfl_topics.gradients(federation, "oven"),
            topics.down(federation, "oven"),
        )
        self.mqtt.subscribe(self.gradients, self.down, vfl_topics.opened(federation))

    def hello(self, round_: int = 0) -> None:
        hello = VflHello(
            session="a" * 16,
            run=self._spec.run,
            software="other",
            identity="b" * 16,
            incarnation=1,
            columns=1,
            round=round_,
            kept=(0,),
        )
        self.mqtt.publish(topics.up(self._spec.federation, "oven"), encode(hello))

    def embed(self, opened: Opened, value: float) -> None:
        lie = Embeddings(
            run=self._spec.run,
            attempt=opened.attempt,
            round=opened.round,
            session="a" * 16,
            row=0,
            received=np.full((opened.last - opened.first, 16), value, np.float32).tobytes(),
        )
        self.mqtt.publish(
            vfl_topics.embeddings(self._spec.federation, "oven"), encode_frame(lie), qos=0
        )

    def hears(self, topic: str) -> bytes:
        """The next message on a topic."""
        while not isinstance(event := self.inbox.get(timeout=60), Delivery) or event.topic != topic:
            pass
        return event.payload

    def opened(self) -> Opened:
        frame = decode_frame(self.hears(vfl_topics.opened(self._spec.federation)))
        assert isinstance(frame, Opened)
        return frame


def test_a_sensor_that_lies_is_named_and_refused_and_the_federation_goes_on_without_it(
    broker: str, tmp_path: Path
) -> None:
    """It sends what is no number."""
    spec = vfl_spec(absent="last", patience=3.0)  # in which the lie comes, on a busy machine too
    draw(tmp_path / "data", 60, 9)
    liar = Liar(broker, spec)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties, liar.mqtt:
        parties.start("head", "press")
        # the head listens
        parties.until(lambda: progress.NodeJoined(node="press") in parties.events.get("head", []))
        liar.hello()
        liar.embed(liar.opened(), np.nan)
        while b"Refusal" not in (answer := liar.hears(liar.down)):
            pass
        assert "NaN or infinity" in decode(answer, Refusal).reason
        parties.reach(3)
        [refused] = [
            each for each in parties.events["head"] if isinstance(each, progress.NodeRefused)
        ]
        assert (refused.node, refused.round) == ("oven", 0)


def test_a_sensor_that_has_a_round_repeated_again_and_again_has_to_wait(
    broker: str, tmp_path: Path
) -> None:
    """A Hello is small, and what it asks for may have megabytes."""
    spec, asked = vfl_spec(absent="last", patience=0.3), 40
    draw(tmp_path / "data", spec.window.span(2)[1], 9)
    liar = Liar(broker, spec)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties, liar.mqtt:
        parties.start("head", "press")
        # the head listens
        parties.until(lambda: progress.NodeJoined(node="press") in parties.events.get("head", []))
        liar.hello()
        while liar.opened().round < 2:
            pass
        parties.until(lambda: "round 2 of 1000: loss" in parties.said("head"))
        for _ in range(asked):
            liar.hello(1)
        answers = [liar.inbox.get(timeout=60) for _ in range(asked)]
        while sum(each.topic == liar.down for each in answers) < asked:
            answers.append(liar.inbox.get(timeout=60))
        replies = [each for each in answers if each.topic == liar.gradients]
        assert {type(decode_frame(each.payload)) for each in replies} == {Opened, Represented}
        assert len(replies) == 2 * 8
        assert parties.said("head").count("oven asks for the same round again and again") == 1


def test_a_sensor_that_floods_the_head_with_embeddings_is_named_and_the_others_go_on(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec(absent="last", patience=0.3)
    draw(tmp_path / "data", 60, 9)
    liar = Liar(broker, spec)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties, liar.mqtt:
        parties.start("head", "press")
        # the head listens
        parties.until(lambda: progress.NodeJoined(node="press") in parties.events.get("head", []))
        liar.hello()
        opened = liar.opened()
        for _ in range(500):
            liar.embed(opened, 0.0)
        parties.until(lambda: "oven sends many times" in parties.said("head"))
        parties.reach(6)
        assert parties.said("head").count("many times what its embeddings take") == 1


def test_a_sensor_that_joins_a_federation_that_is_over_serves_its_model_and_waits_for_a_head(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 100, 9)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=4)
    told: list[progress.AnyEvent] = []
    ended = take_part(
        spec,
        "press",
        source(tmp_path / "data", "press"),
        Endpoint.parse(broker),
        tmp_path / "press",
        report=told.append,
        stop=lambda: progress.Note(text="the head is not connected; waiting for it") in told,
    )
    assert ended == (4, False), (
        "what is retained may be older than a head that asks for more rounds"
    )
    bundles = SensorBundleWriter(tmp_path / "bundle", source(tmp_path / "data", "press"))
    press = source(tmp_path / "data", "press")
    SensorTrainer(spec, "press", press, tmp_path / "press", print, bundles).deploy(last=True)
    assert (tmp_path / "bundle" / "manifest.json").is_file()


def test_sensors_that_are_started_again_after_a_run_take_part_in_the_next_one(
    broker: str, tmp_path: Path
) -> None:
    """Also where the next head comes after they have found what is retained of the last run."""
    spec = vfl_spec()
    draw(tmp_path / "data", 100, 9)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=3)
    told: dict[str, list[progress.AnyEvent]] = {name: [] for name in spec.sensors}
    stopping = threading.Event()

    def run(name: str) -> tuple[int, bool]:
        return join(
            Endpoint.parse(broker),
            name,
            source(tmp_path / "data", name),
            tmp_path / name,
            federation=spec.federation,
            wait=60,
            report=told[name].append,
            stop=stopping.is_set,
        )

    away = progress.Note(text="the head is not connected; waiting for it")
    following = msgspec.structs.replace(spec, run=new_run_id())
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run, name) for name in spec.sensors]
        try:
            wait_until(lambda: all(away in events for events in told.values()))
            with Threads(following, broker, tmp_path / "data", tmp_path, 4, new=True) as head:
                head.start("head")
                assert [job.result(120) for job in jobs] == [(4, True), (4, True)]
        finally:
            stopping.set()


def test_a_sensor_that_has_no_rows_yet_takes_part_and_starts_again(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec(absent="last", patience=0.3)
    draw(tmp_path / "data", 100, 10)
    (tmp_path / "data" / "oven.csv").write_text("product,heat\n")
    labels = tmp_path / "data" / "labels.csv"
    rows = labels.read_text().splitlines(keepends=True)
    first = 1 + spec.window.span(3)[1]
    labels.write_text("".join(rows[:first]))  # the run must not end before the sensor is back
    with Threads(spec, broker, tmp_path / "data", tmp_path, 7) as parties:
        parties.start("head", *spec.sensors)
        parties.reach(3)
        parties.stop("oven")
        parties.start("oven")
        parties.until(lambda: parties.events["head"].count(progress.NodeJoined(node="oven")) == 2)
        with labels.open("a") as file:
            file.writelines(rows[first:])
        parties.end()
    assert left(spec, tmp_path, 7).keys() == {"press", "oven", "head"}
    assert {each.iterations for each in history(tmp_path / "head")} == {(2, 0)}


def test_a_sensor_that_says_the_same_again_and_again_is_not_waited_for(
    broker: str, tmp_path: Path
) -> None:
    """Somebody else's sensor, who never gets beyond its first row."""
    spec = vfl_spec(absent="last", patience=0.3)
    draw(tmp_path / "data", 60, 10)
    with (
        Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties,
        MqttClient(
            Endpoint.parse(broker), "dripping", inbox=queue.Queue(), persistent=False
        ) as mqtt,
    ):
        parties.start("head", "press")
        # the head listens
        parties.until(lambda: progress.NodeJoined(node="press") in parties.events.get("head", []))
        hello = VflHello(
            session="a" * 16,
            run=spec.run,
            software="other",
            identity="b" * 16,
            incarnation=1,
            columns=1,
            round=0,
            kept=(0,),
        )
        row = Embeddings(
            run=spec.run, attempt=1, round=1, session="a" * 16, row=0, received=bytes(4 * 16)
        )
        mqtt.publish(topics.up(spec.federation, "oven"), encode(hello))

        def closed() -> bool:
            mqtt.publish(vfl_topics.embeddings(spec.federation, "oven"), encode_frame(row), qos=0)
            return written(tmp_path / "head") >= 3

        parties.until(closed)


def test_a_sensor_that_starts_again_takes_no_other_spec_of_its_run(
    broker: str, tmp_path: Path
) -> None:
    """A head could have it leave its noise out."""
    spec = vfl_spec(privacy=Privacy(clip=1.0, multiplier=0.3))
    draw(tmp_path / "data", 40, 8)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties:
        parties.start("head", *spec.sensors)
        parties.reach(3)
        parties.stop("oven")
        parties.spec = msgspec.structs.replace(spec, privacy=Privacy())
        parties.start("oven")
        with pytest.raises(UsageError, match="privacy was Privacy"):
            parties.end()
        parties.spec = spec
        parties.start("oven")
        parties.reach(6)


def test_an_older_spec_that_is_said_again_ends_no_sensor(broker: str, tmp_path: Path) -> None:
    """A broker has kept what the head has signed."""
    spec = vfl_spec()
    draw(tmp_path / "data", spec.window.span(9)[1], 11)
    feed(tmp_path / "data", tmp_path / "grown", spec.window.span(3)[1])
    mqtt = MqttClient(Endpoint.parse(broker), "echo", inbox=queue.Queue(), persistent=False)
    with Threads(spec, broker, tmp_path / "grown", tmp_path, 9) as parties, mqtt:
        parties.start("head", *spec.sensors)
        parties.reach(3)
        older = msgspec.structs.replace(spec, run="a" * 16)
        mqtt.publish(topics.spec(spec.federation), encode(older), retain=True)
        feed(tmp_path / "data", tmp_path / "grown", spec.window.span(9)[1])
        parties.end()
    assert left(spec, tmp_path, 9) == simulated(spec, tmp_path / "data", 9)


def test_an_old_end_of_the_federation_that_is_said_again_ends_no_sensor(
    broker: str, tmp_path: Path
) -> None:
    """As above: once the run had three rounds only."""
    spec = vfl_spec(absent="last", patience=5.0)
    draw(tmp_path / "data", spec.window.span(9)[1], 13)
    feed(tmp_path / "data", tmp_path / "grown", spec.window.span(6)[1])
    mqtt = MqttClient(Endpoint.parse(broker), "echo", inbox=queue.Queue(), persistent=False)
    with Threads(spec, broker, tmp_path / "grown", tmp_path, 9) as parties, mqtt:
        parties.start("head", *spec.sensors)
        parties.reach(3)
        mqtt.publish(
            topics.round_state(spec.federation),
            encode(RoundState(run=spec.run, round=3, status="finished")),
        )
        parties.reach(6)
        feed(tmp_path / "data", tmp_path / "grown", spec.window.span(9)[1])
        parties.end()


def test_while_a_product_is_late_a_sensor_only_looks_for_news(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = vfl_spec(patience=0.1)
    draw(tmp_path / "data", 60, 14)
    oven = tmp_path / "data" / "oven.csv"
    *rows, last = oven.read_text().splitlines(keepends=True)[: spec.window.span(2)[1] + 1]
    oven.write_text("".join(rows))
    take, taken = Samples.get, list[int]()

    def counted(samples: Samples, products: Sequence[str]) -> Any:
        taken.append(len(products))
        return take(samples, products)

    looks, refresh = list[None](), Samples.refresh
    monkeypatch.setattr(Samples, "get", counted)
    monkeypatch.setattr(Samples, "refresh", lambda samples: looks.append(None) or refresh(samples))
    with Threads(spec, broker, tmp_path / "data", tmp_path, 2) as parties:
        parties.start("head", *spec.sensors)
        parties.until(lambda: "oven lacks product" in parties.said("oven"))
        before = len(taken)
        parties.until(lambda: parties.said("head").count("which lacks") > 0)
        enough = len(looks) + 5
        parties.until(lambda: len(looks) >= enough)  # it looks, and no more
        assert len(taken) == before
        with oven.open("a") as file:
            file.write(last)
        parties.end()


@pytest.mark.parametrize("seed", [1, 2])
def test_new_products_are_judged_by_a_model_that_has_not_learnt_from_them(
    seed: int, broker: str, tmp_path: Path
) -> None:
    spec, rounds = vfl_spec(seed=seed, window=Window(start=20, chunk=9, size=24)), 8
    draw(tmp_path / "data", spec.window.span(rounds)[1], seed)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds)
    simulation, right = simulate_run(spec, tmp_path / "data"), list[bool]()
    for closed in history(tmp_path / "head"):
        new = slice(closed.last - spec.window.chunk, closed.last)
        if closed.round > 1:
            logits = simulation.predict([each[new] for each in simulation.stream.samples])
            right += (logits.argmax(1) == simulation.stream.labels[new]).tolist()
            assert closed.validation
            assert (closed.validation.products, closed.validation.accuracy) == (
                len(right),
                np.mean(right),
            )
        else:
            assert closed.validation is None
        simulation.step([2, 2])


def test_a_head_that_waits_publishes_for_whom(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, awaited = vfl_spec(patience=0.2), list[str]()
    draw(tmp_path / "data", 60, 9)
    monkeypatch.setattr(
        HeadConnection, "publish_status", lambda _, overview: awaited.append(overview.awaited)
    )
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties:
        parties.start("head", "press")
        parties.until(lambda: "oven" in awaited)


def test_a_run_that_overshoots_says_so(broker: str, tmp_path: Path) -> None:
    spec = vfl_spec(recipe=Recipe(eta=40.0))
    draw(tmp_path / "data", spec.window.span(20)[1], 1)
    parties = in_threads(spec, broker, tmp_path / "data", tmp_path, 20)
    assert parties.said("head").count("steps are too large") == 1
    assert parties.said("head").count("steps of a round add up to 80") == 1


def test_a_run_that_ends_without_having_learnt_anything_says_so(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec(recipe=Recipe(eta=1e-6), window=Window(start=20, chunk=100, size=120))
    draw(tmp_path / "data", spec.window.span(8)[1], 1)
    parties = in_threads(spec, broker, tmp_path / "data", tmp_path, 8)
    assert parties.said("head").count("nothing of use is learnt yet") == 1
    assert "add up to" not in parties.said("head")


def test_a_head_that_goes_back_forgets_how_products_were_judged_that_are_judged_again(
    tmp_path: Path,
) -> None:
    spec = vfl_spec()
    with contextlib.closing(Journal(tmp_path)) as journal:
        columns, labels = (
            dict.fromkeys(spec.sensors, 2),
            Labels(tmp_path / "labels.csv", spec.classes),
        )
        model = HeadModel(
            spec, columns, labels, tmp_path, journal, print, deploy=lambda *_, **__: None
        )
        model.validation.add(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
        model.restore(0)
        assert model.validation.score() is None


@pytest.mark.parametrize("absent", ["last", "impute"])
def test_products_that_a_file_has_passed_over_are_not_waited_for(
    absent: str, broker: str, tmp_path: Path
) -> None:
    """Every chunk lacks one, and the file is far beyond it:
    otherwise each would cost half the patience.
    """
    # half of which is longer than a test may take
    spec, rounds = vfl_spec(absent=absent, patience=1000.0), 6
    draw(tmp_path / "data", spec.window.span(rounds)[1] + 200, 14)
    oven = tmp_path / "data" / "oven.csv"
    kept = [
        line
        for number, line in enumerate(oven.read_text().splitlines(keepends=True))
        if number % 4 != 2
    ]
    oven.write_text("".join(kept))
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds)
    closed = history(tmp_path / "head")
    assert {each.iterations for each in closed} == {(2, 2)}


def test_of_two_processes_of_one_sensor_one_gives_way_and_says_why(
    broker: str, tmp_path: Path
) -> None:
    """With a broker that does not say why it closes a connection."""
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 15)
    lost = threading.Event()

    def play(folder: str) -> str:
        try:
            take_part(
                spec,
                "press",
                source(tmp_path / "data", "press"),
                Endpoint.parse(broker),
                tmp_path / folder,
                report=progress.ignore,
                stop=lost.is_set,
            )
        except EdgeNodeError as error:
            lost.set()
            return error.what
        return "goes on"

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(play, ("one", "other"))) == [
            "another process has connected as press",
            "goes on",
        ]


def test_a_sensor_comes_with_the_columns_that_it_has_learnt_from_once_it_has_learnt(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 100, 11)
    press = source(tmp_path / "data", "press")
    with Threads(spec, broker, tmp_path / "data", tmp_path, 4) as parties:
        parties.start("head")
        before = press._replace(columns=("speed",))
        take_part(
            spec,
            "press",
            before,
            Endpoint.parse(broker),
            tmp_path / "press",
            report=progress.ignore,
            stop=lambda: progress.NodeJoined(node="press") in parties.events["head"],
        )
        parties.start(*spec.sensors)
        parties.end()
    for other in (press._replace(columns=("speed", "force")), press._replace(columns=("speed",))):
        with pytest.raises(UsageError, match=r"press .*force.*speed"):
            take_part(
                spec,
                "press",
                other,
                Endpoint.parse(broker),
                tmp_path / "press",
                report=progress.ignore,
            )


@pytest.mark.parametrize("lacking", ["p5,", "p"], ids=["one product", "all products"])
def test_the_denoiser_learns_from_the_products_that_all_sensors_have(
    lacking: str, broker: str, tmp_path: Path
) -> None:
    channel, denoising = Channel(levels=3), Denoising(rounds=3, epochs=2)
    spec = vfl_spec(absent="last", patience=2.0, channel=channel, denoising=denoising)
    draw(tmp_path / "data", 60, 12)
    oven = tmp_path / "data" / "oven.csv"
    oven.write_text(
        "".join(row for row in oven.read_text().splitlines(True) if not row.startswith(lacking))
    )
    parties = in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=3)
    [newest] = (tmp_path / "head").glob("*/*3-*.safetensors")
    learnt = any(name.startswith("denoiser.adam") for name in load_file(newest))
    assert learnt is ("has learnt nothing" not in parties.said("head")) is (lacking == "p5,")
