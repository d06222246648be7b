"""Checks of what the broker keeps for absent clients: retained messages, sessions, queues, wills."""

import time

from broker_config.mqtt.client import SESSION_EXPIRY
from edge.doctor.check_context import SESSION, CheckContext
from edge.doctor.result import Result

QUEUED = 1000  # messages sent to a disconnected session
NEEDED = 100  # messages that must be kept for a federation of up to 10 nodes
PER_NODE = 10  # likewise for a larger one: a coordinator that returns finds a few messages of each node
SOON = 0.5  # seconds
KEEPALIVE = 5  # seconds; a broker drops a silent client after 1.5 times as long
_LOG = "look into the broker's log"


def retained(context: CheckContext) -> Result:
    """Whether the broker retains the last message on a topic for later subscribers."""
    with context.connection("retained") as connection:
        allowed = connection.offered("RetainAvailable") != 0
        denied = context.retain(connection, b"kept") if allowed else "not offered"
    with context.connection("retained") as connection:
        connection.subscribe(context.topic)
        kept = connection.wait_for(lambda each: each.retain and each.payload == b"kept", None if allowed else 0)
        cleared = allowed and not context.retain(connection, b"")
    if not kept:
        return Result(
            "failure",
            f"a retained message is not kept{f': {denied}' if denied else ''}",
            "have the broker retain messages (mosquitto: retain_available true)",
        )
    if not cleared:
        return Result("failure", "a retained message cannot be cleared", _LOG)
    text = "a message is there for whoever comes later"
    return Result(
        "ok", f"{text}; whether it survives the broker's restart cannot be seen (mosquitto: persistence true)"
    )


def session(context: CheckContext) -> Result:
    """Whether the broker keeps a session over a reconnection, and for how long."""
    with context.connection("session", session=SESSION_EXPIRY) as connection:
        connection.subscribe(context.topic)
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
    with context.connection("queue", session=SESSION) as connection:
        connection.subscribe(context.topic)
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
            kept = sorted({int(each.payload[1:]) for each in connection.received if each.payload.startswith(b"q")})
    needed = max([NEEDED, *(PER_NODE * spec.nodes for spec in context.specs)])
    figures = {"sent": QUEUED, "kept": len(kept), "needed": needed, "messages_per_second": round(QUEUED / took)}
    if not taken:
        return Result(
            "unknown", f"the broker did not take {QUEUED} messages in time", "try a longer --timeout", figures
        )
    text = f"{len(kept)} of {QUEUED} messages are kept for whoever is away"
    if len(kept) >= min(needed, QUEUED):
        return Result("ok", f"{text}; {needed} are needed", figures=figures)
    text += "" if not kept else ", the oldest" if kept[0] == 0 else ", the newest"
    remedy = f"keep more (mosquitto: max_queued_messages {max(QUEUED, needed)}, max_queued_bytes 0)"
    return Result("warning" if kept else "failure", f"{text}; {needed} are needed", remedy, figures)


def redelivery(context: CheckContext) -> Result:
    """Whether an unacknowledged message is delivered again after a broken connection, marked as a duplicate."""
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
            "federations recover when the other side connects anew, later; mosquitto delivers it again",
        )
    if not again.duplicate:
        return Result("ok", "an unacknowledged message comes again, though not marked as a duplicate")
    return Result("ok", "an unacknowledged message comes again after a broken connection, marked as a duplicate")


def will(context: CheckContext) -> Result:
    """Whether the last will is published when a connection breaks."""
    with context.connection("watch") as watch:
        watch.subscribe(context.topic)
        dying = context.connection("will", will=(context.topic, b"will"), keepalive=KEEPALIVE).open()
        cut = time.perf_counter()
        dying.abort()
        heard = watch.wait_for(lambda each: each.payload == b"will", max(context.timeout, 2 * KEEPALIVE))
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
        "expect that a node's crash is noticed after half a minute, or connect without proxy or address translation",
        figures,
    )
