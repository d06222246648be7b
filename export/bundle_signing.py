"""Signing of bundles by the node whose model it is, for what its coordinator has sent it."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Manifest
from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from broker_config.security.signing import ForgedError, SigningKey
from edge.bundle.bundle_format import Signing
from edge.bundle.verification import verify_broadcast
from trainer.methods import make
from trainer.models.fusion import OWN, RECEIVED, WEIGHTED_SUM, infer_fusion
from trainer.models.named_tensors import add_prefix, is_frozen, strip_prefix
from trainer.models.network import Tensors, to_arrays
from trainer.training.personal_model import ModelMetadata


class Signer:
    """A node's kit, for bundles that may be served for so many days.

    Raises:
        UsageError: the kit has been replaced, or its charter has expired.
    """

    def __init__(self, kit: Kit, days: int):
        self._kit = kit
        self._charter = MessageSigner(kit).members
        self._days = timedelta(days=days)

    def check(self, metadata: ModelMetadata, tensors: Tensors, source: Path) -> Signing:
        """What signs the bundle of this model.

        Raises:
            UsageError: it is another node's, or was not made from what the coordinator has signed.
        """
        kit = self._kit
        if (metadata.node, metadata.federation) != (kit.name, kit.federation):
            raise UsageError(
                f"the model in {source} is of {metadata.node} in federation "
                f"{metadata.federation!r}, the kit of {kit.name} in {kit.federation!r}",
                "sign each model with the kit of its own node",
            )
        try:
            broadcast = verify_broadcast(metadata, self._charter)
            _check_received(metadata, tensors, broadcast)
        except ForgedError as error:
            raise UsageError(
                f"the model in {source} was not made from a broadcast of its coordinator: {error}",
                "sign a model that was trained with kits, or export this one without --kit",
            ) from None
        return self._signing(broadcast)

    def own(self) -> Signing:
        """What signs a bundle of a model that the kit's owner has made from no broadcast:
        a line's.
        """
        return self._signing(None)

    def _signing(self, broadcast: Manifest | None) -> Signing:
        expires = datetime.now(UTC).replace(microsecond=0) + self._days
        return Signing(SigningKey(self._kit.signing), self._kit.charter, broadcast, expires)


def _check_received(metadata: ModelMetadata, tensors: Tensors, broadcast: Manifest) -> None:
    """Where a model serves the received encoder as it came,
    raise ForgedError unless it is the broadcast's.

    A method with a weighted sum serves it so, also mixed with what was trained alone; where a
    method concatenates, the node has trained it further.
    """
    method = make(metadata.method, metadata.training, metadata.options)
    if method.fusion is not WEIGHTED_SUM or RECEIVED not in infer_fusion(tensors).encoders:
        return
    stem = {name: value for name, value in tensors.items() if is_frozen(name)}
    received = {**stem, **add_prefix(OWN, strip_prefix(RECEIVED, tensors))}
    if hashlib.sha256(encode_tensors(to_arrays(received))).hexdigest() != broadcast.digest:
        raise ForgedError("its received encoder is another one")
