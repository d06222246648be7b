"""Head and sensors on the messages that they receive, without broker and clock."""

import json
import queue
import shutil
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.codec import DecodeError, decode, decode_any, encode
from broker_config.protocol.errors import EdgeNodeError, PeerError
from edge_node.extensions.vfl import frames, tensor_frames
from edge_node.extensions.vfl import messages as vfl_messages
from edge_node.extensions.vfl.algorithm import Representation, Sensor
from edge_node.extensions.vfl.checkpoint import Checkpoints
from edge_node.extensions.vfl.client.local_round import LocalRound
from edge_node.extensions.vfl.client.sensor_trainer import SensorTrainer
from edge_node.extensions.vfl.client.target_round import ProductPositions, check_frame
from edge_node.extensions.vfl.frames import (
    PART,
    Embeddings,
    Graded,
    Opened,
    Represented,
    decode_frame,
    encode_frame,
)
from edge_node.extensions.vfl.line.sensor_rows import RowFile
from edge_node.extensions.vfl.messages import Recipe
from edge_node.extensions.vfl.server.absence import ImputedEmbedding, LastEmbedding
from edge_node.extensions.vfl.server.connection import HeadConnection
from edge_node.extensions.vfl.server.head_model import root_mean_square_error
from edge_node.extensions.vfl.server.head_state import Member, PartyProgress, find_common_round
from edge_node.extensions.vfl.server.journal import ClosedRound, Journal, history
from edge_node.extensions.vfl.server.round_state import OpenRound, ReportedTimes
from edge_node.extensions.vfl.server.status import StatusTracker
from tests.support.paths import WIRE_FILE
from tests.support.vfl_runs import vfl_spec

RUN, SESSION = "0123456789abcdef", "fedcba9876543210"
SIZES = {"press": 4, "oven": 3}
SPEC = vfl_messages.VflSpec(
    federation="paint",
    run=RUN,
    software="0.1.0",
    sensors=("press", "oven"),
    network="conv",
    cycles=15,
    classes=("good", "bad"),
    channel=vfl_messages.Channel(levels=3),
    absent="last",
)


# What a sensor lacks


def test_a_sensor_learns_from_the_products_alone_that_it_has() -> None:
    samples, labels, there = torch.randn(6, 3, 1), torch.tensor([0, 1, 1, 0, 1, 0]), [0, 2, 5]

    def made(missing: tuple[int, ...], rows: list[int], *, gradient: bool) -> torch.Tensor:
        sensor = Sensor(0, "press", "dense", (3, 1), Recipe(batches=2), 7)
        size = sensor.embed(samples).shape[1]
        torch.manual_seed(3)
        head = {"weight": torch.randn(2, 2 * size), "bias": torch.zeros(2)}
        phi, grade = (torch.randn(6, size), torch.randn(6, size)), torch.randn(6, size)
        reply: tensor_frames.Reply = tensor_frames.GradientBuffer(len(rows), size)
        told: dict[str, Any] = {"run": RUN, "attempt": 1, "round": 4}
        frame: Any = next(tensor_frames.gradient_frames(grade[rows], 0.5, 3, **told))
        if not gradient:
            reply = tensor_frames.RepresentationBuffer(len(rows), (size, size), 2)
            whole = Representation(head, tuple(each[rows] for each in phi))
            frame = next(tensor_frames.representation_frames(whole, labels[rows], (3, 1), **told))
        turn = LocalRound(4, samples[rows], missing, [], reply)
        assert turn.put(frame)
        assert turn.train(sensor) == (3 if len(missing) < len(rows) else 0)
        return torch.cat([each.flatten() for each in sensor.model.state_dict().values()])

    everything = list(range(6))
    for gradient in (False, True):
        learnt = made((1, 3, 4), everything, gradient=gradient)
        assert torch.equal(learnt, made((), there, gradient=gradient))
        assert not torch.equal(learnt, made((), everything, gradient=gradient))
        assert made(tuple(everything), everything, gradient=gradient).isfinite().all()


# Frames


def collecting(*, pairs: bool = False, gaps: bool = True) -> OpenRound:
    return OpenRound(RUN, 2, 7, 5, SIZES, pairs=pairs, gaps=gaps)


def embeddings(
    received: torch.Tensor, second: torch.Tensor | None = None, **fields: Any
) -> list[Embeddings]:
    told = {"run": RUN, "attempt": 2, "round": 7, "session": SESSION, "missing": ()} | fields
    return list(tensor_frames.embedding_frames(received, second, told.pop("missing"), **told))


