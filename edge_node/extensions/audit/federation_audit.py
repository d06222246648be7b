"""A plant's audit of a federation on a broker before it joins,
and of what it has sent to one afterwards.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from broker_config.mqtt.client import Endpoint
from broker_config.protocol.codec import read_tensors
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import broadcast_tensors, contribution_tensors
from broker_config.security.one_time import bind
from broker_config.transfer.blob_transfer import BlobStore
from edge_node.extensions.audit.audit import (
    Audited,
    attack,
    audit,
    describe_mode,
    find_mode,
    make_first_broadcast,
    summarise,
)
from edge_node.extensions.audit.contributions import audited_rounds, observe_round
from edge_node.extensions.audit.exposure import MEANINGS, What
from edge_node.extensions.audit.parts import split
from trainer import progress
from trainer.data.class_folders import HoldOut, Images
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.discovery import discover
from trainer.federation.client.plant_images import PlantImages, digest_images, suited_hold_out
from trainer.federation.update_codec import decode_contribution, is_coded
from trainer.methods import make
from trainer.models.named_tensors import Arrays, select
from trainer.progress.long_work import Stopped, watched
from trainer.training.participant import Contributed, Participant

_SEED = 0  # of parts and attacks, so that two audits of the same images agree
_WAIT = 600  # seconds for a coordinator to appear


def audit_federation(
    endpoint: Endpoint,
    found: PlantImages,
    federation: str | None,
    report: progress.Report,
    *,
    is_thorough: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Audited | None:
    """Attack what the federation on a broker would make this plant send.

    Nothing leaves the plant; None if stopped.

    Args:
        endpoint: the broker.
        found: the plant's images.
        federation: its name; None takes the only one on the broker.
        report: shows progress.
        is_thorough: as `audit` takes it.
        stop: asked often.

    Raises:
        EdgeNodeError: with what to do about it.
    """

    def notify(text: str) -> None:
        report(progress.Note(text=text))

    # there is no such folder: an audit reads no state, and keeps none
    nowhere = found.folder / ".edge-node-audit"
    report(progress.Step(what=f"looking for a federation on {endpoint}"))
    federated = discover(endpoint, federation, _WAIT, notify, stop, nowhere)
    if federated is None:
        return None
    images = found.load(federated.spec, nowhere, notify, hold_out="nothing")
    try:
        return audit(federated.spec, images, report, _SEED, is_thorough=is_thorough, stop=stop)
    except Stopped:
        return None


def audit_sent(
    state: Path,
    found: PlantImages,
    report: progress.Report,
    *,
    is_thorough: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Audited | None:
    """Attack what a node has sent last, which its state folder still holds; None if stopped.

    Args:
        state: that folder.
        found: the node's images, taken as it took them when it joined.
        report: shows progress.
        is_thorough: as `audit` takes it.
        stop: asked often.

    Raises:
        EdgeNodeError: with what to do about it.
    """
    spec = checkpoint.load_spec(state)
    reached = checkpoint.find_progress(state, spec.run).progress if spec else None
    if spec is None or reached is None or reached.blob is None:
        raise UsageError(
            f"{state} holds nothing that a node has sent",
            "name the --state folder of a node that has joined",
        )
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)

    def load(hold_out: HoldOut) -> Images:
        return found.load(
            spec, state, lambda text: report(progress.Note(text=text)), hold_out=hold_out
        )

    images = load(suited_hold_out(spec, method))
    if reached.images != digest_images(images.train) and not method.train:
        # Version 0.1 held images out where nothing is trained, too.
        images = load("every class")
    if reached.images != digest_images(images.train):
        raise UsageError(
            f"the node in {state} has trained on other images than those in {found.folder}",
            "name the images that it had, with the same --test, --group and --alias",
        )
    broadcast, sent = _read_sent(state, spec, reached)
    plant = Participant(spec, reached.blob.node, Images(images.train, None))
    report(progress.Step(what=f"attacking what was sent in round {reached.round}"))
    seen = observe_round(plant, sent, broadcast, reached.round, _SEED, lambda: None)
    parts = split(images, _SEED, as_trained=True)
    try:
        with watched(report, stop):
            results = attack([seen], parts, _SEED, report, stop, is_thorough=is_thorough)
    except Stopped:
        return None
    mode = describe_mode(spec, results, is_actual=True)
    pictures = {find_mode(spec): tuple(chain.from_iterable(one.pictures for one in results))}
    return Audited(summarise(spec, parts, [mode], afterwards=True), pictures)


def _read_sent(state: Path, spec: Spec, reached: Progress) -> tuple[Arrays, Contributed]:
    """The broadcast of the node's last round, and what it has contributed to it."""
    store = BlobStore(state / "blobs")
    blob = reached.blob
    round_ = reached.round
    assert blob is not None
    if not (store.is_intact(blob.digest) and store.is_intact(reached.broadcast.digest)):
        raise UsageError(
            f"what this node has sent in round {round_} is not in {state} any more",
            "audit the federation before joining: edge-node audit BROKER_URL --data FOLDER",
        )
    broadcast = dict(
        read_tensors(store.path(reached.broadcast.digest), broadcast_tensors(spec, round_))
    )
    path = store.path(blob.digest)
    data = path.read_bytes()
    if is_coded(data):
        tensors = decode_contribution(spec, round_, data, broadcast)
    else:
        tensors = dict(read_tensors(path, contribution_tensors(spec, round_)))
    return broadcast, Contributed(tensors, reached.weight)


