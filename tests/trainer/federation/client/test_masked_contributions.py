"""What a node masks and says of its masks is on its disk:
a process that was killed says the same, and nothing else.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from broker_config.protocol.codec import encode_tensors, read_tensors
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Manifest, MaskingAnswer, MaskingStep, TensorSpec
from broker_config.protocol.round_contents import contribution_tensors, masked_tensors
from broker_config.protocol.topics import COORDINATOR
from broker_config.transfer.blob_store import BlobStore
from tests.support.authority import Authority
from tests.support.changed_specs import changed
from tests.support.threaded_federation import PLANTS
from tests.support.wire_messages import SESSION
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.masked_contributions import MaskedContributions
from trainer.federation.masking.grid import contribution_words
from trainer.federation.server.spec import Request, draft
from trainer.methods import make

A, B, C = PLANTS


class Nodes:
    """Three nodes in the first round of a federation of FedAvg."""

    def __init__(self, folder: Path):
        request = Request("fedavg", model="small", weights="none", size=32, secure_aggregation=True)
        self.spec, self.first = draft(request, federation="steel", classes=("x", "y"), nodes=3)
        self.signers, self.folder = Authority("steel").signers(), folder
        self.method = make("fedavg", self.spec.training, self.spec.options)
        self.nodes = {name: self.start(name) for name in PLANTS}

    def start(self, name: str) -> MaskedContributions:
        """A process of a node begins, with what is on its disk."""
        return MaskedContributions(self.spec, name, SESSION, self.signers[name], self.folder / name)

    def step(self, **what: object) -> MaskingStep:
        return MaskingStep(run=self.spec.run, round=1, **what)  # type: ignore[arg-type]

    def share(self) -> None:
        """Go on until all masks are known."""
        members = {name: node.begin(1).keys for name, node in self.nodes.items()}
        dealt = {
            name: only(node.advance(self.step(members=members))).shares
            for name, node in self.nodes.items()
        }
        for name, node in self.nodes.items():
            shares = {other: each[name] for other, each in dealt.items() if other != name}
            assert node.advance(self.step(counted=tuple(self.nodes), shares=shares)) == []
        assert all(node.can_mask(1) for node in self.nodes.values())

    def contributed(self, name: str, shift: float) -> tuple[BlobStore, Progress]:
        """The store of a node that has trained, and how far it is."""
        store = BlobStore(self.folder / name / "blobs")
        received = self.manifest(store, encode_tensors(self.first), "coordinator")
        moved = {
            name: self.first[name] + np.float32(shift)
            for name in contribution_tensors(self.spec, 1)
        }
        return store, Progress(
            run=self.spec.run,
            round=1,
            stage="contributed",
            state="",
            digest="",
            broadcast=received,
            weight=40.0,
            blob=self.manifest(store, encode_tensors(moved), name),
            history=(),
        )

    def manifest(self, store: BlobStore, data: bytes, node: str) -> Manifest:
        digest, size = store.put(data)
        return Manifest(
            federation="steel",
            run=self.spec.run,
            round=1,
            node=node,
            digest=digest,
            size=size,
            chunk_size=4096,
        )


def only(answers: list[MaskingAnswer]) -> MaskingAnswer:
    (answer,) = answers
    return answer


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_a_process_that_was_killed_tells_the_same_keys_and_shares(nodes: Nodes) -> None:
    keys = nodes.nodes[A].begin(1)
    assert nodes.start(A).begin(1) == keys
    members = {name: node.begin(1).keys for name, node in nodes.nodes.items()}
    said = nodes.nodes[A].advance(nodes.step(members=members))
    assert nodes.start(A).advance(nodes.step(members=members)) == said
    assert nodes.start(A).begin(2).keys != keys.keys


def test_what_is_answered_is_on_disk_before(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves a node whose disk fails."""
    nodes.share()

    def fail(*_: object) -> None:
        raise EdgeNodeError("the disk is full", "make room")

    monkeypatch.setattr(checkpoint, "save_masks", fail)
    with pytest.raises(EdgeNodeError, match="disk is full"):
        nodes.nodes[A].advance(nodes.step(survivors=PLANTS))
    with pytest.raises(EdgeNodeError, match="disk is full"):
        nodes.start(A).begin(2)


