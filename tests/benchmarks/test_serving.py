"""The serving benchmark, on a model that takes no time."""

from pathlib import Path

import pytest

from benchmarks.serving import measure
from benchmarks.serving.__main__ import shown, targets
from tests.support.tiny_bundle import tiny_bundle


@pytest.mark.slow
def test_every_contestant_is_measured_and_compared_with_the_bare_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("STARTS", 1), ("WARM_UP", 1), ("TURN", 0.3)):
        monkeypatch.setattr(measure, name, value)
    report = measure.measure(tiny_bundle(tmp_path / "bundle").folder, 1, 5, 20, 0.3, others=False)
    in_process = ["session.run", "Pipeline.infer", "Pipeline.classify"]
    others = ["bare protocol, tensor", "bare protocol, Unix socket, tensor"]
    assert list(report.calls) == [*in_process, "edge-node, tensor", *others, "edge-node, image"]
    assert list(report.steady) == [*in_process, "edge-node, tensor", *others]
    assert all(
        0 < each.p50 <= each.p99 < 1000
        for each in (*report.calls.values(), *report.steady.values())
    )
    assert report.calls["session.run"].p50 < report.calls["edge-node, tensor"].p50
    assert 0 < report.services["edge-node"].ready < 30
    assert 20 < report.services["edge-node"].memory < 200
    lines = shown(report).splitlines()
    assert [line[:46].strip() for line in lines[-7:]] == [what for what, _, _ in targets(report)]
