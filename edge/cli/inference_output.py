"""Output of `edge-node infer`: verdicts or a progress bar, annotated pictures, and a summary."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from broker_config.storage.disk import writing
from edge.inference import batch
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Inspection
from edge.inference.served_model import Model
from edge.inference.tiling import View


def classify_and_print(
    model: Model,
    images: Sequence[batch.Image],
    view: View | None,
    results: batch.ResultFile | None,
    pictures: Path | None,
    *,
    heat: bool,
    as_json: bool,
) -> bool:
    """Classify images and print each verdict or, with `results`, a summary; return whether all could be read."""
    todo = [each for each in images if not results or each.name not in results.classified]
    counts: Counter[str] = Counter()
    failed = 0
    with _progress_bar(len(todo), shown=results is not None) as advance:
        for found in batch.classify_images(model, todo, view):
            outcome = found if isinstance(found, Failure) else found.verdict
            failed += isinstance(outcome, Failure)
            counts[outcome.label if isinstance(outcome, Verdict) else ""] += 1
            if results:
                results.add(outcome)
            if pictures and isinstance(found, Inspection):
                _draw(found, pictures, heat=heat)
            _print_outcome(outcome, as_json=as_json, quiet=results is not None)
            advance()
    if results and not as_json:
        print(_summary(len(images) - len(todo), counts, failed))
    return not failed


def _print_outcome(outcome: Verdict | Failure, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    elif isinstance(outcome, Failure):
        print(f"{outcome.error}\n  What to do: {outcome.remedy}", file=sys.stderr)
    elif not quiet:
        doubts = f", in doubt: {', '.join(outcome.doubts)}" if outcome.doubts else ""
        print(f"{outcome.image}: {outcome.label} ({outcome.confidence:.1%}){doubts}")


def _draw(inspection: Inspection, folder: Path, *, heat: bool) -> None:
    from edge.inference.annotation import render_jpeg

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        batch.annotated_path(inspection.verdict.image, folder).write_bytes(render_jpeg(inspection, heat=heat))


def _summary(before: int, counts: Counter[str], failed: int) -> str:
    labels = ", ".join(f"{count} {label}" for label, count in counts.most_common() if label)
    earlier = f"{before} were classified before; " if before else ""
    unread = f"; {failed} could not be read" if failed else ""
    return f"{earlier}{sum(counts.values()) - failed} classified{': ' if labels else ''}{labels}{unread}"


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not (shown and sys.stderr.isatty())) as progress:
        task = progress.add_task("classifying", total=total)
        yield lambda: progress.advance(task)
