"""Vertical federated learning as a kind of federation: what the kernel must know of it."""

from broker_config.protocol.federation_kinds import FederationKind
from edge.terminal.formatting import pluralize
from edge_node.extensions.vfl.messages import VflHello, VflOverview, VflSpec
from edge_node.extensions.vfl.status_text import describe_status
from edge_node.extensions.vfl.topics import TOPICS


def _summarize(spec: VflSpec) -> str:
    return pluralize(len(spec.sensors), "sensor")


def _has_ended(overview: VflOverview) -> bool:
    return overview.status == "finished"


KIND = FederationKind(
    spec=VflSpec,
    overview=VflOverview,
    others=(VflHello,),
    topics=TOPICS,
    summary=_summarize,
    status=describe_status,
    has_ended=_has_ended,
    first_step=(
        "sensors that learn together: edge-node vfl coordinate, then vfl join; see docs/vfl.md"
    ),
)
