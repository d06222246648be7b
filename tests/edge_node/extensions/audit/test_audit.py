"""An audit as a whole: every mode that a federation could have,
and why it could not have others.
"""

from typing import Any

import msgspec
import pytest

from broker_config.protocol.errors import UsageError
from edge_node.extensions.audit import model_attacks
from edge_node.extensions.audit.audit import Audit, audit
from edge_node.extensions.audit.parts import split
from tests.support.audited_plant import drafted, striped
from trainer import progress
from trainer.data.class_folders import Images, LabelledImages
from trainer.models.network import Network
from trainer.progress import Stopped


def images(count: int = 8) -> Images:
    return Images(striped([count, count, count // 2], 0), None)


def audited(method: str, **changes: object) -> Audit:
    return audit(drafted(method, **changes)[0], images(), progress.ignore).audit


@pytest.mark.slow
def test_it_tells_the_mode_in_which_the_federation_works_and_the_others() -> None:
    found = audited("gaussian")
    assert [(each.mode, each.is_actual, each.setting) for each in found.modes] == [
        ("open", True, ""),
        ("masked", False, "sums of 4 plants"),
        ("private", False, "epsilon 3"),
    ]
    assert found.actual.mode == "open"
    worst = found.actual.worst("counts")
    assert worst is not None
    assert worst.told == 1
    assert (found.sent, found.unsent, found.known) == (10, 5, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "mode"),
    [({"privacy": {"epsilon": "8"}}, "private"), ({"secure_aggregation": True}, "masked")],
)
def test_a_federation_that_hides_images_is_audited_as_it_is(
    changes: dict[str, object], mode: str
) -> None:
    found = audited("gaussian", **changes)
    assert found.actual.mode == mode
    assert {each.mode for each in found.modes if each.exposures} == {"open", "masked", "private"}


@pytest.mark.slow
def test_a_mode_that_cannot_be_says_why() -> None:
    modes = {each.mode: each for each in audited("afedcl").modes}
    assert "L_D" in modes["masked"].refused
    assert "a loss tells of images" in modes["private"].refused
    assert modes["open"].exposures


@pytest.mark.slow
def test_a_method_that_sends_sums_and_models_is_attacked_by_both() -> None:
    found = audited("afedcl_plus", training={"batch_norm": "eval", "local_epochs": "1"})
    assert {each.seen for each in found.actual.exposures} == {"sums", "model"}


@pytest.mark.slow
def test_the_same_seed_finds_the_same_in_each_mode() -> None:
    spec, _ = drafted("gaussian")
    first, again, other = (audit(spec, images(), progress.ignore, seed).audit for seed in (0, 0, 1))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert first != other


@pytest.mark.slow
def test_other_modes_are_those_of_the_same_federation() -> None:
    """With its options and training: what it would tell otherwise is not another federation's."""
    few = audited("gaussian", options={"dimensions": 8}, privacy={}).modes[1]
    many = audited("gaussian").modes[1]
    assert few.mode == many.mode == "masked"
    assert few.worst("membership") != many.worst("membership")


@pytest.mark.slow
def test_sums_of_each_encoder_are_attacked() -> None:
    found = audited("gaussian", options={"others": "efficientnet_lite0"}).actual
    attacks = {each.attack for each in found.exposures if each.what == "membership"}
    assert attacks == {"leverage", "leverage (candidate.efficientnet_lite0)"}


def test_what_is_no_model_is_not_attacked_as_one() -> None:
    found = audited("fednova", training={"local_epochs": "1"}).actual
    assert not found.exposures
    assert "no attack on what it sends" in found.notes[0]


def test_too_few_images_are_an_error() -> None:
    with pytest.raises(UsageError, match="7 images"):
        audit(drafted("gaussian")[0], Images(striped([3, 3, 1], 0), None), progress.ignore)


def test_parts_share_no_image_and_look_alikes_stay_together() -> None:
    whole = striped([8, 8, 4], 0)
    grouped = whole._replace(groups=whole.labels * 100 + whole.labels.cumsum() // 2)
    parts = split(Images(grouped, None), 1, as_trained=False)
    digests = [set(each.digests) for each in parts]
    assert sum(map(len, digests)) == len(set().union(*digests)) == 20
    groups = [set(each.groups.tolist()) for each in parts if each.groups is not None]
    assert not groups[0] & groups[1]
    assert not groups[0] & groups[2]


def test_of_what_a_node_has_trained_with_all_is_sent_and_the_rest_is_held_out() -> None:
    def parted(test: LabelledImages | None) -> list[int]:
        return [
            len(each.labels)
            for each in split(Images(striped([4, 4, 0], 0), test), 0, as_trained=True)
        ]

    assert parted(striped([3, 3, 0], 1)) == [8, 3, 3]
    assert parted(striped([1, 0, 0], 1)) == [8, 1, 0]
    assert parted(None) == [8, 0, 0]


def test_the_search_for_images_is_bounded_by_work_unless_it_is_to_be_thorough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And by no clock: the same images are told the same again."""
    steps: list[int] = []
    search = model_attacks.search

    def counted(*arguments: Any, count: int, **more: Any) -> Any:
        steps.append(count)
        return search(*arguments, count=count, **more)

    monkeypatch.setattr(model_attacks, "search", counted)
    monkeypatch.setattr(model_attacks, "STEPS", 12)
    monkeypatch.setattr(model_attacks, "WORK", 7 * 32**2)
    spec, _ = drafted("fedavg", nodes=5)
    bounded = audit(spec, images(), progress.ignore, only_actual=True)
    assert audit(spec, images(), progress.ignore, only_actual=True).audit == bounded.audit
    thorough = audit(spec, images(), progress.ignore, only_actual=True, is_thorough=True)
    assert steps == [7, 7, 12]
    assert any("7 of 12" in note for note in bounded.audit.actual.notes)
    assert not any("of 12" in note for note in thorough.audit.actual.notes)


def test_the_features_of_an_image_are_computed_once_for_all_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bytes] = []
    encode = Network.encode

    def counted(network: Network, tensors: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        seen.append(inputs.numpy().tobytes())
        return encode(network, tensors, inputs, *rest, **more)

    monkeypatch.setattr(Network, "encode", counted)
    audited("gaussian")
    views = [each for each in seen if seen.count(each) > 1]
    assert not views


def test_an_audit_that_is_stopped_begins_no_further_step() -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 40

    with pytest.raises(Stopped):
        audit(drafted("fedavg", nodes=5)[0], images(), progress.ignore, stop=stop)
    assert asked == 40
