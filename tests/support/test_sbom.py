"""`make sbom` lists every package that edge-node brings along, so that others can look each up."""

import json

import pytest
from cyclonedx.model.bom import Bom

from tests.support.audit import CONSTRAINTS, OURS, pins
from tests.support.sbom import ROOT, bill


def test_a_bill_names_every_package_in_its_pinned_version() -> None:
    made, pinned = bill(), pins(CONSTRAINTS)
    found = {each["name"]: each["version"] for each in made["components"]}
    assert {"torch", "numpy", "cryptography", "paho-mqtt", "onnxruntime"} <= found.keys()
    own = made["metadata"]["component"]["version"]
    assert found == {name: own if name in OURS else pinned[name] for name in found}
    assert found.keys() >= OURS
    assert ROOT not in found


@pytest.mark.slow
def test_a_bill_is_cyclonedx_and_every_reference_in_it_leads_somewhere() -> None:
    made = bill()
    read = Bom.from_json(json.loads(json.dumps(made)))  # type: ignore[attr-defined]
    assert {each.name for each in read.components} == {each["name"] for each in made["components"]}
    refs = {each["bom-ref"] for each in (made["metadata"]["component"], *made["components"])}
    assert {each["ref"] for each in made["dependencies"]} == refs
    assert {ref for each in made["dependencies"] for ref in each["dependsOn"]} <= refs


def test_the_same_versions_give_the_same_bytes() -> None:
    assert json.dumps(bill()) == json.dumps(bill())
