"""Software bill of materials (CycloneDX 1.5, JSON) of a release: `make sbom`,
or `python -m tests.support.sbom FILE`.

It lists what edge-node brings along, with all extras, in the versions that are installed here,
which `make audit` compares with constraints.txt. The same versions give the same bytes.
"""

import json
import sys
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.audit import installed

ROOT = "edge-node"


def bill(root: str = ROOT) -> dict[str, Any]:
    """The bill of a package and all that it needs."""
    versions = {root: distribution(root).version, **installed(root)}
    listed = [_component(name, version) for name, version in sorted(versions.items())]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**_component(root, versions[root]), "type": "application"}},
        "components": [each for each in listed if each["name"] != root],
        "dependencies": [
            {
                "ref": _purl(name, version),
                "dependsOn": [_purl(each, versions[each]) for each in _needs(name, versions)],
            }
            for name, version in sorted(versions.items())
        ],
    }


def _component(name: str, version: str) -> dict[str, Any]:
    purl = _purl(name, version)
    license_ = distribution(name).metadata.get("License-Expression")
    licenses = {"licenses": [{"expression": license_}]} if license_ else {}
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        **licenses,
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _needs(name: str, versions: dict[str, str]) -> list[str]:
    """What a package asks for, extras included, as far as it is installed for ours."""
    wanted = {canonicalize_name(Requirement(each).name) for each in requires(name) or ()}
    return sorted(wanted & versions.keys() - {name})


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bill(), indent=1) + "\n")
    print(f"{file}: {len(bill()['components'])} packages")
