"""Making of a broadcast from a delta that has arrived and what it is based on."""

import hashlib

from broker_config.protocol.codec import DecodeError, encode_tensors, read_tensors
from broker_config.protocol.messages import Delta, Manifest, Spec
from broker_config.protocol.round_contents import NO_BASE, broadcast_tensors
from broker_config.transfer.blob_transfer import BlobStore
from trainer.federation.update_codec import decode_broadcast
from trainer.models.named_tensors import Arrays


def apply_delta(
    store: BlobStore, spec: Spec, delta: Delta, broadcast: Manifest, *, final: bool
) -> bool:
    """Make a broadcast, or the `final` result, of a delta and its base, both in the store,
    and store it.

    Returns whether it makes what the broadcast's manifest says. The delta is not kept.
    """
    try:
        coded = store.path(delta.blob.digest).read_bytes()
        round_ = broadcast.round + final
        before: Arrays = {}
        if delta.base != NO_BASE:
            expected = broadcast_tensors(spec, round_ - 1)
            before = dict(read_tensors(store.path(delta.base), expected))
        made = encode_tensors(decode_broadcast(spec, round_, coded, before))
    # damaged, or removed meanwhile: the broadcast is fetched in full
    except (DecodeError, FileNotFoundError):
        return False
    finally:
        store.remove(delta.blob.digest)
    if hashlib.sha256(made).hexdigest() != broadcast.digest:
        return False
    store.put(made)
    return True