def test_a_round_is_whole_when_every_row_of_every_sensor_has_arrived_in_any_order() -> None:
    round_, press, oven = collecting(), torch.randn(5, 4), torch.randn(5, 3)
    [frame] = embeddings(press)
    halves = [
        msgspec.structs.replace(
            frame, row=row, received=tensor_frames.to_bytes(press[row : row + 3])
        )
        for row in (2, 0)
    ]
    assert round_.find_missing(list(SIZES)) == ["press", "oven"]
    taken = [
        (round_.add_frame("press", each), round_.received_rows("press"))
        for each in (*halves[:1] * 2, *halves[1:] * 2)
    ]
    assert taken == [(False, 3), (False, 3), (True, 5), (False, 5)]
    assert round_.find_missing(list(SIZES)) == ["oven"]
    assert round_.add_frame("oven", embeddings(oven, missing=(1,))[0])
    received, present = round_.assemble()
    assert torch.equal(received[0], press)
    assert torch.equal(received[1], oven)
    assert present.tolist() == [[True, row != 1] for row in range(5)]


GOOD = torch.ones(5, 4)


@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        ({"received": b""}, "0 bytes are no rows of 4 numbers"),
        ({"received": b"\0" * 15}, "15 bytes are no rows"),
        ({"received": tensor_frames.to_bytes(torch.full((5, 4), torch.nan))}, "NaN or infinity"),
        ({"received": tensor_frames.to_bytes(torch.full((5, 4), torch.inf))}, "NaN or infinity"),
        (
            {"received": tensor_frames.to_bytes(torch.full((5, 4), -1e38))},
            "a number as large as 1e\\+38",
        ),
        ({"row": 1}, "rows 1 to 6 of 5"),
        ({"missing": (5,)}, "row 5 is missing of 5"),
        ({"second": tensor_frames.to_bytes(GOOD)}, "of a second copy"),
        ({"run": "a" * 16}, "of another run"),
        ({"round": 8}, "of round 8, which is not open"),
        ({"attempt": 3, "round": 1}, "which is not open"),
    ],
)
def test_embeddings_that_lie_are_refused_and_their_sender_is_named(
    lie: dict[str, Any], complaint: str
) -> None:
    frame = msgspec.structs.replace(embeddings(GOOD)[0], **lie)
    with pytest.raises(PeerError, match=complaint) as refused:
        collecting().add_frame("press", frame)
    assert refused.value.peer == "press"


def test_embeddings_of_an_earlier_round_or_attempt_are_without_effect() -> None:
    round_ = collecting()
    for old in ({"round": 6}, {"attempt": 1, "round": 9}):
        assert not round_.add_frame("press", embeddings(GOOD, **old)[0])
    assert round_.find_missing(["press"]) == ["press"]


def test_a_federation_that_waits_takes_no_gaps_and_a_learning_denoiser_wants_two_copies() -> None:
    with pytest.raises(PeerError, match="wait"):
        collecting(gaps=False).add_frame("press", embeddings(GOOD, missing=(0,))[0])
    with pytest.raises(PeerError, match="second copy"):
        collecting(pairs=True).add_frame("press", embeddings(GOOD)[0])
    assert collecting(pairs=True).add_frame("press", embeddings(GOOD, GOOD)[0])


@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_what_the_head_sends_back_comes_in_parts_that_fit_and_is_the_same_to_the_last_bit(
    count: int,
) -> None:
    state = {"weight": torch.randn(3, 40), "bias": torch.randn(3)}
    phi = Representation(state, (torch.randn(count, 28), torch.randn(count, 12)))
    labels = torch.randint(3, (count,))
    made = list(
        tensor_frames.representation_frames(phi, labels, (2, 0), run=RUN, attempt=1, round=1)
    )
    payloads = [encode_frame(each) for each in made]
    assert max(map(len, payloads)) < PART + 4096
    back = tensor_frames.RepresentationBuffer(count, (28, 12), 3)
    for payload in reversed(payloads[1:]):
        frame = decode_frame(payload)
        assert isinstance(frame, Represented)
        back.put(frame)
        assert not back.complete
    back.put(made[0])
    assert back.complete
    representation, read = back.whole
    assert torch.equal(read, labels)
    assert all(
        torch.equal(*pair) for pair in zip(representation.embeddings, phi.embeddings, strict=True)
    )
    assert all(torch.equal(representation.head[name], state[name]) for name in state)
    assert back.iterations == (2, 0)


