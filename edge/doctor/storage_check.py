"""What the broker keeps for those who are away: retained messages, sessions, queues, wills."""

import time

from broker_config.mqtt.client import SESSION_EXPIRY
from edge.doctor.check_context import SESSION, Trial
from edge.doctor.result import Found

QUEUED = 1000  # messages sent to a session that is away
NEEDED = 100  # of them that must be kept for a federation of up to 10 nodes
PER_NODE = 10  # likewise for a larger one: a coordinator that is away finds a few messages of each node
SOON = 0.5  # seconds
KEEPALIVE = 5  # seconds; a broker gives up a silent client after one and a half
_LOG = "look into the broker's log"


def retained(trial: Trial) -> Found:
    """Whether the broker keeps the last message on a topic for whoever comes later."""
    with trial.wire("retained") as wire:
        allowed = wire.offered("RetainAvailable") != 0
        denied = trial.retain(wire, b"kept") if allowed else "not offered"
    with trial.wire("retained") as wire:
        wire.subscribe(trial.topic)
        kept = wire.find(lambda each: each.retain and each.payload == b"kept", None if allowed else 0)
        cleared = allowed and not trial.retain(wire, b"")
    if not kept:
        return Found(
            "failure",
            f"a retained message is not kept{f': {denied}' if denied else ''}",
            "have the broker retain messages (mosquitto: retain_available true)",
        )
    if not cleared:
        return Found("failure", "a retained message cannot be cleared", _LOG)
    told = "a message is there for whoever comes later"
    return Found("ok", f"{told}; whether it survives the broker's restart cannot be seen (mosquitto: persistence true)")


def session(trial: Trial) -> Found:
    """Whether the broker keeps a session over a reconnection, and for how long."""
    with trial.wire("session", session=SESSION_EXPIRY) as wire:
        wire.subscribe(trial.topic)
        granted = wire.offered("SessionExpiryInterval")
    with trial.wire("session", session=SESSION) as wire:
        resumed = wire.resumed
    trial.wire("session").open().close()
    if not resumed:
        return Found(
            "failure",
            "the session is gone after a reconnection: messages to those who are away are lost",
            "allow persistent sessions for this user",
        )
    if granted is not None and granted < SESSION_EXPIRY:
        return Found(
            "warning",
            f"kept for {granted:,} s only",
            f"keep sessions for {SESSION_EXPIRY:,} s (mosquitto: persistent_client_expiration 1d)",
            {"seconds": granted},
        )
    return Found("ok", f"resumed after a reconnection; asked to be kept for {SESSION_EXPIRY:,} s")


def queue(trial: Trial) -> Found:
    """How many messages the broker keeps for a session that is away."""
    with trial.wire("queue", session=SESSION) as wire:
        wire.subscribe(trial.topic)
    started = time.perf_counter()
    with trial.wire("sender") as sender:
        mids = [sender.send(trial.topic, f"q{number}".encode()) for number in range(QUEUED)]
        taken = all(sender.await_acknowledged(mid) for mid in mids)
        took = time.perf_counter() - started
        with trial.wire("queue", session=SESSION) as wire:
            wire.find(lambda each: each.payload == f"q{QUEUED - 1}".encode(), SOON)
            deadline = time.monotonic() + trial.timeout
            while time.monotonic() < deadline:  # a message after the queue's comes once that is empty
                sender.publish(trial.topic, b"after")
                if wire.find(lambda each: each.payload == b"after", SOON):
                    break
            kept = sorted({int(each.payload[1:]) for each in wire.arrivals if each.payload.startswith(b"q")})
    needed = max([NEEDED, *(PER_NODE * spec.nodes for spec in trial.specs)])
    figures = {"sent": QUEUED, "kept": len(kept), "needed": needed, "messages_per_second": round(QUEUED / took)}
    if not taken:
        return Found("unknown", f"the broker did not take {QUEUED} messages in time", "try a longer --timeout", figures)
    told = f"{len(kept)} of {QUEUED} messages are kept for whoever is away"
    if len(kept) >= min(needed, QUEUED):
        return Found("ok", f"{told}; {needed} are needed", figures=figures)
    told += "" if not kept else ", the oldest" if kept[0] == 0 else ", the newest"
    remedy = f"keep more (mosquitto: max_queued_messages {max(QUEUED, needed)}, max_queued_bytes 0)"
    return Found("warning" if kept else "failure", f"{told}; {needed} are needed", remedy, figures)


def redelivery(trial: Trial) -> Found:
    """Whether a message whose acknowledgement was lost with the connection comes again, marked as a duplicate."""
    first = trial.wire("redelivery", session=SESSION, holds=True).open()
    first.subscribe(trial.topic)
    with trial.wire("sender") as sender:
        sender.publish(trial.topic, b"again")
    arrived = first.find(lambda each: each.payload == b"again")
    first.cut()
    if not arrived:
        return Found("failure", "a message with QoS 1 did not arrive", _LOG)
    with trial.wire("redelivery", session=SESSION) as second:
        again = second.find(lambda each: each.payload == b"again", min(trial.timeout, 2 + 10 * trial.round_trip))
    if not again:
        return Found(
            "warning",
            "a message that arrived while the connection broke is not delivered again",
            "federations recover when the other side connects anew, later; mosquitto delivers it again",
        )
    if not again.duplicate:
        return Found("ok", "an unacknowledged message comes again, though not marked as a duplicate")
    return Found("ok", "an unacknowledged message comes again after a broken connection, marked as a duplicate")


def will(trial: Trial) -> Found:
    """Whether the others hear of it when a connection breaks."""
    with trial.wire("watch") as watch:
        watch.subscribe(trial.topic)
        dying = trial.wire("will", will=(trial.topic, b"will"), keepalive=KEEPALIVE).open()
        cut = time.perf_counter()
        dying.cut()
        heard = watch.find(lambda each: each.payload == b"will", max(trial.timeout, 2 * KEEPALIVE))
    if not heard:
        return Found(
            "failure",
            "the last will is not published when a connection breaks",
            "allow wills: without them nobody notices that a node is gone",
        )
    figures = {"milliseconds": round((heard.at - cut) * 1e3, 1)}
    told = f"published {heard.at - cut:.3f} s after a connection broke"
    if heard.at - cut < KEEPALIVE:
        return Found("ok", told, figures=figures)
    return Found(
        "warning",
        f"{told}, when the keepalive ran out: something on the way hides it",
        "expect that a node's crash is noticed after half a minute, or connect without proxy or address translation",
        figures,
    )
