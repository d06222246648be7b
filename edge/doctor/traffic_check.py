"""Checks of traffic through the broker: sizes, latency, throughput."""

import statistics
import time
from typing import Literal

from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.transfer.blob_transfer import CHUNK, CHUNK_OVERHEAD
from edge.doctor.check_context import CheckContext
from edge.doctor.probe_connection import LostError, ProbeConnection
from edge.doctor.result import Result

INDEX = 4  # bytes before a chunk's data
SMALLER = [size * 1024 for size in (128, 64, 32, 16, 8, 4)]  # bytes of a chunk, tried if the usual size fails
OVERTAKEN = 1.0  # seconds by which a later message may overtake one
TRIPS = 40
VOLUME = 4 << 20  # bytes
OUTSTANDING = 4  # chunks in flight
SLOW = 100_000  # bytes per second: a model of 9 MB takes minutes
HELD = (0.030, 0.070)  # seconds for which Nagle's algorithm delays a small message until an acknowledgement
HELD_OFTEN = 6  # of TRIPS

Fate = Literal["passes", "is dropped", "ends the connection", "does not come back in time"]


def packets(context: CheckContext) -> Result:
    """Whether messages of our sizes pass: control messages, and chunks of models."""
    with context.connection("packets") as connection:
        limit = connection.offered("MaximumPacketSize")
    context.chunk = min(CHUNK, limit - CHUNK_OVERHEAD) if limit else CHUNK
    control, chunk = (_try_size(context, size) for size in (MAX_MESSAGE, context.chunk + INDEX))
    text = f"a packet may have {limit:,} bytes; " if limit else "no limit is told; "
    text += f"a message of {MAX_MESSAGE:,} bytes {control}, a chunk of {context.chunk:,} {chunk}"
    figures = {"chunk_bytes": context.chunk} | ({"packet_bytes": limit} if limit else {})
    if control == chunk == "passes":
        return Result("ok", text, figures=figures)
    if "does not come back in time" in (control, chunk):
        return Result("unknown", text, "the connection is slow: try again with a longer --timeout", figures)
    remedy = "let messages of 262,144 bytes and 1,024 more pass (mosquitto: message_size_limit 0, max_packet_size)"
    if chunk != "passes":
        context.chunk = next((size for size in SMALLER if _try_size(context, size + INDEX) == "passes"), 1024)
        figures["chunk_bytes"] = context.chunk
    return Result("failure", text, remedy, figures)


def _try_size(context: CheckContext, size: int) -> Fate:
    """Send a message of `size` bytes and a small one after it; return what becomes of the first."""
    last = b"last"
    try:
        with context.connection("packets") as connection:
            if size + CHUNK_OVERHEAD > (connection.offered("MaximumPacketSize") or size + CHUNK_OVERHEAD) + INDEX:
                return "is dropped"
            connection.subscribe(context.topic)
            connection.send(context.topic, bytes(size))
            connection.send(context.topic, last)
            connection.wait_for(lambda each: len(each.payload) == size or each.payload == last)
            if connection.wait_for(lambda each: len(each.payload) == size, OVERTAKEN):
                return "passes"
            return "is dropped" if connection.received else "does not come back in time"
    except LostError:
        return "ends the connection"


def latency(context: CheckContext) -> Result:
    """Round-trip time of a small message, alone and right after another one."""
    with context.connection("latency") as connection:
        connection.subscribe(context.topic)
        pairs = [
            [_measure_trip(connection, context.topic, f"{number}-{count}", count) for count in (1, 2)]
            for number in range(TRIPS)
        ]
    trips = sorted(alone for alone, _ in pairs if alone is not None)
    behind = [second for _, second in pairs if second is not None]
    if len(trips) + len(behind) < 2 * TRIPS:
        return Result("failure", "small messages are lost", "look into the broker's log")
    context.round_trip = typical = statistics.median(trips)
    held = sum(HELD[0] < trip - typical < HELD[1] for trip in behind)
    usual = trips[-HELD_OFTEN // 2] - typical < HELD[0]  # a busy machine delays single messages as well
    figures = {"median_milliseconds": round(typical * 1e3, 2), "longest_milliseconds": round(trips[-1] * 1e3, 2)}
    text = f"{typical * 1e3:.1f} ms to the broker and back, {trips[-1] * 1e3:.1f} ms at most of {TRIPS} times"
    if held >= HELD_OFTEN and usual:
        return Result(
            "warning",
            f"{text}; {held} of {TRIPS} second messages waited for an acknowledgement of the first",
            "send small messages at once (mosquitto: set_tcp_nodelay true)",
            figures,
        )
    return Result("ok", text, figures=figures)


def _measure_trip(connection: ProbeConnection, topic: str, name: str, count: int) -> float | None:
    """Seconds until the last of `count` messages is back; None if it never arrives."""
    last = f"{name}-{count}".encode()
    started = time.perf_counter()
    for number in range(1, count + 1):
        connection.send(topic, f"{name}-{number}".encode(), qos=0)
    back = connection.wait_for(lambda each: each.payload == last)
    connection.clear()
    return back.at - started if back else None


def throughput(context: CheckContext) -> Result:
    """Throughput of chunks to the broker and back, measured for at most one timeout."""
    count = max(1, VOLUME // context.chunk)
    with context.connection("throughput") as connection:
        connection.subscribe(context.topic)
        sent = 0
        started = time.perf_counter()
        deadline = time.monotonic() + context.timeout
        while len(connection.received) < count and time.monotonic() < deadline:
            while sent < min(count, len(connection.received) + OUTSTANDING):
                connection.send(context.topic, sent.to_bytes(INDEX, "big") + bytes(context.chunk), qos=0)
                sent += 1
            connection.wait_for_count(len(connection.received) + 1, deadline - time.monotonic())
        messages = connection.received
    if not messages:
        text = f"no chunk came back within {context.timeout:g} s"
        return Result("failure", text, "take a faster way; how slow this one is, a longer --timeout shows")
    rate = len(messages) * context.chunk / (messages[-1].at - started)
    figures = {"bytes_per_second": round(rate), "lost": sent - len(messages)}
    text = f"{rate / 1e6:.1f} MB/s to the broker and back at once"
    if context.model_bytes:
        text += f": a model in {context.model_bytes / rate:.1f} s"
    if rate < SLOW:
        return Result("warning", text, "expect slow rounds; mosquitto 2.0's WebSockets are slow: use mqtts://", figures)
    return Result("ok", text, figures=figures)