def test_a_sensor_s_timings_are_believed_as_far_as_the_head_s_clock_goes() -> None:
    assert ReportedTimes(0.2, 0.1, 0.05).clipped(0.5, 0.1) == ReportedTimes(0.2, 0.1, 0.05)
    assert ReportedTimes(1e7, 1e7, 1e7).clipped(0.5, 0.1) == ReportedTimes(0.5, 0.0, 0.1)
    assert ReportedTimes(0.2, 1e7, 0.0).clipped(0.5, 0.1) == ReportedTimes(0.2, 0.3, 0.0)


# What a sensor believes


def test_positions_are_known_from_the_frames_that_told_them() -> None:
    known = ProductPositions()
    known.put(10, ["a", "b", "c"], 9)
    known.put(13, ["d"], 9)
    assert known.get(11, 14) == ["b", "c", "d"]
    assert known.get(9, 12) is known.get(13, 15) is None
    known.drop_before(12)
    assert (known.get(12, 14), known.get(11, 13)) == (["c", "d"], None)
    known.put(30, ["x"], 9)  # a frame in between was lost
    assert (known.get(12, 14), known.get(30, 31)) == (None, ["x"])
    for since in range(31, 999, 4):
        known.put(since, ["a", "b", "c", "d"], 9)
    assert (known.get(990, 999), known.get(989, 999)) == ([*"dabcdabcd"], None)


ASKED = Opened(run=RUN, attempt=1, round=3, first=16, last=20, since=18, products=("a", "b"))
REPRESENTED = Represented(
    run=RUN,
    attempt=1,
    round=3,
    row=0,
    head=bytes(40),
    embeddings=(bytes(8), bytes(8)),
    labels=b"\0\0",
    iterations=(2, 0),
)
GRADED = Graded(run=RUN, attempt=1, round=3, row=0, gradient=bytes(16), curvature=0.5, iterations=2)


@pytest.mark.parametrize(
    ("frame", "lie"),
    [
        (ASKED, {"first": 20}),
        (ASKED, {"first": 20, "last": 16}),
        (ASKED, {"last": 21}),
        (ASKED, {"round": 4}),
        (ASKED, {"round": 0, "first": 10, "last": 14, "since": 12}),
        (ASKED, {"since": 19}),
        (ASKED, {"since": 15}),
        (ASKED, {"products": ("a",) * 10}),
        (GRADED, {"iterations": 3}),
        (REPRESENTED, {"iterations": (2, 1 << 31)}),
    ],
)
def test_a_sensor_does_not_do_what_the_spec_does_not_say(frame: Any, lie: dict[str, Any]) -> None:
    spec = msgspec.structs.replace(SPEC, window=vfl_messages.Window(start=16, chunk=2, size=4))
    check_frame(frame, spec)
    with pytest.raises(ValueError, match=r"position|iterations"):
        check_frame(msgspec.structs.replace(frame, **lie), spec)


def test_a_sensor_does_not_take_more_memory_for_a_round_than_it_can_be_meant_to(
    tmp_path: Path,
) -> None:
    """A head that names products of two letters would have each take 80 KB here."""
    (tmp_path / "rows.csv").write_text("product,force,heat\n")
    rows = RowFile(tmp_path / "rows.csv", ("force", "heat"))
    huge = msgspec.structs.replace(
        SPEC, network="dense", cycles=10_000, window=vfl_messages.Window(start=100_000)
    )
    sensor = SensorTrainer(huge, huge.sensors[0], rows, tmp_path, print, lambda *_, **__: None)
    assert sensor.product_bytes == 4 * (2 * 10_000 + 16 * len(huge.sensors))
    opened = msgspec.structs.replace(ASKED, round=1, first=0, last=100_000, since=0)
    with pytest.raises(ValueError, match="100000 products"):
        check_frame(opened, huge, sensor.product_bytes)
    check_frame(opened, huge, 1000)


def test_what_the_head_sends_back_has_the_width_that_embeddings_have() -> None:
    buffer = tensor_frames.RepresentationBuffer(1, (2, 2), 2)
    with pytest.raises(ValueError, match="2 numbers"):
        buffer.put(msgspec.structs.replace(REPRESENTED, embeddings=(bytes(8), bytes(12))))


# Disk


def kept(folder: Path) -> tuple[int, ...]:
    """Rounds that a process that starts now can go back to."""
    return Checkpoints(folder, pytest.fail).rounds


def saved(folder: Path, *rounds: int) -> Checkpoints:
    """Checkpoints, made at the end of these rounds."""
    checkpoints = Checkpoints(folder, pytest.fail)
    for round_ in rounds:
        checkpoints.save(round_, {"w": torch.full((2,), float(round_))})
    return checkpoints


