"""A plant's demands: who understands which, and what one that has been met counts for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET, UnsetType

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from tests.support.changed_specs import changed
from tests.support.plants import CLASSES, draw, load_images
from trainer import progress
from trainer.data.class_folders import Images
from trainer.federation.client import plant_checks
from trainer.federation.client.demands import MasksCheck, SumsCheck
from trainer.federation.client.plant_checks import (
    PLANT_CHECKS,
    PlantCheck,
    check_images,
    read_demands,
)
from trainer.federation.server.spec import Request, draft
from trainer.progress.long_work import Stopped

KNOWN = sorted(name for kind in PLANT_CHECKS.values() for name in kind.__struct_fields__)


class SlowCheck(PlantCheck, frozen=True):
    """A made-up check that takes long, and notes whose turn it was."""

    remedy = "demand patience=0.5"
    passed_file = "patient.json"
    bases: list[str]  # the basis now, the last
    turns: list[Spec]
    patience: float | UnsetType = UNSET

    def check_images(self, spec: Spec, images: Any, report: Any, stop: Callable[[], bool]) -> None:
        if stop():
            raise Stopped
        self.turns.append(spec)

    def digest_basis(self, spec: Spec) -> str:
        return self.bases[-1]

    @property
    def demanded(self) -> dict[str, Any]:
        return {"patience": self.patience}


@pytest.fixture
def plant(tmp_path: Path) -> tuple[Spec, Images]:
    request = Request("gaussian", model="small", weights="none", size=32)
    spec, _ = draft(request, federation="steel", classes=CLASSES, nodes=2)
    return spec, load_images(spec, draw(tmp_path / "images", 3, 1))


def test_names_go_to_the_checks_that_understand_them() -> None:
    assert read_demands({}) == {}
    assert read_demands({"images": "2", "masked": "3", "nodes": "4"}) == {
        "masks": MasksCheck(masked=3),
        "sums": SumsCheck(images=2, nodes=4),
    }
    assert read_demands({"images": "2"})["sums"].demanded == {"images": 2}


def test_a_name_that_nobody_understands_is_refused_with_those_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The extension that understands a name may not be installed, too."""
    monkeypatch.setattr(plant_checks, "PLANT_CHECKS", {"sums": SumsCheck})
    for name in ("masked", "holders"):
        with pytest.raises(UsageError, match=name) as refused:
            read_demands({"images": "1", name: "1"})
        assert re.search(r"\bimages, nodes\b", refused.value.remedy)
        assert "install" in refused.value.remedy


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("value", ["", "null", "many"])
def test_a_value_that_cannot_be_read_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        read_demands({name: value})


def test_what_has_passed_counts_for_that_spec_alone(
    plant: tuple[Spec, Images], tmp_path: Path
) -> None:
    """A coordinator could otherwise have private sums checked, and then ask for open ones."""
    spec, images = plant
    check = SlowCheck(bases=["one"], turns=[], patience=0.5)

    def passes(asked: Spec) -> None:
        assert check_images(
            {"slow": check}, asked, images, tmp_path, progress.ignore, lambda: False
        )

    passes(spec)
    passes(spec)
    assert check.turns == [spec]
    for _, other in changed(spec):
        passes(other)
        assert check.turns[-1] == other


def test_what_has_passed_counts_for_that_demand_those_images_and_groups_and_that_basis_alone(
    plant: tuple[Spec, Images], tmp_path: Path
) -> None:
    spec, images = plant
    check = SlowCheck(bases=["one"], turns=[], patience=0.5)

    def count(images: Images, name: str = "slow", **changes: Any) -> int:
        """Return how often the images were checked by then."""
        changed = SlowCheck(bases=check.bases, turns=check.turns, **{"patience": 0.5, **changes})
        assert check_images({name: changed}, spec, images, tmp_path, progress.ignore, lambda: False)
        return len(check.turns)

    each = list(range(len(images.train.labels)))
    pair = images._replace(train=images.train._replace(groups=np.array([0, 0, *each[2:]])))
    fewer = images._replace(train=images.train.take(np.array(each[1:])))
    assert [count(images), count(images)] == [1, 1]
    assert [count(images, patience=0.4), count(images, patience=0.4)] == [2, 2]
    assert [count(pair), count(pair)] == [3, 3]
    assert [count(fewer), count(fewer)] == [4, 4]
    assert [count(fewer, "another"), count(fewer, "another")] == [5, 5]
    check.bases.append("two")
    assert [count(fewer, "another"), count(fewer, "another")] == [6, 6]
    (tmp_path / SlowCheck.passed_file).write_text("damaged")
    assert [count(fewer, "another"), count(fewer, "another")] == [7, 7]


def test_what_takes_long_comes_last_and_what_was_stopped_has_not_passed(
    plant: tuple[Spec, Images], tmp_path: Path
) -> None:
    spec, images = plant
    check = SlowCheck(bases=[""], turns=[], patience=0.5)
    checks = {"a-slow-one": check, "sums": SumsCheck(images=100)}
    with pytest.raises(UsageError, match="100 images"):
        check_images(checks, spec, images, tmp_path, progress.ignore, lambda: False)
    assert not check.turns
    met = {**checks, "sums": SumsCheck(images=1)}
    assert not check_images(met, spec, images, tmp_path, progress.ignore, lambda: True)
    assert not (tmp_path / check.passed_file).exists()
    assert check_images(met, spec, images, tmp_path, progress.ignore, lambda: False)
    assert check.turns == [spec]
