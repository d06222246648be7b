"""Output of `edge-node infer`: verdicts or a progress bar, annotated pictures, and a summary."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from broker_config.storage.disk import writing
from edge.inference import batch
from edge.inference.class_prior import Prior, is_taught
from edge.inference.outcomes import Failure, Verdict
from edge.inference.part_decision import no_defect_class
from edge.inference.pipeline import Inspection
from edge.inference.served_model import Model
from edge.inference.tiling import View
from edge.terminal.formatting import format_names
from edge.uncertainty.model_warnings import performance_warnings
from edge.uncertainty.performance import Labelled, Performance, Proportion, measure
from edge.uncertainty.uncertainty_check import Settings, UncertaintyCheck


def classify_and_print(
    model: Model,
    images: Sequence[batch.Image],
    view: View | None,
    prior: Prior | None,
    results: batch.ResultFile | None,
    pictures: Path | None,
    *,
    heat: bool,
    as_json: bool,
) -> bool:
    """Classify images and print each verdict or, with `results`, a summary;
    return whether all could be read.

    Images in folders named as the model's classes are labelled by them: what the verdicts are worth
    is printed last.
    """
    truths, unknown = batch.read_folder_labels(images, model.manifest.classes)
    judged: dict[str, Labelled] = {}
    if results and truths:
        earlier = {each.name: results.classified.get(each.name) for each in images}
        judged = {name: Labelled(truths[name], *found) for name, found in earlier.items() if found}
    todo = [each for each in images if not results or each.name not in results.classified]
    counts: Counter[str] = Counter()
    failed = 0
    doubts = UncertaintyCheck(Settings())
    with _progress_bar(len(todo), shown=results is not None) as advance:
        for found in batch.classify_images(model, todo, view, prior, [doubts]):
            outcome = found if isinstance(found, Failure) else found.verdict
            failed += isinstance(outcome, Failure)
            if truths and isinstance(outcome, Verdict):
                truth = truths[outcome.image]
                judged[outcome.image] = Labelled(
                    truth, outcome.label, outcome.defect, bool(outcome.doubts)
                )
            label = outcome.label if isinstance(outcome, Verdict) else ""
            counts[label] += 1
            if results:
                results.add(outcome)
            if pictures and isinstance(found, Inspection):
                _draw(found, pictures, heat=heat)
            _print_outcome(outcome, as_json=as_json, quiet=results is not None)
            advance()
    if results and not as_json:
        print(_summary(len(images) - len(todo), counts, failed))
    if judged:
        classes = model.manifest.classes
        performance = measure(
            list(judged.values()), len(classes), no_defect_class(view or View(), classes)
        )
        own = Proportion.of(
            each.label == each.truth
            for each in judged.values()
            if is_taught(each.truth, model.manifest.trained)
        )
        _print_performance(performance, own, classes, as_json=as_json)
        if known := batch.count_known(images, model.manifest):
            print(
                f"warning: {known} of {len(images)} images trained this model, which is right "
                "about them more often than about others: judge it by images that it has "
                "not seen",
                file=sys.stderr,
            )
    elif unknown:
        print(
            f"not evaluated: {format_names(unknown)} are folders of no class of the model, "
            f"which are {', '.join(model.manifest.classes)}",
            file=sys.stderr,
        )
    return not failed


def _print_outcome(outcome: Verdict | Failure, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    elif isinstance(outcome, Failure):
        print(f"{outcome.error}\n  What to do: {outcome.remedy}", file=sys.stderr)
    elif not quiet:
        doubts = f", in doubt: {', '.join(outcome.doubts)}" if outcome.doubts else ""
        taught = "" if outcome.taught else ", a class that this plant never taught"
        print(f"{outcome.image}: {outcome.label} ({outcome.confidence:.1%}){taught}{doubts}")


def _print_performance(
    found: Performance, own: Proportion | None, classes: Sequence[str], *, as_json: bool
) -> None:
    """Print what the verdicts are worth, and their accuracy on images of classes that the plant
    itself has taught.
    """
    if as_json:
        print(
            msgspec.json.encode(
                {"type": "Performance", "own_classes": own, **msgspec.structs.asdict(found)}
            ).decode()
        )
        return
    from rich.console import Console

    from edge.terminal.tables import confusion_table

    console = Console()
    console.print(confusion_table(found.confusion, classes, console))
    print(*found.statements(), sep="\n")
    if own and own.images < found.accuracy.images:
        print(f"accuracy on the plant's own classes {own}")
    for warning in performance_warnings(found):
        print(f"warning: {warning.text}", file=sys.stderr)


def _draw(inspection: Inspection, folder: Path, *, heat: bool) -> None:
    from edge.inference.annotation import annotate, encode_jpeg

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        batch.annotated_path(inspection.verdict.image, folder).write_bytes(
            encode_jpeg(annotate(inspection, heat=heat))
        )


def _summary(before: int, counts: Counter[str], failed: int) -> str:
    labels = ", ".join(f"{count} {label}" for label, count in counts.most_common() if label)
    earlier = f"{before} were classified before; " if before else ""
    unread = f"; {failed} could not be read" if failed else ""
    separator = ": " if labels else ""
    return f"{earlier}{sum(counts.values()) - failed} classified{separator}{labels}{unread}"


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(
        console=Console(stderr=True), disable=not (shown and sys.stderr.isatty())
    ) as progress:
        task = progress.add_task("classifying", total=total)
        yield lambda: progress.advance(task)