def test_no_later_process_lets_another_list_of_survivors_be_unmasked(nodes: Nodes) -> None:
    nodes.share()
    signed = nodes.nodes[A].advance(nodes.step(survivors=PLANTS))
    again = nodes.start(A)
    assert again.advance(nodes.step(survivors=PLANTS)) == signed
    with pytest.raises(EdgeNodeError, match="other survivors"):
        again.advance(nodes.step(survivors=(A, B)))


def test_a_contribution_is_masked_to_the_same_bytes_by_every_process_and_no_other_is_in_its_round(
    nodes: Nodes,
) -> None:
    nodes.share()
    store, trained = nodes.contributed(A, 0.01)
    masked = nodes.nodes[A].mask(store, nodes.method, trained)
    assert masked
    assert nodes.start(A).mask(store, nodes.method, trained) == masked
    words = dict(read_tensors(store.path(masked.digest), masked_tensors(nodes.spec, 1)))
    moved = {name: each + np.float32(0.01) for name, each in nodes.first.items()}
    plain = contribution_words(nodes.spec, nodes.method, 1, moved, nodes.first, 40.0)
    assert all(
        (words[name] != plain[name]).mean() > 0.99 for name in plain if plain[name].size > 100
    )
    with pytest.raises(EdgeNodeError, match="trained again"):
        nodes.start(A).mask(store, nodes.method, nodes.contributed(A, 0.02)[1])


def test_a_coordinator_is_not_taken_for_a_node_of_the_cohort(nodes: Nodes) -> None:
    """With keys of its own in it the coordinator of three nodes would be one node's only
    partner.
    """
    own = nodes.start(COORDINATOR).begin(1).keys
    members = {A: nodes.nodes[A].begin(1).keys, COORDINATOR: own}
    with pytest.raises(EdgeNodeError, match="keys of coordinator"):
        nodes.nodes[A].advance(nodes.step(members=members))


@pytest.mark.parametrize("lost", ["blob", "broadcast"])
def test_nothing_is_masked_of_what_the_disk_has_lost(lost: str, nodes: Nodes) -> None:
    nodes.share()
    store, trained = nodes.contributed(A, 0.01)
    store.path(getattr(trained, lost).digest).write_bytes(b"x")
    assert nodes.nodes[A].mask(store, nodes.method, trained) is None


def test_a_damaged_record_of_masks_is_named(nodes: Nodes) -> None:
    nodes.share()
    for path in (nodes.folder / A).glob("masks*"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EdgeNodeError, match=r"masks\.json"):
        nodes.start(A)


@pytest.mark.parametrize("file", ["masks.json", "masks-copy.json"])
@pytest.mark.parametrize("fault", ["older", "missing", "damaged"])
def test_what_becomes_of_one_file_lets_no_masks_hide_a_second_contribution(
    fault: str, file: str, nodes: Nodes
) -> None:
    """Also not when the other file is then replaced by its older copy."""
    nodes.share()
    older = {path: path.read_bytes() for path in (nodes.folder / A).glob("masks*")}
    store, trained = nodes.contributed(A, 0.01)
    masked = nodes.nodes[A].mask(store, nodes.method, trained)
    signed = nodes.nodes[A].advance(nodes.step(survivors=PLANTS))
    path = nodes.folder / A / file
    assert path in older
    if fault == "older":
        path.write_bytes(older[path])
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    again = nodes.start(A)
    for other, content in older.items():
        if other != path:
            other.write_bytes(content)
    for node in (again, nodes.start(A)):
        with pytest.raises(EdgeNodeError):
            node.mask(store, nodes.method, nodes.contributed(A, 0.02)[1])
        assert node.mask(store, nodes.method, trained) == masked
        with pytest.raises(EdgeNodeError):
            node.advance(nodes.step(survivors=(A, B)))
        assert node.advance(nodes.step(survivors=PLANTS)) == signed


