"""A personal model is read back from a node's disk as it was left there,
or refused with what to do.
"""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from broker_config.protocol.errors import UsageError
from tests.support.method_cases import drafted
from tests.support.personal_models import FACTS
from trainer.training import personal_model
from trainer.training.personal_model import ModelMetadata, PersonalModel

TREE = {
    "encoder.weight": torch.randn((4, 3, 3, 3)).to(memory_format=torch.channels_last),
    "classifier.weight": torch.randn((3, 2)).T,
    "fusion": torch.tensor(0.25),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    personal_model.save(PersonalModel(FACTS, TREE), tmp_path / "state" / "model")
    return tmp_path / "state" / "model"


def test_tensors_and_facts_are_read_back_exactly(folder: Path) -> None:
    metadata, tensors, *_ = personal_model.load(folder)
    assert metadata == FACTS
    assert tensors.keys() == TREE.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TREE.items())


def test_saving_again_replaces_what_was_there(folder: Path) -> None:
    personal_model.save(PersonalModel(FACTS, {"fusion": torch.tensor(0.5)}), folder)
    assert personal_model.load(folder).tensors == {"fusion": torch.tensor(0.5)}


def test_facts_are_read_without_the_tensors(folder: Path) -> None:
    (folder / "personal.safetensors").unlink()
    assert personal_model.load_metadata(folder) == FACTS


def test_facts_carry_over_from_the_federations_spec() -> None:
    spec, _ = drafted("afedcl")
    metadata = ModelMetadata.from_spec(
        spec, "plant-1", 2, {"patches": 3}, {"accuracy": 1.0}, ({"round": 1.0},)
    )
    assert (metadata.node, metadata.round) == ("plant-1", 2)
    assert (metadata.metrics, metadata.history) == ({"accuracy": 1.0}, ({"round": 1.0},))
    for name in (
        "federation",
        "run",
        "method",
        "options",
        "model",
        "classes",
        "preprocessing",
        "training",
        "rounds",
        "seed",
    ):
        assert getattr(metadata, name) == getattr(spec, name)


def test_a_folder_without_a_model_is_named_with_where_to_find_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="personal model") as caught:
        personal_model.load(tmp_path / "elsewhere")
    assert str(tmp_path / "elsewhere") in caught.value.what
    assert "edge-node join" in caught.value.remedy


@pytest.mark.parametrize("given", ["edge-node-a", "edge-node-a/model"])
def test_of_a_node_that_has_not_come_to_its_end_that_is_said(given: str, tmp_path: Path) -> None:
    (tmp_path / "edge-node-a").mkdir()
    (tmp_path / "edge-node-a" / "progress.json").write_text("{}")
    with pytest.raises(UsageError, match="personal model") as caught:
        personal_model.load(tmp_path / given)
    assert "not come to its end" in caught.value.remedy


@pytest.mark.parametrize(
    "damage", ["tensors cut", "tensors missing", "facts cut", "a fact missing", "one class"]
)
def test_a_damaged_model_is_refused(folder: Path, damage: str) -> None:
    tensors, metadata = folder / "personal.safetensors", folder / "personal.json"
    told = json.loads(metadata.read_bytes())
    match damage:
        case "tensors cut":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        case "tensors missing":
            tensors.unlink()
        case "facts cut":
            metadata.write_bytes(metadata.read_bytes()[:-2])
        case "a fact missing":
            del told["model"]
            metadata.write_text(json.dumps(told))
        case "one class":
            metadata.write_text(json.dumps({**told, "classes": ["patches"]}))
    with pytest.raises(UsageError, match="damaged") as caught:
        personal_model.load(folder)
    assert str(folder) in caught.value.what
    assert "copy the folder again" in caught.value.remedy


def test_an_encoder_that_is_not_installed_here_is_named(folder: Path) -> None:
    facts = msgspec.structs.replace(FACTS, model="exchange_small")
    personal_model.save(PersonalModel(facts, TREE), folder)
    with pytest.raises(UsageError, match="'exchange_small'") as caught:
        personal_model.load(folder)
    assert str(folder) in caught.value.what
    assert "install" in caught.value.remedy


def test_what_a_plant_is_told_says_whether_groups_of_its_images_are_known() -> None:
    figures = {
        "accuracy": 0.9,
        "accuracy_low": 0.8,
        "accuracy_high": 1.0,
        "accuracy_all": 0.9,
        "images": 20.0,
        "groups": 20.0,
        "cross_validated": 1.0,
    }
    alone = msgspec.structs.replace(FACTS, metrics=figures)
    grouped = msgspec.structs.replace(FACTS, metrics={**figures, "groups": 12.0})
    assert any("--group" in line for line in personal_model.format_outcome(alone))
    assert not any("--group" in line for line in personal_model.format_outcome(grouped))
