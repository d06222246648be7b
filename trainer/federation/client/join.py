"""A node's joining of a federation: discovery, the plant's images, then its session.

Itself without torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from broker_config.mqtt.client import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import count_training_rounds
from broker_config.storage import disk
from edge.inference import native_memory
from edge.terminal.formatting import pluralize
from trainer import progress
from trainer.data.checks import image_rules
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation import combinations
from trainer.federation.client import privacy_file
from trainer.federation.client.discovery import discover
from trainer.federation.client.plant_checks import check_images, read_demands
from trainer.federation.client.plant_images import PlantImages, suited_hold_out
from trainer.federation.client.session_state import NewRunError
from trainer.federation.presence import check_name_free
from trainer.methods import PREVIEW, make
from trainer.methods.statistics_head import list_encoders
from trainer.training.privacy_plan import describe


def join(
    endpoint: Endpoint,
    *,
    name: str,
    folder: Path | None,
    test: Path | None,
    state: Path,
    federation: str | None,
    telemetry: bool,
    demands: Mapping[str, str],
    wait: float,
    report: progress.Report,
    group: str | None = None,
    aliases: Mapping[str, str] = {},
    like: Path | None = None,
    confirm: Callable[[str], bool] | None = None,
    stop: Callable[[], bool] = lambda: False,
    preview: bool = False,
) -> Path | None:
    """Take part in a federation to its end; None when `stop` said to end it before.

    Returns the personal model's folder, or the preview's file if that is wanted. A node that finds
    a run finished whose result holds statistics makes its model of these at once, with its own
    images or without any. After a run that only chooses an encoder the node joins the next one.

    Args:
        endpoint: the broker.
        name: of this node.
        folder: class folders with this plant's images; None if it has none.
        test: class folders with held-out images, or None.
        state: folder for this node's state; its personal model comes to lie in `state/model`.
        federation: its name; None takes the only one on the broker.
        telemetry: whether losses, A_k and accuracy are sent to the coordinator.
        demands: what the plant demands, by names that registered checks understand
            (`plant_checks.py`).
        wait: seconds to wait for a coordinator.
        report: shows progress.
        group: which images train or are held out together beside look-alikes, as `read_keys` takes
            it.
        aliases: from the name of a folder to a class of the federation.
        like: a bundle of an earlier model, by which images may look like a class; or None.
        confirm: asks a person a question; None where there is nobody to ask.
        stop: asked often.
        preview: whether the node only wants to know what joining would give.

    Raises:
        EdgeNodeError: with what to do about it.
    """

    def notify(text: str) -> None:
        report(progress.Note(text=text))

    native_memory.share_heap()
    topics.check_node(name)
    checks = read_demands(demands)
    disk.check_writable(state)
    # What is wrong with the folders should be said before anybody waits for a coordinator.
    found = PlantImages.find(folder, test, group, aliases) if folder else None
    report(progress.Step(what=f"looking for a federation on {endpoint}"))
    federated = discover(
        endpoint, federation, wait, notify, stop, state, without_images=folder is None
    )
    if federated is None:
        return None
    spec = federated.spec
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    if preview and (method.train or not method.statistics):
        raise UsageError(
            f"federation {spec.federation!r} trains ({spec.method}): a preview comes before "
            "training",
            f"ask its coordinator for edge-node coordinate --method {PREVIEW}, or join it with "
            "edge-node join",
        )
    figures = combinations.of_spec(spec, method, {})
    figures = figures._replace(telemetry=telemetry, preview=preview)
    combinations.check(figures, combinations.FIGURES)
    for check in checks.values():
        check.check_spec(spec, method)
    images = Images.none(spec.preprocessing.size)
    if found is not None:
        least = 1 if federated.finished and spec.statistics else image_rules.MIN_TO_TRAIN
        images = found.load(
            spec,
            state,
            notify,
            like=like,
            confirm=confirm,
            hold_out=suited_hold_out(spec, method),
            least=least,
        )
    is_over = federated.finished
    if not is_over and not check_images(checks, spec, images, state, report, stop):
        return None
    classes = sorted({spec.classes[label] for label in images.train.labels})
    given = f"{_format_count(images.train)} images of {', '.join(classes)}, "
    held_out = (
        f"{_format_count(images.test)} held out" if images.test else "too few to hold any out"
    )
    judged_on = held_out if images.test or method.train else "each left out in turn"
    images_text = given + judged_on if classes else "no labelled image"
    notify(
        (
            f"joining federation {spec.federation!r} ({spec.method}, {spec.model}, "
            f"{_describe_rounds(spec)}) as {name}: "
        )
        + images_text
    )
    if spec.chooses:
        notify(_describe_choice(spec))
    elif federated.finished and spec.statistics:
        notify(
            "the federation has finished: its model is made here, and nothing of this plant's "
            "images leaves it"
        )
        if preview:
            notify(
                "if this plant took part, its images count twice in this preview: the sums hold "
                "them already"
            )
    if method.relay:
        notify(
            f"with {spec.method} all other nodes see pieces of what the model makes of these "
            f"images, and their classes; {method.relay.protection or 'nothing'} hides images in "
            "them"
        )
    if spec.privacy and classes and not federated.finished:
        notify(_describe_privacy(spec, state))
    _note_readers(endpoint, spec, notify)
    report(progress.Step(what="loading torch, which takes seconds"))
    check_name_free(endpoint, spec.federation, name, state)
    # Only now: importing torch takes seconds, and whoever cannot take part should hear so at once.
    from trainer.federation.client.session import take_part  # noqa: PLC0415

    try:
        return take_part(
            spec,
            name,
            images,
            endpoint,
            state,
            telemetry=telemetry,
            report=report,
            stop=stop,
            preview=preview,
            checks=checks,
            was_over=is_over,
        )
    except NewRunError as error:
        notify(f"{error.what}: joining that")
    return join(
        endpoint,
        name=name,
        folder=folder,
        test=test,
        state=state,
        federation=federation,
        telemetry=telemetry,
        demands=demands,
        wait=wait,
        report=report,
        group=group,
        aliases=aliases,
        like=like,
        confirm=confirm,
        stop=stop,
        preview=preview,
    )


def _describe_choice(spec: Spec) -> str:
    models = ", ".join(model for model, _ in list_encoders(spec.model, spec.tensors))
    return (
        f"this run compares encoders ({models}) at {spec.preprocessing.size} px: the coordinator "
        "is told what leaving out this plant's images costs with each, and how many these are; "
        "no model is made, and the federation's next run is joined by itself"
    )


def _describe_privacy(spec: Spec, state: Path) -> str:
    before = privacy_file.spent(state)
    state_text = (
        f"; of earlier rounds, {state} has spent epsilon {before:.3g} already" if before else ""
    )
    return describe(spec) + state_text


def _note_readers(endpoint: Endpoint, spec: Spec, notify: Callable[[str], None]) -> None:
    """Say who can read what is learnt, where a plant that has a kit may think that nobody else
    can.
    """
    if endpoint.signer and spec.encryption == "none":
        notify(
            "messages of this run are signed, but not encrypted: whoever runs the broker can "
            "read what is learnt"
        )
    if spec.mask_threshold:
        classes_told = ", and all members which classes it has" if spec.statistics else ""
        notify(
            f"contributions are masked: the coordinator reads sums of {spec.mask_threshold} "
            f"nodes or more{classes_told}"
        )


def _describe_rounds(spec: Spec) -> str:
    """How many there are, and what becomes of contributions."""
    trained = count_training_rounds(spec)
    if not trained:
        return "one round, sums and no training"
    first = "one for sums, " if spec.statistics_first else ""
    then = ", then one for sums" if spec.statistics else ""
    return f"{first}{pluralize(trained, 'round')}, aggregated by {spec.aggregation.rule}{then}"


def _format_count(images: LabelledImages) -> str:
    """How many images, and in how many groups if some belong together."""
    count = len(images.labels)
    groups = len(images.sets)
    return f"{count}" if groups == count else f"{count} (in {groups} groups)"
