"""docs/security.md and docs/audit.md: each claim names a test that there is,
and what they say of files and parameters is so.
"""

import ast
import re

import pytest

from broker_config.security import kit
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text()
CLAIMS = PAGE + (REPOSITORY / "docs" / "audit.md").read_text()
NAMED = re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", CLAIMS)


def defined_in(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / "tests" / file).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_row_of_the_threat_model_names_its_tests() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| **")]
    assert len(rows) > 15
    assert [
        row[:40]
        for row in rows
        if len(re.split(r" \| ", row)) != 5 or "::" not in row.rpartition(" | ")[2]
    ] == []
    assert len(NAMED) == CLAIMS.count("::")


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    assert {name for each, name in NAMED if each == file} - defined_in(file) == set()


def test_the_files_that_it_speaks_of_exist() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", CLAIMS):
        assert (REPOSITORY / "docs" / link).exists(), link
    for path in re.findall(
        r"`((?:trainer|benchmarks|docs|edge|broker_config)/[\w/.]+\.\w+)`", CLAIMS
    ):
        assert (REPOSITORY / path).exists(), path
    assert "(docs/security.md)" in (REPOSITORY / "SECURITY.md").read_text()
    assert "(docs/security.md)" in (REPOSITORY / "README.md").read_text()


def test_the_parameters_of_kits_are_those_of_the_code() -> None:
    assert "scrypt (N = 2^15, r = 8, p = 1, 128-bit salt)" in PAGE
    assert kit._COST == 2**15
    assert len(kit.new_passphrase().replace("-", "")) * 5 == 125
    assert "125 random bits" in PAGE
