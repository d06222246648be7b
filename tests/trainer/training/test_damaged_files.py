"""Every file of a personal model, damaged: it is read as it was written,
or refused with what to do.
"""

from pathlib import Path

import msgspec
import torch

from tests.support.damaged_files import FAULTS, RECOVERED, Outcome, Snapshot, try_all, unknown
from tests.support.personal_models import FACTS
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction, PersonalModel, TrainingImage

KNOWN = (
    "model/SHA256SUMS",
    *(f"model/{each}.json" for each in ("personal", "training", "verdicts")),
    *(f"model/{each}.safetensors" for each in ("personal", "shared")),
)


def model(seed: int) -> PersonalModel:
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(8, 8, generator=random)
        for name in ("encoder.weight", "classifier.weight")
    }
    seen = HeldOutPrediction(
        path=f"/{seed}", digest=f"{seed}" * 64, label="patches", verdict="patches", confidence=0.5
    )
    taught = TrainingImage(path=f"/{seed}", digest=f"{seed}" * 64, label="patches")
    shared = {"encoder.weight": tensors["encoder.weight"], "sums": torch.randn(9, generator=random)}
    return PersonalModel(
        msgspec.structs.replace(FACTS, seed=seed), tensors, (seen,), (taught,), shared
    )


def read(folder: Path) -> PersonalModel:
    """All that is there."""
    found = personal_model.load(folder)
    return found._replace(
        predictions=personal_model.load_predictions(folder),
        training_images=personal_model.load_training_images(folder),
        shared=personal_model.load_shared(found, folder),
    )


def same(left: PersonalModel, right: PersonalModel) -> bool:
    return left[:1] + left[2:4] == right[:1] + right[2:4] and all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in ((left.tensors, right.tensors), (left.shared, right.shared))
    )


def test_each_fault_of_each_file_ends_well(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path / "newer", tmp_path / "older")
    personal_model.save(model(1), snapshot.older / "model")
    personal_model.save(model(2), snapshot.newer / "model")
    assert unknown(snapshot.files(), KNOWN) == []

    def start(folder: Path, _: str) -> Outcome:
        assert same(read(folder / "model"), model(2))
        return RECOVERED

    cases = snapshot.cases()
    outcomes = try_all("personal model", snapshot, cases, start, tmp_path / "scratch")
    assert len(outcomes) == len(cases) == len(FAULTS) * len(KNOWN)
    assert sum(each == RECOVERED for each in outcomes.values()) == 1, (
        "only the list of checksums may be missing"
    )
