"""Making of a broadcast from a delta that has arrived and what it is based on."""

import hashlib

from broker_config.protocol.codec import DecodeError, encode_tensors, read_tensors
from broker_config.protocol.messages import Delta, Manifest, Spec
from broker_config.protocol.round_contents import NO_BASE
from broker_config.transfer.blob_transfer import BlobStore
from trainer.federation.update_codec import decode_broadcast


def apply_delta(
    store: BlobStore, spec: Spec, delta: Delta, broadcast: Manifest, *, final: bool
) -> bool:
    """Make a broadcast, or the `final` result, of a delta and its base, both in the store,
    and store it.

    Returns whether it makes what the broadcast's manifest says. The delta is not kept.
    """
    try:
        coded = store.path(delta.blob.digest).read_bytes()
        before = (
            {}
            if delta.base == NO_BASE
            else dict(read_tensors(store.path(delta.base), spec.tensors))
        )
        made = encode_tensors(decode_broadcast(spec, broadcast.round + final, coded, before))
    # damaged, or removed meanwhile: the broadcast is fetched in full
    except (DecodeError, FileNotFoundError):
        return False
    finally:
        store.remove(delta.blob.digest)
    if hashlib.sha256(made).hexdigest() != broadcast.digest:
        return False
    store.put(made)
    return True
