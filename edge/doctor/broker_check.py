"""Checks of the broker with our own topic: what passes and how fast,
and what is kept for absent clients.
"""

import statistics
import time
from typing import Literal

from broker_config.mqtt.client import SESSION_EXPIRY
from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.transfer.blob_transfer import CHUNK, CHUNK_OVERHEAD
from edge.doctor.probe import SESSION, CheckContext, LostError, Outcome, ProbeConnection, Result

INDEX = 4  # bytes before a chunk's data
# bytes of a chunk, tried if the usual size fails
SMALLER = [size * 1024 for size in (128, 64, 32, 16, 8, 4)]
OVERTAKEN = 1.0  # seconds by which a later message may overtake one
TRIPS = 40
VOLUME = 4 << 20  # bytes
OUTSTANDING = 4  # chunks in flight
SLOW = 100_000  # bytes per second: a model of 9 MB takes minutes
# seconds for which Nagle's algorithm delays a small message until an acknowledgement
HELD = (0.030, 0.070)
HELD_OFTEN = 6  # of TRIPS

QUEUED = 1000  # messages sent to a disconnected session
NEEDED = 100  # messages that must be kept for a federation of up to 10 nodes
# likewise for a larger one: a coordinator that returns finds a few messages of each node
PER_NODE = 10
SOON = 0.5  # seconds
KEEPALIVE = 5  # seconds; a broker drops a silent client after 1.5 times as long
_LOG = "look into the broker's log"

Fate = Literal["passes", "is dropped", "ends the connection", "does not come back in time"]


def packets(context: CheckContext) -> Result:
    """Whether messages of our sizes pass: control messages, and chunks of models."""
    with context.connection("packets") as connection:
        limit = connection.offered("MaximumPacketSize")
    context.chunk = min(CHUNK, limit - CHUNK_OVERHEAD) if limit else CHUNK
    control, chunk = (_try_size(context, size) for size in (MAX_MESSAGE, context.chunk + INDEX))
    text = f"a packet may have {limit:,} bytes; " if limit else "no limit is told; "
    text += f"a message of {MAX_MESSAGE:,} bytes {control}, a chunk of {context.chunk:,} {chunk}"
    limit_or_empty = {"packet_bytes": limit} if limit else {}
    figures = {"chunk_bytes": context.chunk} | limit_or_empty
    if control == chunk == "passes":
        return Result("ok", text, figures=figures)
    if "does not come back in time" in (control, chunk):
        return Result(
            "unknown", text, "the connection is slow: try again with a longer --timeout", figures
        )
    remedy = (
        "let messages of 262,144 bytes and 1,024 more pass (mosquitto: message_size_limit 0, "
        "max_packet_size)"
    )
    if chunk != "passes":
        context.chunk = next(
            (size for size in SMALLER if _try_size(context, size + INDEX) == "passes"), 1024
        )
        figures["chunk_bytes"] = context.chunk
    return Result("failure", text, remedy, figures)