def test_the_classes_of_its_images_are_told_where_there_are_statistics(nodes: Nodes) -> None:
    counts = {"statistics.images": TensorSpec((2,), 0, "int64")}
    for spec, told in (
        (nodes.spec, ()),
        (msgspec.structs.replace(nodes.spec, statistics=counts), (0, 1)),
    ):
        node = MaskedContributions(
            spec, A, SESSION, nodes.signers[A], nodes.folder / f"{len(told)}", (0, 1)
        )
        keys = node.begin(1).keys
        assert keys
        assert keys.classes == told


def test_under_any_other_spec_of_the_same_run_nothing_is_masked(nodes: Nodes) -> None:
    """Run A, another run, then A with another spec: the masks of its round were used."""
    nodes.share()
    store, progress = nodes.contributed(A, 0.5)
    nodes.nodes[A].mask(store, nodes.method, progress)
    checkpoint.keep_spec(nodes.folder / A, nodes.spec)
    between = msgspec.structs.replace(nodes.spec, run="b" * 16)
    checkpoint.keep_spec(nodes.folder / A, between)
    count = 0
    for name, other in changed(nodes.spec):
        if name == "run":
            continue
        with pytest.raises(UsageError):
            checkpoint.keep_spec(nodes.folder / A, other)
        try:
            again = MaskedContributions(other, A, SESSION, nodes.signers[A], nodes.folder / A)
        except UsageError:
            continue  # its thresholds protect nobody
        with pytest.raises(EdgeNodeError):
            again.begin(1)
        count += 1
    assert count > 20
    checkpoint.keep_spec(nodes.folder / A, nodes.spec)
    assert nodes.start(A).mask(store, nodes.method, progress) is not None


def test_nodes_with_other_specs_have_no_masks_in_common(nodes: Nodes) -> None:
    """A coordinator that announces two finds that neither takes the other's keys."""
    other = msgspec.structs.replace(nodes.spec, quorum=2)
    nodes.nodes[C] = MaskedContributions(other, C, SESSION, nodes.signers[C], nodes.folder / C)
    members = {name: node.begin(1).keys for name, node in nodes.nodes.items()}
    for node in nodes.nodes.values():
        with pytest.raises(EdgeNodeError):
            node.advance(nodes.step(members=members))


def test_other_bytes_than_have_left_never_leave(nodes: Nodes) -> None:
    nodes.share()
    store, progress = nodes.contributed(A, 0.5)
    assert nodes.nodes[A].mask(store, nodes.method, progress) is not None
    kept = checkpoint.load_masks(nodes.folder / A)
    assert kept is not None
    assert len(kept.released) == 64
    checkpoint.save_masks(nodes.folder / A, msgspec.structs.replace(kept, released="0" * 64))
    with pytest.raises(EdgeNodeError):
        nodes.start(A).mask(store, nodes.method, progress)


def test_a_round_is_never_begun_again_after_another_run(nodes: Nodes) -> None:
    """Run A, another run, A again with the same spec: a second sum of the same round would tell
    what one plant has sent.
    """
    nodes.share()
    kept = checkpoint.load_masks(nodes.folder / A)
    assert kept is not None
    spec = nodes.spec
    nodes.spec = msgspec.structs.replace(spec, run="b" * 16)
    nodes.start(A).begin(1)
    nodes.start(A).begin(2)
    nodes.spec = spec
    with pytest.raises(EdgeNodeError):
        nodes.start(A).begin(1)
    nodes.start(A).begin(2)
    nodes.spec = msgspec.structs.replace(spec, run="b" * 16)
    with pytest.raises(EdgeNodeError):
        nodes.start(A).begin(2)
