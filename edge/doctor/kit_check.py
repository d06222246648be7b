"""Checks of our kit: the validity of its certificate and its charter, and our entry in the charter."""

from dataclasses import replace
from datetime import UTC, datetime

from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from edge.doctor.check_context import CheckContext
from edge.doctor.result import Outcome, Result
from edge.terminal.formatting import EXPIRY_WARNING, format_expiry, pluralize

_RENEW = "ask whoever provisions the federation for a new kit (edge-node provision --renew)"


def certificate(context: CheckContext) -> Result:
    """How long the certificate in our kit is valid."""
    kit = _kit(context)
    return _expiry_result(f"that of {kit.name} in federation {kit.federation}", kit.expires())


def charter(context: CheckContext) -> Result:
    """Whether the charter in our kit is valid and lists us; later checks verify specs against it."""
    context.endpoint = replace(context.endpoint, signer=(signer := MessageSigner(_kit(context))))
    members = signer.members
    return _expiry_result(f"version {members.version}, {pluralize(len(members.nodes), 'node')}", members.expires)


def _expiry_result(text: str, end: datetime) -> Result:
    now = datetime.now(UTC)
    days = (end - now).total_seconds() / 86_400
    outcome: Outcome = "failure" if days < 0 else "warning" if end - now < EXPIRY_WARNING else "ok"
    return Result(
        outcome, f"{text}, {format_expiry(end, now)}", "" if outcome == "ok" else _RENEW, {"days_left": round(days, 1)}
    )


def _kit(context: CheckContext) -> Kit:
    assert context.endpoint.kit is not None
    return context.endpoint.kit