def test_the_four_newest_checkpoints_are_kept_and_going_back_makes_later_ones_void(
    tmp_path: Path,
) -> None:
    checkpoints = saved(tmp_path, 20, 40, 60, 80, 100)
    assert checkpoints.rounds == kept(tmp_path) == (40, 60, 80, 100)
    assert checkpoints.load(80)["w"].tolist() == [80.0, 80.0]
    checkpoints.drop(61)
    assert kept(tmp_path) == (40, 60)
    (tmp_path / f"{100:012}-{'0' * 64}.safetensors.tmp").write_bytes(b"half of it")
    assert kept(tmp_path) == (40, 60)


def test_the_beginning_can_be_gone_back_to_until_four_checkpoints_have_been_made(
    tmp_path: Path,
) -> None:
    checkpoints = saved(tmp_path, 20)
    assert kept(tmp_path) == (0, 20)
    checkpoints.drop(1)
    assert kept(tmp_path) == (0,)
    saved(tmp_path, 20, 40, 60, 80).drop(21)
    assert kept(tmp_path) == (20,)
    sensors = {"press": PartyProgress(20, (20,)), "oven": PartyProgress(0, (0,))}
    assert find_common_round(PartyProgress(20, (20,)), sensors) is None


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_counts(tmp_path: Path) -> None:
    saved(tmp_path, 20, 40)
    beginning, first, newest = sorted(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    told: list[str] = []
    assert Checkpoints(tmp_path, told.append).rounds == (0, 20)
    assert told == [
        f"the checkpoint {newest} is damaged and removed: the newest left is that of round 20"
    ]
    assert kept(tmp_path) == (0, 20)
    for path in (beginning, first):
        path.write_bytes(b"")
    with pytest.raises(EdgeNodeError, match="checkpoint") as caught:
        Checkpoints(tmp_path, pytest.fail)
    assert f"remove {tmp_path}" in caught.value.remedy
    shutil.rmtree(tmp_path)
    with pytest.raises(EdgeNodeError, match="no checkpoint"):
        Checkpoints(tmp_path, pytest.fail, begun=True)
    assert kept(tmp_path) == (0,)


def test_the_journal_keeps_members_attempts_and_rounds_of_which_replays_replace_the_first(
    tmp_path: Path,
) -> None:
    spec = vfl_messages.VflSpec(
        federation="f", run=RUN, software="s", sensors=("a",), network="dense", classes=("x", "y")
    )
    journal = Journal(tmp_path)
    journal.begin(spec)
    journal.admit(RUN, "a", Member("1" * 16, 3))
    now, second, third = (journal.attempt(RUN) for _ in range(3))
    assert now >= 100 * (time.time() - 60), "also if the journal is an older copy"
    assert now < second < third
    facts = [
        ClosedRound(
            round=number,
            attempt=attempt,
            first=0,
            last=9,
            iterations=(1,),
            loss=0.5,
            seconds=0.1,
            collection={},
            communication={},
            iteration={},
        )
        for number, attempt in ((1, 1), (2, 1), (2, 2))
    ]
    journal.close_rounds(RUN, facts[:2])
    journal.close_rounds(RUN, facts[2:])
    journal.close()
    again = Journal(tmp_path)
    assert (again.newest(), again.members(RUN)) == (spec, {"a": Member("1" * 16, 3)})
    again.close()
    assert history(tmp_path) == [facts[0], facts[2]]


# What the head says


def test_a_head_cut_off_from_the_broker_outlives_an_hour_without_piling_up_messages() -> None:
    nobody, endpoint, tracker = (
        cast(Any, None),
        Endpoint.parse("mqtt://127.0.0.1:1"),
        StatusTracker(SPEC),
    )
    connection = HeadConnection(endpoint, SPEC, SESSION, queue.Queue(), nobody, nobody, nobody)
    for _ in range(3600):
        overview = tracker.next_overview(
            41, "open", ["press"], paused=True, awaited="oven", anyway=True
        )
        assert overview is not None
        connection.publish_status(overview)
    assert not connection.mqtt.is_crowded


# Absence


def test_what_is_absent_is_a_products_last_embedding_or_the_mean() -> None:
    rule, seen = LastEmbedding(), torch.randn(4, 2)
    everything = torch.ones(4, 1, dtype=torch.bool)
    assert torch.equal(rule.substitute(10, [seen], everything)[0], seen)
    state = rule.state()
    rule = LastEmbedding()
    rule.restore(state)
    [filled] = rule.substitute(12, [torch.zeros(4, 2)], ~everything)
    assert torch.equal(filled[:2], seen[2:])
    assert torch.allclose(filled[2:], seen.mean(0))
    [filled] = rule.substitute(9, [torch.zeros(3, 2)], ~everything[:3])  # the run has gone back
    assert torch.equal(filled[1:], seen[:2])
    present = torch.tensor([[True], [False], [True], [True]])
    newer = torch.randn(4, 2)
    [filled] = rule.substitute(11, [newer], present)
    assert torch.equal(filled[[0, 2, 3]], newer[[0, 2, 3]])
    assert torch.equal(filled[1], seen[2])


def test_what_is_absent_is_told_by_the_others_embeddings() -> None:
    rule, present = ImputedEmbedding([2, 2]), torch.ones(50, 2, dtype=torch.bool)
    for _ in range(30):
        one = torch.randn(50, 2)
        rule.substitute(0, [one, 3 * one + 1], present)
    one = torch.randn(5, 2)
    present = torch.tensor([[True, False]] * 5)
    assert torch.allclose(
        rule.substitute(0, [one, torch.zeros(5, 2)], present)[1], 3 * one + 1, atol=0.05
    )


# The first version's bytes


HELLO = vfl_messages.VflHello(
    session=SESSION,
    run=RUN,
    software="0.1.0",
    identity="1" * 16,
    incarnation=3,
    columns=2,
    round=41,
    kept=(20, 40),
)
OVERVIEW = vfl_messages.VflOverview(
    run=RUN,
    time=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
    round=41,
    status="open",
    loss=0.25,
    rate=12.5,
    sensors=(vfl_messages.SensorState(name="press", present=True, latency=0.03, iterations=2),),
)
FRAMES = [
    Opened(run=RUN, attempt=1, round=2, first=100, last=1100, since=1000, products=("P1", "P2")),
    embeddings(torch.ones(1, 2), torch.zeros(1, 2), missing=(0,), collection=0.5)[0],
    next(
        tensor_frames.representation_frames(
            Representation(
                {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, (torch.ones(1, 2),)
            ),
            torch.tensor([1]),
            (2,),
            run=RUN,
            attempt=1,
            round=2,
        )
    ),
    next(tensor_frames.gradient_frames(torch.ones(1, 2), 0.5, 2, run=RUN, attempt=1, round=2)),
    frames.Embedded(run=RUN, round=2, product="P1", embedding=b"\0" * 8),
]
WIRE_V1 = json.loads(WIRE_FILE.read_text())


@pytest.mark.parametrize(
    "message", [SPEC, HELLO, OVERVIEW], ids=lambda message: type(message).__name__
)
def test_the_first_version_s_messages_of_a_federation_decode_for_ever(message: Any) -> None:
    assert decode(json.dumps(WIRE_V1[type(message).__name__]).encode(), type(message)) == message
    assert decode(encode(message), type(message)) == message
    with pytest.raises(DecodeError, match="vfl"):
        decode_any(encode(message))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_the_first_version_s_frames_decode_for_ever(frame: frames.AnyFrame) -> None:
    assert decode_frame(bytes.fromhex(WIRE_V1[type(frame).__name__])) == frame
    assert decode_frame(encode_frame(frame)) == frame
    for length in range(len(encode_frame(frame))):
        with pytest.raises(DecodeError):
            decode_frame(encode_frame(frame)[:length])


def test_the_journal_keeps_a_round_whose_loss_was_not_finite(tmp_path: Path) -> None:
    spec, journal = vfl_spec(), Journal(tmp_path)
    with closing(journal):
        journal.begin(spec)
        journal.close_rounds(
            spec.run,
            [
                ClosedRound(
                    round=1,
                    attempt=1,
                    first=0,
                    last=9,
                    iterations=(1,),
                    loss=float("nan"),
                    seconds=0.1,
                    collection={},
                    communication={},
                    iteration={},
                )
            ],
        )
    assert [each.loss for each in history(tmp_path)] == [None]


def test_the_error_of_classes_that_are_numbers_is_that_of_their_mean() -> None:
    spec = msgspec.structs.replace(vfl_spec(), classes=("0", "10"), reading="expectation")
    logits, labels = torch.tensor([[0.0, 0.0], [30.0, 0.0]]), torch.tensor([1, 0])
    # 5 and 0 beside the label
    assert root_mean_square_error(logits, labels, spec) == pytest.approx(12.5**0.5)
    assert root_mean_square_error(logits, labels, vfl_spec()) is None
