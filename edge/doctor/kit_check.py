"""Our kit: until when its certificate holds, and whether its charter does and has us."""

from dataclasses import replace
from datetime import UTC, datetime

from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from edge.doctor.check_context import Trial
from edge.doctor.result import Found, Outcome
from edge.terminal.formatting import EXPIRY_WARNING, format_expiry, pluralize

_RENEW = "ask whoever provisions the federation for a new kit (edge-node provision --renew)"


def certificate(trial: Trial) -> Found:
    """How long the certificate in our kit holds."""
    kit = _kit(trial)
    return _judge(f"that of {kit.name} in federation {kit.federation}", kit.expires())


def charter(trial: Trial) -> Found:
    """Whether the charter in our kit holds and has us; from now on specs are checked by it."""
    trial.endpoint = replace(trial.endpoint, signer=(signer := MessageSigner(_kit(trial))))
    members = signer.members
    return _judge(f"version {members.version}, {pluralize(len(members.nodes), 'node')}", members.expires)


def _judge(told: str, end: datetime) -> Found:
    now = datetime.now(UTC)
    days = (end - now).total_seconds() / 86_400
    outcome: Outcome = "failure" if days < 0 else "warning" if end - now < EXPIRY_WARNING else "ok"
    return Found(
        outcome, f"{told}, {format_expiry(end, now)}", "" if outcome == "ok" else _RENEW, {"days_left": round(days, 1)}
    )


def _kit(trial: Trial) -> Kit:
    assert trial.endpoint.kit is not None
    return trial.endpoint.kit
