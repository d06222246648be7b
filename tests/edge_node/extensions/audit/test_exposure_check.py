"""A plant's demands of how much attacks may tell: before it joins, and as it begins."""

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Manifest, Spec
from broker_config.security.one_time import bind, digest_spec
from edge_node.extensions.audit import federation_audit
from edge_node.extensions.audit.exposure_check import ExposureCheck
from tests.support.plants import CLASSES, draw, load_images
from trainer import progress
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint
from trainer.federation.client.plant_checks import check_images, read_demands
from trainer.federation.client.plant_images import digest_groups, digest_images
from trainer.federation.client.session_events import Contributed, Failed
from trainer.federation.client.training_thread import Worker
from trainer.federation.server.spec import Request, draft
from trainer.methods import METHODS
from trainer.models.named_tensors import Arrays
from trainer.training import alone

NAME = "plant-1"


def drafted(method: str) -> tuple[Spec, Arrays]:
    request = Request(method, model="small", weights="none", size=32, seed=7)
    return draft(request, federation="steel", classes=CLASSES, nodes=2)


def passes(demanded: dict[str, str], spec: Spec, images: Images, state: Path) -> bool:
    """Whether the images meet what a plant demands, in a process that begins now."""
    checks = read_demands(demanded)
    return check_images(checks, spec, images, state, progress.ignore, lambda: False)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What audits have been asked for, all of which pass."""
    found: list[Any] = []
    monkeypatch.setattr(
        federation_audit, "check_exposure", lambda spec, images, most, *_: found.append(most)
    )
    return found


@pytest.mark.parametrize("share", ["2", "-1", "nan", "inf"])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(UsageError, match="membership") as refused:
        read_demands({"counts": "0.5", "membership": share})
    assert "0 for nothing" in refused.value.remedy


def test_an_audit_that_has_passed_counts_for_those_groups_and_that_encoder_alone(
    audited: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which images belong together decides what the attacker knows; the encoder, what it sees."""
    spec, broadcast = drafted("gaussian")
    images = load_images(spec, draw(tmp_path / "images", 3, 1))

    def count(groups: list[int], counts: str = "0.5") -> int:
        """Return how many audits there have been by then."""
        taken = images._replace(train=images.train._replace(groups=np.array(groups)))
        assert passes({"counts": counts}, spec, taken, tmp_path / "state")
        return len(audited)

    each = list(range(len(images.train.labels)))
    pair = [0, 0, *each[2:]]
    assert [count(each), count([9 - place for place in each])] == [1, 1]
    assert [count(pair), count(pair)] == [2, 2]
    assert [count(pair, "0.4"), count(pair, "0.4")] == [3, 3]
    assert audited == [{"counts": 0.5}, {"counts": 0.5}, {"counts": 0.4}]
    other = {**broadcast, min(broadcast): broadcast[min(broadcast)] + 1}
    monkeypatch.setattr(federation_audit, "make_first_broadcast", lambda _: other)
    assert [count(pair, "0.4"), count(pair, "0.4")] == [4, 4]


def test_an_audit_that_has_passed_before_an_update_still_counts(
    audited: list[Any], tmp_path: Path
) -> None:
    spec, broadcast = drafted("gaussian")
    images = load_images(spec, draw(tmp_path / "images", 3, 1))
    first: list[str | bytes] = []
    for name, value in sorted(broadcast.items()):
        first += [name, value.tobytes()]
    digest = bind(
        "audit",
        digest_spec(spec),
        b'[["counts",0.5],["pictures",0.25]]',
        digest_images(images.train),
        digest_groups(images.train),
        bind(*first),
    )
    checkpoint.save_passed(tmp_path, "audited.json", digest)
    assert passes({"pictures": "0.25", "counts": "0.5"}, spec, images, tmp_path)
    assert not audited
    assert passes({"pictures": "0.2", "counts": "0.5"}, spec, images, tmp_path)
    assert audited == [{"counts": 0.5, "pictures": 0.2}]


@pytest.mark.parametrize(
    ("method", "name", "round_"),
    [
        ("gaussian", "encoder.features.0.weight", 1),
        ("fedavg", "encoder.features.0.weight", 1),
        ("fedavg", "classifier.weight", 1),
        ("fedavg", "encoder.features.0.weight", 3),
    ],
)
@pytest.mark.parametrize("is_other", [True, False])
def test_an_audit_is_made_again_where_the_federation_begins_with_another_model(
    method: str,
    name: str,
    round_: int,
    is_other: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The audit before joining knew no broadcast, and made one with weights of its own."""
    monkeypatch.setattr(alone, "ROUNDS", 1)
    spec, broadcast = drafted(method)
    if is_other:
        broadcast = {**broadcast, name: -broadcast[name]}

    def refuse(_: Any, plant: Any, most: Any, *others: Any) -> None:
        assert len(plant.train.labels) == 6
        assert most == {"counts": 0.5}
        assert np.array_equal(others[-1][name], broadcast[name])
        raise UsageError("it tells too much", "stay out")

    monkeypatch.setattr(federation_audit, "check_exposure", refuse)
    inbox: queue.Queue[object] = queue.Queue()
    worker = Worker(
        spec,
        NAME,
        load_images(spec, draw(tmp_path / "images", 3, 1, CLASSES[:2])),
        tmp_path / "state",
        inbox,
        checks={"audit": ExposureCheck(counts=0.5)},
    )
    digest, size = worker.store.put(encode_tensors(broadcast))
    manifest = Manifest(
        federation="steel",
        run=spec.run,
        round=round_,
        node="coordinator",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    worker.train(manifest, counted=False)
    told = inbox.get(timeout=60)
    worker.close()
    assert isinstance(told, Failed if is_other else Contributed), told
    assert (isinstance(told, Failed) and "too much" in str(told.error)) == is_other
    assert (worker.progress is None) == is_other


def test_a_federation_whose_nodes_see_of_one_another_what_no_attack_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another package's method may relay what is not patches of maps."""
    entry = METHODS["fedtfi"]

    def make_unknown(*given: Any) -> Any:
        method = entry.factory(*given)
        assert method.relay
        return method._replace(relay=method.relay._replace(patches=None))

    monkeypatch.setitem(METHODS, "fedtfi", entry._replace(factory=make_unknown))
    spec, _ = draft(
        Request("fedtfi", model="fedtfi_small", weights="none", rounds=1),
        federation="steel",
        classes=CLASSES,
        nodes=2,
    )
    images = load_images(spec, draw(tmp_path / "images", 3, 1))
    with pytest.raises(UsageError, match="see of one another"):
        passes({"pictures": "0.5"}, spec, images, tmp_path / "state")
    assert passes({"pictures": "1"}, spec, images, tmp_path / "state"), "it allows everything"