def digest_first(spec: Spec) -> str:
    """Return the digest of the first broadcast that an audit before joining is made with."""
    parts: list[str | bytes] = []
    for name, value in sorted(make_first_broadcast(spec).items()):
        parts += [name, value.tobytes()]
    return bind(*parts)


def check_begin(
    spec: Spec,
    images: Images,
    most: Mapping[What, float],
    broadcast: Arrays,
    round_: int,
    stop: Callable[[], bool],
    *,
    is_newcomer: bool,
) -> None:
    """Audit once more if a round starts from other tensors than the audit before joining.

    That knew no broadcast, and made the weights that a coordinator takes by itself. A newcomer to
    tensors that nodes have trained, or that a coordinator says so of, attacks these; whoever was
    there before does not, since it has helped to train them, and compares no classifier that was
    made of a first round's sums. Numbers that another machine draws may differ in their last
    digits.

    Raises: as `check_exposure`.
    """
    trains = make(spec.method, spec.training, spec.options, spec.head, spec.privacy).train
    is_trained = bool(trains) and round_ > 1 + spec.statistics_first
    if not most or (is_trained and not is_newcomer):
        return
    audited = make_first_broadcast(spec)
    if round_ > 1 and not is_newcomer:
        audited = select(audited, ("encoder", "candidate"))
    for name, value in audited.items():
        if not np.allclose(broadcast[name], value, rtol=1e-3, atol=1e-6):
            check_exposure(spec, images, most, progress.ignore, stop, broadcast)
            return


def check_exposure(
    spec: Spec,
    images: Images,
    most: Mapping[What, float],
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
    first: Arrays | None = None,
) -> None:
    """Check that attacks on a plant's images tell no more of them than it allows,
    before anything leaves it.

    Of membership what is told at the lower end of its 95 % interval counts: chance alone refuses no
    federation.

    Args:
        spec: of the federation that it is about to join.
        images: the plant's.
        most: of what, how much of all there is to tell, 0 to 1.
        report: shows progress.
        stop: asked often.
        first: the broadcast that it begins with, once that is known.

    Raises:
        UsageError: they tell more, or no attack on it was tried.
        Stopped: `stop` returned true.
    """
    most = {what: share for what, share in most.items() if share < 1}
    if not most or not audited_rounds(spec):
        return  # it allows everything, or nothing leaves it
    relay = make(spec.method, spec.training, spec.options, spec.head, spec.privacy).relay
    if relay and not relay.patches:
        raise UsageError(
            "what this node demands cannot be checked: there is no attack on what nodes of "
            f"federation {spec.federation!r} see of one another",
            f"leave out --demand {', '.join(most)}",
        )
    report(progress.Step(what="auditing the federation with this plant's images, as it demands"))
    audited = audit(
        spec, images, report, only_actual=True, is_thorough=True, stop=stop, first=first
    )
    found = audited.audit.actual
    for what, share in most.items():
        worst = found.worst(what)
        if worst is None:
            raise UsageError(
                "what this node demands cannot be checked: there is no attack that tells "
                f"{MEANINGS[what]} from what federation {spec.federation!r} makes it send",
                f"leave out --demand {what}",
            )
        if worst.told_surely > share:
            raise UsageError(
                f"federation {spec.federation!r} would tell too much of this plant's images: "
                f"{what} {worst.told:.0%} ({worst.attack}), where it allows {share:.0%}; nothing "
                "has left it",
                "look with edge-node audit at what other modes would change, and ask its "
                "coordinator for one of them, or demand less here (--demand)",
            )
