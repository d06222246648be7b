"""`python -m benchmarks.serving`: the daemon, onnxruntime, bare HTTP, FastAPI and LitServe,
one model, in one run.
"""

import argparse
from pathlib import Path

import msgspec

from benchmarks.serving.measure import Report, measure

FOLDER = Path("build/serving")


def main() -> None:
    """Measure, then print tables and what was asked of the daemon, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument(
        "--bundle", type=Path, help=f"default: a fused MobileNetV2, exported into {FOLDER} once"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of every service, and of the bare session"
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rate", type=float, default=20, help="calls a second, of the steady load")
    parser.add_argument("--seconds", type=float, default=15, help="of steady load, for each")
    parser.add_argument(
        "--alone", action="store_true", help="without FastAPI and LitServe (edge-node[benchmarks])"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.bundle is None:
        from benchmarks.serving.model import fused  # noqa: PLC0415  (loads torch)

        options.bundle = fused(FOLDER)
    report = measure(
        options.bundle,
        options.threads,
        options.calls,
        options.rate,
        options.seconds,
        others=not options.alone,
    )
    print(
        msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
        if options.json
        else shown(report)
    )


def shown(report: Report) -> str:
    """Tables, and the daemon's figures beside what they should be."""
    bare = report.calls["session.run"].p50
    lines = [f"{'one after another':<36}{'p50 ms':>10}{'p99 ms':>10}{'of bare':>10}{'more ms':>10}"]
    for name, each in report.calls.items():
        lines.append(
            f"{name:<36}{each.p50:10.2f}{each.p99:10.2f}{each.p50 / bare:10.3f}"
            f"{each.p50 - bare:10.2f}"
        )
    lines += ["", f"{'steady load':<36}{'p50 ms':>10}{'p99 ms':>10}{'p99/p50':>10}{'CPU ms':>10}"]
    for name, each in report.steady.items():
        lines.append(
            f"{name:<36}{each.p50:10.2f}{each.p99:10.2f}{each.p99 / each.p50:10.2f}"
            f"{each.processor:10.2f}"
        )
    lines += ["", f"{'service':<36}{'ready s':>10}{'memory MB':>10}"]
    lines += [
        f"{name:<36}{each.ready:10.2f}{each.memory:10.0f}" for name, each in report.services.items()
    ]
    lines += ["", f"{'the daemon':<46}{'is':>8}{'at most':>9}"]
    lines += [f"{what:<46}{found:8.2f}{most:9.2f}" for what, found, most in targets(report)]
    return "\n".join(lines)


def targets(report: Report) -> list[tuple[str, float, float]]:
    """What is asked of the daemon: what, how much it is, and how much it may be."""
    calls, steady, ours = report.calls, report.steady, report.services["edge-node"]
    bare, http = calls["session.run"], steady["edge-node, tensor"]
    assert http.processor is not None
    assert steady["session.run"].processor
    return [
        ("Pipeline.infer, p50, of bare", calls["Pipeline.infer"].p50 / bare.p50, 1.1),
        (
            "Pipeline.classify of an array, p50, of bare",
            calls["Pipeline.classify"].p50 / bare.p50,
            1.1,
        ),
        ("HTTP, tensor, p50, ms more than bare", calls["edge-node, tensor"].p50 - bare.p50, 1.0),
        (
            "HTTP, tensor, CPU of an inference, of bare",
            http.processor / steady["session.run"].processor,
            1.1,
        ),
        ("HTTP, tensor, steady load, p99 of p50", http.p99 / http.p50, 2.0),
        ("ready, s", ours.ready, 1.0),
        ("memory, MB", ours.memory, 200.0),
    ]


if __name__ == "__main__":
    main()
