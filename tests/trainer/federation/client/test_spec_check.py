"""A spec whose tensors are not those of its method and model is refused before anything is
fetched or held for it.
"""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Aggregation, ImagePrivacy, TensorSpec
from tests.support.method_cases import CASES, CLASSES, drafted, shares
from trainer import progress
from trainer.federation.client.session import take_part
from trainer.federation.client.spec_check import check_scales, check_spec
from trainer.federation.server.spec import Request, draft

HUGE = TensorSpec((1 << 35,), 0)  # 137 GB


@pytest.mark.parametrize("case", CASES)
def test_what_a_coordinator_drafts_fits(case: str) -> None:
    check_spec(drafted(case)[0])


def test_encoders_beside_a_model_fit_too() -> None:
    request = Request("gaussian", {"others": "efficientnet_lite0"}, "small", "none", 32)
    check_spec(draft(request, federation="test", classes=CLASSES, nodes=2)[0])


def test_no_other_tensor_is_taken_whatever_it_is_called() -> None:
    spec, _ = drafted("fedavg")
    name = min(spec.tensors)
    for tensors in (
        spec.tensors | {"more": HUGE},
        spec.tensors | {"candidate.resnet50.encoder.conv1.weight": HUGE},
        spec.tensors | {name: HUGE},
        spec.tensors | {name: msgspec.structs.replace(spec.tensors[name], dtype="int64")},
        {each: tensor for each, tensor in spec.tensors.items() if each != name},
    ):
        with pytest.raises(UsageError, match=r"'test'.*fedavg.*small"):
            check_spec(msgspec.structs.replace(spec, tensors=tensors))
    with pytest.raises(UsageError, match="relayed is float32"):
        check_spec(msgspec.structs.replace(spec, relays={"relayed": HUGE}))


def test_statistics_that_another_version_computes_are_noticed_at_the_start() -> None:
    spec, _ = drafted("gaussian")
    name = min(spec.statistics)
    for asked in ({}, spec.statistics | {name: HUGE}, spec.statistics | {"statistics.other": HUGE}):
        with pytest.raises(UsageError, match="other statistics"):
            check_spec(msgspec.structs.replace(spec, statistics=asked))


@pytest.mark.parametrize("hiding", [{"mask_threshold": 2}, {"privacy": ImagePrivacy(sums=9.0)}])
def test_a_run_that_hides_what_nodes_send_and_asks_for_their_losses_is_refused(
    hiding: dict[str, Any],
) -> None:
    """No coordinator of ours offers one; the losses leave a node without mask and noise."""
    spec, _ = drafted("gaussian")
    check_spec(msgspec.structs.replace(spec, chooses=True))
    with pytest.raises(UsageError, match="--weights auto"):
        check_spec(msgspec.structs.replace(spec, chooses=True, **hiding))


def test_a_node_that_is_told_of_terabytes_connects_to_nobody_and_holds_nothing(
    tmp_path: Path,
) -> None:
    spec, _ = drafted("fedavg")
    false = msgspec.structs.replace(spec, tensors=spec.tensors | {"more": HUGE})
    with socket.create_server(("127.0.0.1", 0)) as broker:
        endpoint = Endpoint.parse(f"mqtt://127.0.0.1:{broker.getsockname()[1]}")
        with pytest.raises(UsageError, match="more is float32"):  # not that memory lacks
            take_part(
                false,
                "plant-1",
                shares()["plant-1"],
                endpoint,
                tmp_path / "state",
                telemetry=False,
                report=progress.ignore,
                stop=lambda: False,
            )
        broker.setblocking(False)
        with pytest.raises(BlockingIOError):
            broker.accept()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("hides", [{"mask_threshold": 3}, {"privacy": ImagePrivacy(noise=1)}])
def test_a_run_whose_masks_or_noise_could_hide_two_things_is_refused_by_its_name(
    hides: dict[str, Any],
) -> None:
    spec, _ = drafted("fedavg", batch_norm="eval")
    spec = msgspec.structs.replace(spec, aggregation=Aggregation("mean"), **hides)
    check_spec(spec)
    old = msgspec.structs.replace(spec, revision=1)
    with pytest.raises(UsageError, match=spec.run):
        check_spec(old)
    check_spec(msgspec.structs.replace(old, mask_threshold=0, privacy=None))


@pytest.mark.parametrize("masked", [False, True])
def test_scales_that_do_not_follow_from_the_first_broadcast_are_refused(masked: bool) -> None:
    request = Request("fedavg", model="small", weights="none", size=32, secure_aggregation=masked)
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=3)
    check_scales(spec, broadcast, 1)
    trained = {name: 1000 * value for name, value in broadcast.items()}
    check_scales(spec, trained, 2)
    name = min(spec.tensors)
    for round_, step in ((1, -2), (1, 2), (2, -14), (2, 14)):
        other = msgspec.structs.replace(spec.tensors[name], scale=spec.tensors[name].scale + step)
        tensors = {**spec.tensors, name: other}
        with pytest.raises(UsageError, match=name):
            check_scales(msgspec.structs.replace(spec, tensors=tensors), broadcast, round_)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "gaussian", "afedcl_plus"])
def test_nothing_leaves_a_node_but_what_its_method_sends(method: str) -> None:
    spec, _ = drafted(method)
    for sends in (
        (*spec.sends, "exact.statistics.images"),
        (*spec.sends, "classifier", "personal"),
        ("",),
    ):
        with pytest.raises(UsageError, match="sends"):
            check_spec(msgspec.structs.replace(spec, sends=sends))


@pytest.mark.parametrize("changes", [{"rounds": 3}, {"statistics_first": True}])
def test_rounds_of_sums_are_those_of_the_method(changes: dict[str, Any]) -> None:
    """A round in which nothing is trained, or sums too many, would cost nothing by the account."""
    with pytest.raises(UsageError):
        check_spec(msgspec.structs.replace(drafted("gaussian")[0], **changes))


@pytest.mark.parametrize("method", ["pfedfda", "ditto", "scaffold", "afedcl"])
def test_a_method_in_which_noise_hides_nothing_is_refused_at_the_node(method: str) -> None:
    spec = msgspec.structs.replace(drafted(method)[0], privacy=ImagePrivacy(noise=50, sums=50))
    with pytest.raises(UsageError, match="private"):
        check_spec(spec)
