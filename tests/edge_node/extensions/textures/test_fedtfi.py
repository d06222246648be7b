"""What FedTFI is to the kernel: a registered method with a network of its own, and what it combines
with.
"""

import pytest

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import contribution_tensors
from edge_node.cli.shared_options import RequestOptions, check_model_is_free
from tests.support.method_cases import CLASSES
from trainer.federation.client.spec_check import check_spec
from trainer.federation.server.spec import Request, draft, suited_model
from trainer.statistics.sums import specs

FEDTFI = Request("fedtfi", model="fedtfi_small", weights="none")


def drafted(request: Request = FEDTFI) -> Spec:
    return draft(request, federation="test", classes=CLASSES, nodes=3)[0]


def refused(request: Request) -> UsageError:
    with pytest.raises(UsageError) as caught:
        drafted(request)
    assert caught.value.remedy
    return caught.value


def test_it_comes_with_a_network_and_takes_another_one() -> None:
    assert suited_model("fedtfi", {}) == "fedtfi_small"
    assert RequestOptions(method="fedtfi", weights="none").request().model == "fedtfi_small"
    asked = RequestOptions(method="fedtfi", weights="none", model="deepten_small")
    assert asked.request().model == "deepten_small"


def test_no_model_is_chosen_for_it() -> None:
    with pytest.raises(UsageError) as caught:
        check_model_is_free(RequestOptions(method="fedtfi"))
    assert "leave out one of them" in caught.value.remedy


def test_what_a_coordinator_drafts_fits() -> None:
    check_spec(drafted())


@pytest.mark.parametrize("codec", [None, "none", "int4"])
def test_what_training_changes_is_coded(codec: str | None) -> None:
    assert drafted(FEDTFI._replace(codec=codec)).codec == (codec or "int4")  # type: ignore[arg-type]


def test_it_has_a_head_of_statistics_too() -> None:
    """Its network's frozen stem comes before the encoder;
    patches are exchanged in rounds of training alone.
    """
    spec = drafted(FEDTFI._replace(rounds=2, head="statistics"))
    assert contribution_tensors(spec, 2).keys() > spec.relays.keys() > set()
    assert contribution_tensors(spec, 3).keys() == spec.statistics.keys() == specs(3, 128).keys()


def test_it_is_not_private() -> None:
    asked = FEDTFI._replace(privacy={"epsilon": "3"}, training={"batch_norm": "eval"})
    error = refused(asked)
    assert "pieces" in error.what
    assert "another --method" in error.remedy


def test_masks_hide_nothing_that_is_passed_on() -> None:
    error = refused(FEDTFI._replace(codec=None, secure_aggregation=True))
    assert "relay" in error.what
