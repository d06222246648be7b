"""What passes through the broker, and how fast."""

import statistics
import time
from typing import Literal

from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.transfer.blob_transfer import CHUNK, CHUNK_OVERHEAD
from edge.doctor.check_context import Trial
from edge.doctor.probe_connection import LostError, Wire
from edge.doctor.result import Found

INDEX = 4  # bytes before a chunk's data
SMALLER = [size * 1024 for size in (128, 64, 32, 16, 8, 4)]  # bytes of a chunk to be tried after the usual ones
OVERTAKEN = 1.0  # seconds that a message may be behind one that was sent after it
TRIPS = 40
VOLUME = 4 << 20  # bytes
OUTSTANDING = 4  # chunks on their way
SLOW = 100_000  # bytes a second: a model of 9 MB takes minutes
HELD = (0.030, 0.070)  # seconds that Nagle's algorithm holds a small message back, for want of an acknowledgement
HELD_OFTEN = 6  # of TRIPS

Fate = Literal["passes", "is dropped", "ends the connection", "does not come back in time"]


def packets(trial: Trial) -> Found:
    """Whether messages as large as ours pass: control messages, and chunks of models."""
    with trial.wire("packets") as wire:
        limit = wire.offered("MaximumPacketSize")
    trial.chunk = min(CHUNK, limit - CHUNK_OVERHEAD) if limit else CHUNK
    control, chunk = (_fate(trial, size) for size in (MAX_MESSAGE, trial.chunk + INDEX))
    told = f"a packet may have {limit:,} bytes; " if limit else "no limit is told; "
    told += f"a message of {MAX_MESSAGE:,} bytes {control}, a chunk of {trial.chunk:,} {chunk}"
    figures = {"chunk_bytes": trial.chunk} | ({"packet_bytes": limit} if limit else {})
    if control == chunk == "passes":
        return Found("ok", told, figures=figures)
    if "does not come back in time" in (control, chunk):
        return Found("unknown", told, "the connection is slow: try again with a longer --timeout", figures)
    remedy = "let messages of 262,144 bytes and 1,024 more pass (mosquitto: message_size_limit 0, max_packet_size)"
    if chunk != "passes":
        trial.chunk = next((size for size in SMALLER if _fate(trial, size + INDEX) == "passes"), 1024)
        remedy += f", or let the coordinator cut smaller chunks: --chunk-size {trial.chunk // 1024}"
        figures["chunk_bytes"] = trial.chunk
    return Found("failure", told, remedy, figures)


def _fate(trial: Trial, size: int) -> Fate:
    """What becomes of a message of `size` bytes, which another one follows."""
    last = b"last"
    try:
        with trial.wire("packets") as wire:
            if size + CHUNK_OVERHEAD > (wire.offered("MaximumPacketSize") or size + CHUNK_OVERHEAD) + INDEX:
                return "is dropped"
            wire.subscribe(trial.topic)
            wire.send(trial.topic, bytes(size))
            wire.send(trial.topic, last)
            wire.find(lambda each: len(each.payload) == size or each.payload == last)
            if wire.find(lambda each: len(each.payload) == size, OVERTAKEN):
                return "passes"
            return "is dropped" if wire.arrivals else "does not come back in time"
    except LostError:
        return "ends the connection"


def latency(trial: Trial) -> Found:
    """How long a small message takes to the broker and back, alone and behind another one."""
    with trial.wire("latency") as wire:
        wire.subscribe(trial.topic)
        pairs = [[_trip(wire, trial.topic, f"{number}-{count}", count) for count in (1, 2)] for number in range(TRIPS)]
    trips = sorted(alone for alone, _ in pairs if alone is not None)
    behind = [second for _, second in pairs if second is not None]
    if len(trips) + len(behind) < 2 * TRIPS:
        return Found("failure", "small messages are lost", "look into the broker's log")
    trial.round_trip = typical = statistics.median(trips)
    held = sum(HELD[0] < trip - typical < HELD[1] for trip in behind)
    usual = trips[-HELD_OFTEN // 2] - typical < HELD[0]  # a busy machine delays those alone as well
    figures = {"median_milliseconds": round(typical * 1e3, 2), "longest_milliseconds": round(trips[-1] * 1e3, 2)}
    told = f"{typical * 1e3:.1f} ms to the broker and back, {trips[-1] * 1e3:.1f} ms at most of {TRIPS} times"
    if held >= HELD_OFTEN and usual:
        return Found(
            "warning",
            f"{told}; {held} of {TRIPS} second messages waited for an acknowledgement of the first",
            "send small messages at once (mosquitto: set_tcp_nodelay true)",
            figures,
        )
    return Found("ok", told, figures=figures)


def _trip(wire: Wire, topic: str, name: str, count: int) -> float | None:
    """Seconds until the last of `count` messages is back; None if it does not come."""
    last = f"{name}-{count}".encode()
    started = time.perf_counter()
    for number in range(1, count + 1):
        wire.send(topic, f"{name}-{number}".encode(), qos=0)
    back = wire.find(lambda each: each.payload == last)
    wire.forget()
    return back.at - started if back else None


def throughput(trial: Trial) -> Found:
    """How fast chunks go to the broker and back, within the time for one answer."""
    count = max(1, VOLUME // trial.chunk)
    with trial.wire("throughput") as wire:
        wire.subscribe(trial.topic)
        sent = 0
        started = time.perf_counter()
        deadline = time.monotonic() + trial.timeout
        while len(wire.arrivals) < count and time.monotonic() < deadline:
            while sent < min(count, len(wire.arrivals) + OUTSTANDING):
                wire.send(trial.topic, sent.to_bytes(INDEX, "big") + bytes(trial.chunk), qos=0)
                sent += 1
            wire.await_arrivals(len(wire.arrivals) + 1, deadline - time.monotonic())
        arrivals = wire.arrivals
    if not arrivals:
        told = f"no chunk came back within {trial.timeout:g} s"
        return Found("failure", told, "take a faster way; how slow this one is, a longer --timeout shows")
    rate = len(arrivals) * trial.chunk / (arrivals[-1].at - started)
    figures = {"bytes_per_second": round(rate), "lost": sent - len(arrivals)}
    told = f"{rate / 1e6:.1f} MB/s to the broker and back at once"
    if trial.model_bytes:
        told += f": a model in {trial.model_bytes / rate:.1f} s"
    if rate < SLOW:
        return Found("warning", told, "expect slow rounds; mosquitto 2.0's WebSockets are slow: use mqtts://", figures)
    return Found("ok", told, figures=figures)
