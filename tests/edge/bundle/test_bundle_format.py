"""A bundle is read back as it was written, or refused with the file that is at fault."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.bundle import bundle_format
from edge.bundle.bundle_format import BundleError
from tests.support.tiny_bundle import CLASSES, tiny_bundle, tiny_onnx


def edit(folder: Path, **changes: object) -> None:
    """Change fields of the manifest."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read_back(tmp_path):
    written = tiny_bundle(tmp_path / "bundle", size=16, node="press-3", round_=30)
    manifest = bundle_format.read_bundle(tmp_path / "bundle").manifest
    assert manifest == written.manifest
    assert manifest.id == "press-3@30"
    assert (manifest.classes, manifest.input.size, manifest.input.layout) == (CLASSES, 16, "NHWC")
    assert names(tmp_path / "bundle") == ["golden.png", "manifest.json", "model.onnx"]


def test_writing_again_replaces_the_bundle_and_leaves_nothing_else(tmp_path):
    tiny_bundle(tmp_path / "bundle", round_=1)
    tiny_bundle(tmp_path / "bundle", round_=2)
    assert bundle_format.read_bundle(tmp_path / "bundle").manifest.round == 2
    assert names(tmp_path) == ["bundle"]


def test_a_failed_write_leaves_the_old_bundle(tmp_path, monkeypatch):
    tiny_bundle(tmp_path / "bundle", round_=1)

    def full_disk(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(EdgeNodeError, match=f"{tmp_path}/bundle: No space"):
        tiny_bundle(tmp_path / "bundle", round_=2)
    assert bundle_format.read_bundle(tmp_path / "bundle").manifest.round == 1
    assert names(tmp_path) == ["bundle"]


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(UsageError, match="not a bundle"):
        tiny_bundle(tmp_path / "photos")
    assert (tmp_path / "photos" / "holiday.jpg").exists()


def test_a_golden_image_of_another_size_is_not_written(tmp_path):
    description = tiny_bundle(tmp_path / "good").manifest
    with pytest.raises(ValueError, match=r"uint8 \[16, 16, 3\]"):
        bundle_format.write_bundle(
            tmp_path / "bad",
            description,
            tiny_onnx(16),
            np.zeros((8, 8, 3), np.uint8),
            (1.0, 0.0, 0.0),
        )
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("name", ["model.onnx", "golden.png"])
def test_a_changed_file_is_named(tmp_path, name):
    tiny_bundle(tmp_path / "b")
    path = tmp_path / "b" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=name) as caught:
        bundle_format.read_bundle(tmp_path / "b")
    assert "whole bundle" in caught.value.remedy


@pytest.mark.parametrize("name", ["model.onnx", "golden.png", "manifest.json"])
def test_a_missing_file_is_named(tmp_path, name):
    tiny_bundle(tmp_path / "b")
    (tmp_path / "b" / name).unlink()
    with pytest.raises(BundleError, match=name):
        bundle_format.read_bundle(tmp_path / "b")


def test_a_manifest_says_what_trained_it_or_nothing(tmp_path):
    assert tiny_bundle(tmp_path / "b", trained={"red": 3}).manifest.trained == {"red": 3}
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    del manifest["trained"]  # as older versions wrote it
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    assert bundle_format.read_bundle(tmp_path / "b").manifest.trained == {}


@pytest.mark.parametrize(
    ("trained", "why"), [({"red": 3, "rust": 1}, "'rust'"), ({"red": 0}, "trained")]
)
def test_a_manifest_that_was_trained_on_a_class_it_does_not_have_or_on_no_image_is_refused(
    tmp_path, trained, why
):
    tiny_bundle(tmp_path / "b")
    edit(tmp_path / "b", trained=trained)
    with pytest.raises(BundleError, match=f"b/manifest.json .*{why}"):
        bundle_format.read_bundle(tmp_path / "b")


def test_a_newer_format_asks_for_an_upgrade(tmp_path):
    tiny_bundle(tmp_path / "b")
    edit(tmp_path / "b", format=2, roles=["of", "another", "shape"])
    with pytest.raises(BundleError, match="format 2") as caught:
        bundle_format.read_bundle(tmp_path / "b")
    assert "upgrade" in caught.value.remedy


def test_a_manifest_that_is_no_utf_8_is_damaged(tmp_path):
    tiny_bundle(tmp_path / "b")
    path = tmp_path / "b" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"classifier", b"classifi\xe1r"))
    with pytest.raises(BundleError, match="damaged"):
        bundle_format.read_bundle(tmp_path / "b")


@pytest.mark.parametrize("file", ["../model.onnx", "/etc/passwd", "a/b", "..", "", "model.onnx\n"])
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path, file):
    manifest = tiny_bundle(tmp_path / "b").manifest
    edit(tmp_path / "b", roles={"classifier": {"file": file, "sha256": manifest.golden.sha256}})
    with pytest.raises(BundleError, match="damaged"):
        bundle_format.read_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    "changes",
    [
        {"roles": {}},
        {"classes": ["one", "two"]},
        {"classes": ["one"]},
        {"input": {"size": 16, "layout": "NCHW"}},
    ],
    ids=["no graph", "fewer classes than probabilities", "one class", "another layout"],
)
def test_a_manifest_that_cannot_be_served_is_refused(tmp_path, changes):
    tiny_bundle(tmp_path / "b")
    edit(tmp_path / "b", **changes)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        bundle_format.read_bundle(tmp_path / "b")


def test_unknown_fields_are_ignored_so_that_the_format_can_grow(tmp_path):
    tiny_bundle(tmp_path / "b")
    edit(tmp_path / "b", signature="later")
    assert bundle_format.read_bundle(tmp_path / "b").manifest.id == "tiny@1"


@pytest.mark.parametrize("named", ["bundles", "bundles/plant-9"])
def test_a_folder_that_is_no_bundle_proposes_those_inside_or_beside_it(
    named: str, tmp_path: Path
) -> None:
    tiny_bundle(tmp_path / "bundles" / "plant-1")
    with pytest.raises(BundleError, match=r"(?s)not a bundle.*/bundles/plant-1\?"):
        bundle_format.read_bundle(tmp_path / named)
