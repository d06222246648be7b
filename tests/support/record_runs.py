"""Runs of a coordinator for its record, and bundles that come of them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from broker_config.protocol.messages import RecordHead
from broker_config.security.message_signing import MessageSigner
from broker_config.storage import hash_chain
from edge.bundle.bundle_format import Signing
from edge_node.extensions.record.record_file import stored_lines
from tests.support.federation_keys import FederationKeys, soon
from tests.support.ledger_runs import drafted
from tests.support.tiny_bundle import PROVENANCE, tiny_bundle
from trainer.federation.server.journal import Blob, Journal

BROADCASTS = [Blob(letter * 64, 9) for letter in "bcd"]


def coordinate(
    folder: Path, *, weight: float = 1.0, members: Sequence[str] = ("plant-a", "plant-b")
) -> str:
    """A finished run of two rounds in a coordinator's folder."""
    spec = msgspec.structs.replace(drafted()[0], run="a" * 16)
    folder.mkdir(parents=True, exist_ok=True)
    written = Journal(folder)
    written.begin(spec, BROADCASTS[0])
    for round_ in (1, 2):
        written.open_round(spec.run, round_, BROADCASTS[round_ - 1], ())
        for node in members:
            written.add_contribution(spec.run, round_, node, weight, Blob(f"{round_}" * 64, 7))
    written.conclude(spec.run, BROADCASTS[2])
    written.close()
    return spec.run


def newest_head(folder: Path) -> RecordHead:
    return [head for _, head in hash_chain.follow(stored_lines(folder))][-1]


def bundle_of(folder: Path, run: str, head: RecordHead, keys: FederationKeys) -> Path:
    """A bundle that plant-a has signed, made of the result of that run under this record."""
    head = MessageSigner(keys.kit("coordinator")).sign_head(head)
    broadcast = keys.broadcast(run=run, round=2, digest=BROADCASTS[2].digest, record=head)
    signing = Signing(keys.keys["plant-a"], keys.charter(), broadcast, soon(days=90))
    provenance = msgspec.structs.replace(PROVENANCE, record=head)
    tiny_bundle(
        folder,
        node="plant-a",
        federation="steel",
        run=run,
        round_=2,
        signing=signing,
        provenance=provenance,
    )
    return folder
