"""Attacks on patches, as an audit makes them: of a plant's own images,
with and without protection.
"""

import pytest

from edge_node.extensions.audit.contributions import observe
from edge_node.extensions.audit.exposure import Exposure, What
from edge_node.extensions.audit.parts import Parts
from edge_node.extensions.audit.patch_attacks import attack
from tests.support.audited_plant import striped
from tests.support.plants import CLASSES
from trainer.federation.server.spec import Request, draft
from trainer.methods import make

pytestmark = pytest.mark.slow


def exposures(**options: object) -> dict[What, Exposure]:
    request = Request(
        "fedtfi", {"quota": 48, **options}, model="fedtfi_small", weights="none", rounds=1
    )
    spec, broadcast = draft(request, federation="steel", classes=CLASSES, nodes=3)
    parts = Parts(
        striped([12, 6, 0], 0, 64), striped([6, 6, 0], 100, 64), striped([8, 8, 8], 200, 64)
    )
    (seen,) = observe(spec, broadcast, parts.sent, 0, lambda: None)
    relay = make(spec.method, spec.training, spec.options).relay
    assert relay is not None
    assert relay.patches is not None
    return {each.what: each for each in attack(seen, parts, relay.patches, 0).exposures}


def test_patches_as_they_are_bear_their_classes_and_give_their_images_away() -> None:
    found = exposures()
    assert found["counts"].value > 0.85
    assert found["membership"].value > 0.9
    assert found["pictures"].value > found["pictures"].chance


def test_protection_hides_the_image_behind_a_patch_but_not_its_class() -> None:
    found = exposures(noise=2.0, levels=4, mix=4)
    assert found["counts"].value > 0.8
    assert found["membership"].value < 0.8
