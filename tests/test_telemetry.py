"""Nothing reports its use to anybody: onnxruntime, which would,
is told not to before it is loaded.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.tiny_bundle import tiny_bundle

ROOMS = ("edge.inference.predictor", "edge_node.extensions.vfl.policies.selection", "export.parity")


@pytest.mark.parametrize("module", ROOMS)
def test_onnxruntime_leaves_no_device_id_and_so_has_nothing_to_report(
    module: str, tmp_path: Path
) -> None:
    graph = tiny_bundle(tmp_path / "bundle").folder / "model.onnx"
    (tmp_path / "home").mkdir()
    code = f"import {module}, onnxruntime; onnxruntime.InferenceSession({str(graph)!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=REPOSITORY,
        env={"HOME": str(tmp_path / "home"), "PATH": "/usr/bin"},
    )
    assert list((tmp_path / "home").iterdir()) == []