def _try_size(context: CheckContext, size: int) -> Fate:
    """Send a message of `size` bytes and a small one after it; return what becomes of the first."""
    last = b"last"
    try:
        with context.connection("packets") as connection:
            if (
                size + CHUNK_OVERHEAD
                > (connection.offered("MaximumPacketSize") or size + CHUNK_OVERHEAD) + INDEX
            ):
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
    with context.listening("latency") as connection:
        pairs = []
        for number in range(TRIPS):
            pairs.append(
                [
                    _measure_trip(connection, context.topic, f"{number}-{count}", count)
                    for count in (1, 2)
                ]
            )
    trips = sorted(alone for alone, _ in pairs if alone is not None)
    behind = [second for _, second in pairs if second is not None]
    if len(trips) + len(behind) < 2 * TRIPS:
        return Result("failure", "small messages are lost", _LOG)
    context.round_trip = typical = statistics.median(trips)
    held = sum(HELD[0] < trip - typical < HELD[1] for trip in behind)
    # a busy machine delays single messages as well
    usual = trips[-HELD_OFTEN // 2] - typical < HELD[0]
    figures = {
        "median_milliseconds": round(typical * 1e3, 2),
        "longest_milliseconds": round(trips[-1] * 1e3, 2),
    }
    text = (
        f"{typical * 1e3:.1f} ms to the broker and back, {trips[-1] * 1e3:.1f} ms at most of "
        f"{TRIPS} times"
    )
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
    with context.listening("throughput") as connection:
        sent = 0
        started = time.perf_counter()
        deadline = time.monotonic() + context.timeout
        while len(connection.received) < count and time.monotonic() < deadline:
            while sent < min(count, len(connection.received) + OUTSTANDING):
                connection.send(
                    context.topic, sent.to_bytes(INDEX, "big") + bytes(context.chunk), qos=0
                )
                sent += 1
            connection.wait_for_count(len(connection.received) + 1, deadline - time.monotonic())
        messages = connection.received
    if not messages:
        text = f"no chunk came back within {context.timeout:g} s"
        return Result(
            "failure", text, "take a faster way; how slow this one is, a longer --timeout shows"
        )
    rate = len(messages) * context.chunk / (messages[-1].at - started)
    figures = {"bytes_per_second": round(rate), "lost": sent - len(messages)}
    text = f"{rate / 1e6:.1f} MB/s to the broker and back at once"
    if context.model_bytes:
        text += f": a model in {context.model_bytes / rate:.1f} s"
    if rate < SLOW:
        return Result(
            "warning",
            text,
            "expect slow rounds; mosquitto 2.0's WebSockets are slow: use mqtts://",
            figures,
        )
    return Result("ok", text, figures=figures)


def retained(context: CheckContext) -> Result:
    """Whether the broker retains the last message on a topic for later subscribers."""
    with context.connection("retained") as connection:
        allowed = connection.offered("RetainAvailable") != 0
        denied = context.retain(connection, b"kept") if allowed else "not offered"
    with context.listening("retained") as connection:
        timeout = None if allowed else 0
        kept = connection.wait_for(lambda each: each.retain and each.payload == b"kept", timeout)
        cleared = allowed and not context.retain(connection, b"")
    if not kept:
        denied_text = f": {denied}" if denied else ""
        return Result(
            "failure",
            f"a retained message is not kept{denied_text}",
            "have the broker retain messages (mosquitto: retain_available true)",
        )
    if not cleared:
        return Result("failure", "a retained message cannot be cleared", _LOG)
    text = "a message is there for whoever comes later"
    return Result(
        "ok",
        f"{text}; whether it survives the broker's restart cannot be seen (mosquitto: "
        "persistence true)",
    )


def session(context: CheckContext) -> Result:
    """Whether the broker keeps a session over a reconnection, and for how long."""
    with context.listening("session", session=SESSION_EXPIRY) as connection:
        granted = connection.offered("SessionExpiryInterval")
    with context.connection("session", session=SESSION) as connection:
        resumed = connection.resumed
    context.connection("session").open().close()
    if not resumed:
        return Result(
            "failure",
            "the session is gone after a reconnection: messages to those who are away are lost",
            "allow persistent sessions for this user",
        )
    if granted is not None and granted < SESSION_EXPIRY:
        return Result(
            "warning",
            f"kept for {granted:,} s only",
            f"keep sessions for {SESSION_EXPIRY:,} s (mosquitto: persistent_client_expiration 1d)",
            {"seconds": granted},
        )
    return Result("ok", f"resumed after a reconnection; asked to be kept for {SESSION_EXPIRY:,} s")


def queue(context: CheckContext) -> Result:
    """How many messages the broker keeps for a disconnected session."""
    with context.listening("queue", session=SESSION):
        pass  # the session stays, and the queue fills
    started = time.perf_counter()
    with context.connection("sender") as sender:
        mids = [sender.send(context.topic, f"q{number}".encode()) for number in range(QUEUED)]
        taken = all(sender.wait_for_acknowledgement(mid) for mid in mids)
        took = time.perf_counter() - started
        with context.connection("queue", session=SESSION) as connection:
            connection.wait_for(lambda each: each.payload == f"q{QUEUED - 1}".encode(), SOON)
            deadline = time.monotonic() + context.timeout
            while time.monotonic() < deadline:  # a newer message arrives once the queue is empty
                sender.publish(context.topic, b"after")
                if connection.wait_for(lambda each: each.payload == b"after", SOON):
                    break
            kept = sorted(
                {
                    int(each.payload[1:])
                    for each in connection.received
                    if each.payload.startswith(b"q")
                }
            )
    needed = max([NEEDED, *(PER_NODE * spec.nodes for spec in context.specs)])
    figures = {
        "sent": QUEUED,
        "kept": len(kept),
        "needed": needed,
        "messages_per_second": round(QUEUED / took),
    }
    if not taken:
        return Result(
            "unknown",
            f"the broker did not take {QUEUED} messages in time",
            "try a longer --timeout",
            figures,
        )
    text = f"{len(kept)} of {QUEUED} messages are kept for whoever is away"
    if len(kept) >= min(needed, QUEUED):
        return Result("ok", f"{text}; {needed} are needed", figures=figures)
    if kept:
        text += ", the oldest" if kept[0] == 0 else ", the newest"
    remedy = f"keep more (mosquitto: max_queued_messages {max(QUEUED, needed)}, max_queued_bytes 0)"
    outcome: Outcome = "warning" if kept else "failure"
    return Result(outcome, f"{text}; {needed} are needed", remedy, figures)


def redelivery(context: CheckContext) -> Result:
    """Whether an unacknowledged message is delivered again after a broken connection,
    marked as a duplicate.
    """
    first = context.connection("redelivery", session=SESSION, holds=True).open()
    first.subscribe(context.topic)
    with context.connection("sender") as sender:
        sender.publish(context.topic, b"again")
    arrived = first.wait_for(lambda each: each.payload == b"again")
    first.abort()
    if not arrived:
        return Result("failure", "a message with QoS 1 did not arrive", _LOG)
    with context.connection("redelivery", session=SESSION) as second:
        again = second.wait_for(
            lambda each: each.payload == b"again", min(context.timeout, 2 + 10 * context.round_trip)
        )
    if not again:
        return Result(
            "warning",
            "a message that arrived while the connection broke is not delivered again",
            "federations recover when the other side connects anew, later; mosquitto delivers "
            "it again",
        )
    if not again.duplicate:
        return Result(
            "ok", "an unacknowledged message comes again, though not marked as a duplicate"
        )
    return Result(
        "ok",
        "an unacknowledged message comes again after a broken connection, marked as a duplicate",
    )


def will(context: CheckContext) -> Result:
    """Whether the last will is published when a connection breaks."""
    with context.listening("watch") as watch:
        dying = context.connection(
            "will", will=(context.topic, b"will"), keepalive=KEEPALIVE
        ).open()
        cut = time.perf_counter()
        dying.abort()
        heard = watch.wait_for(
            lambda each: each.payload == b"will", max(context.timeout, 2 * KEEPALIVE)
        )
    if not heard:
        return Result(
            "failure",
            "the last will is not published when a connection breaks",
            "allow wills: without them nobody notices that a node is gone",
        )
    figures = {"milliseconds": round((heard.at - cut) * 1e3, 1)}
    text = f"published {heard.at - cut:.3f} s after a connection broke"
    if heard.at - cut < KEEPALIVE:
        return Result("ok", text, figures=figures)
    return Result(
        "warning",
        f"{text}, when the keepalive ran out: something on the way hides it",
        "expect that a node's crash is noticed after half a minute, or connect without proxy or "
        "address translation",
        figures,
    )
