"""Model card of a bundle, in Markdown (after Mitchell et al.

2019): what its manifest holds, for people, and no more.

It is printed from the manifest, whose hash and signature so cover it.
"""

from collections.abc import Iterator, Sequence

from broker_config.protocol.errors import replace_unprintable
from edge.bundle.bundle_format import SIGNATURE, Bundle, Manifest, Provenance, parts
from edge.inference.class_prior import Prior
from edge.inference.tiling import View
from edge.terminal.formatting import pluralize
from edge.uncertainty.performance import held_out_performance, wilson_interval

_FEW = 10  # images of a class, below which its figure says little


def model_card(bundle: Bundle) -> str:
    """The card of a bundle."""
    manifest = bundle.manifest
    of = f" in federation {_text(manifest.federation)}" if manifest.federation else ""
    sections = {
        f"# Model card: {manifest.id}{of}": _identity(bundle),
        "## Intended use": _use(manifest),
        "## Images": _images(manifest),
        "## How it was made": _making(manifest),
        "## Figures": _figures(manifest),
        "## Limits": _limits(manifest),
        "## Hashes": _hashes(bundle),
    }
    return "\n".join("\n".join((heading, "", *lines, "")) for heading, lines in sections.items())


def _identity(bundle: Bundle) -> Iterator[str]:
    manifest = bundle.manifest
    yield (
        f"- bundle: `{bundle.digest}`, exported {_text(manifest.created)} by edge-node "
        f"{_text(manifest.software)}"
    )
    if manifest.expires:
        yield f"- not to be put into service after {manifest.expires:%Y-%m-%d}"
    signed = (
        "yes (whether rightly: `edge-node verify`)"
        if (bundle.folder / SIGNATURE).exists()
        else "no"
    )
    yield f"- signed: {signed}"


def _use(manifest: Manifest) -> Iterator[str]:
    yield (
        f"It names the class of what an image of the line of {_text(manifest.node)} shows: one "
        f"of {_names(manifest.classes)}. Images come from that line's camera and light; of other "
        "products, cameras or light nothing here says anything. A person decides where a "
        "verdict is in doubt."
    )


def _images(manifest: Manifest) -> Iterator[str]:
    if not manifest.trained:
        yield "How many images of this plant trained it, the manifest does not say."
        return
    tested = manifest.provenance.tested if manifest.provenance else {}
    judged = {}
    for name in manifest.classes:
        judged[name] = str(tested.get(name, (0, 0))[1]) if tested else "unknown"
    yield from _table(
        ("class", "trained on", "judged on"),
        [(name, str(manifest.trained.get(name, 0)), judged[name]) for name in manifest.classes],
    )
    yield ""
    yield (
        "Images of this plant alone; those of other plants never left them, and are not "
        "counted here."
    )
    if manifest.metrics.get("cross_validated"):
        yield (
            "The images that judged it are those that trained it, each left out in turn, "
            "look-alikes together."
        )


def _making(manifest: Manifest) -> Iterator[str]:
    made = manifest.provenance
    encoders = f"encoders: {', '.join(manifest.encoders)}" if manifest.encoders else "encoders: one"
    yield (
        (
            f"- method: {_text(manifest.method)}; network: {_text(manifest.model)}, "
            f"{manifest.precision}, "
        )
        + encoders
    )
    if manifest.run:
        rounds_text = f" of {made.rounds}" if made else ""
        yield (
            f"- run {_text(manifest.run)}; this plant's state after round {manifest.round}"
            + rounds_text
        )
    if made:
        yield from _training(made)
    else:
        yield "- training, preprocessing and versions: not in this bundle"
    if broadcast := manifest.broadcast:
        yield (
            f"- made from the coordinator's broadcast `{broadcast.digest}` of round "
            f"{broadcast.round}"
        )
    if made and made.record:
        yield (
            "- who took part in which round is in the coordinator's record, whose entry "
            f"{made.record.entries} has the hash `{made.record.digest}`: `edge-node verify "
            "BUNDLE RECORD` compares"
        )


def _training(made: Provenance) -> Iterator[str]:
    if made.options:
        yield "- options: " + ", ".join(
            f"{_text(name)}={_text(value)}" for name, value in sorted(made.options.items())
        )
    training = made.training
    augment = "with" if training.augment else "without"
    yield (
        f"- training: learning rate {training.learning_rate:g}, "
        f"{pluralize(training.local_epochs, 'epoch')} a stage, batches of {training.batch_size}, "
        f"{augment} augmentation, seed {made.seed}; "
        f"classifier: {made.head}"
    )
    if made.nodes:
        rule = f", aggregated by {made.aggregation.rule}" if made.aggregation else ""
        yield f"- members: {made.nodes} expected, a round closed with {made.quorum} at least{rule}"
    if spent := made.privacy:
        noise = spent.settings
        yield (
            f"- privacy: what left the plant spent epsilon {spent.epsilon:.3g} of each training "
            f"image, at delta {spent.delta:g} (gradients cut to {noise.clip:g} with noise "
            f"{noise.noise:g}, sums with noise {noise.sums:g}); this bundle itself knows the "
            "images as they are"
        )
    pixels = made.preprocessing
    channels = []
    for values in (pixels.mean, pixels.std):
        channels.append(", ".join(f"{value:g}" for value in values))
    mean, std = channels
    yield (
        f"- preprocessing: {pixels.size} x {pixels.size} pixels, RGB, over 255, less ({mean}), "
        f"over ({std})"
    )
    yield "- software: " + ", ".join(
        f"{_text(name)} {_text(version)}" for name, version in made.software.items()
    )


def _figures(manifest: Manifest) -> Iterator[str]:
    metrics = manifest.metrics
    comparison = manifest.comparison
    if "accuracy_low" in metrics and "images" in metrics:
        yield (
            f"Accuracy on the plant's images, as a line judges: {metrics['accuracy']:.1%} "
            f"({metrics['accuracy_low']:.1%} to {metrics['accuracy_high']:.1%}), on "
            f"{metrics['images']:.0f} images that the model has not seen. Intervals are 95 % "
            "(Wilson, by groups of look-alikes)."
        )
    elif metrics:
        yield "Without intervals: " + ", ".join(
            f"{_text(name)} {value:g}" for name, value in sorted(metrics.items())
        )
    elif manifest.trained:
        yield "None: this plant had too few labelled images to judge it."
    else:
        yield "None: this plant had no labelled image."
    if comparison:
        yield ""
        candidates = {
            "alone": comparison.alone,
            "together": comparison.together,
            "mixed": comparison.mixed,
        }
        rows = []
        for name, each in candidates.items():
            deployed = "yes" if name == comparison.deployed else ""
            interval = f"{each.low:.1%} to {each.high:.1%}"
            rows.append((name, f"{each.accuracy:.1%}", interval, deployed))
        yield from _table(("trained", "accuracy", "95 % interval", "deployed"), rows)
        yield ""
        yield (
            f"On {comparison.images} images; naming always the commonest class is right in "
            f"{comparison.guessing:.1%}."
        )
    if manifest.provenance and manifest.provenance.tested:
        yield ""
        yield from _table(
            ("class, all being possible", "named rightly", "95 % interval"),
            [
                (
                    name,
                    f"{right} of {images}",
                    "{:.1%} to {:.1%}".format(*wilson_interval(right, images)),
                )
                for name, (right, images) in manifest.provenance.tested.items()
                if images
            ],
        )
    if found := held_out_performance(manifest, View(), Prior()):
        yield ""
        yield (
            "As a line with default settings judges the same images with this bundle: "
            f"{_text(found)}."
        )


def _limits(manifest: Manifest) -> Iterator[str]:
    if untaught := [name for name in manifest.classes if name not in manifest.trained]:
        yield (
            f"- never seen by this plant: {_names(untaught)}. Of these it knows what other "
            "plants' models say, and no figure here is about them; a line gives them "
            f"{Prior().untaught:g} of the weight of others by default"
        )
    tested = manifest.provenance.tested if manifest.provenance else {}
    if few := [
        f"{_text(name)} ({images})" for name, (_, images) in tested.items() if images < _FEW
    ]:
        yield f"- judged on fewer than {_FEW} images: {', '.join(few)}"
    if few := [
        f"{_text(name)} ({images})" for name, images in manifest.trained.items() if images < _FEW
    ]:
        yield f"- trained on fewer than {_FEW} images of this plant: {', '.join(few)}"
    sure = manifest.confidence
    if sure and sure.thresholds:
        least = ", ".join(f"{_text(name)} {value:.2f}" for name, value in sure.thresholds.items())
        yield (
            f"- in doubt below a confidence of: {least} (measured on "
            f"{pluralize(sure.images, 'image')})"
        )
    else:
        yield (
            "- no threshold of confidence was measured: a line that sets none doubts no verdict "
            "for being unsure"
        )
    if manifest.reference:
        yield (
            "- novelty and drift are measured against its held-out images; the limits are the "
            "line's settings"
        )
    else:
        yield "- it has nothing to measure novelty and drift by: a line notices neither"
    if manifest.comparison:
        yield (
            "- what is deployed was chosen on the images that judge it, so that it looks a "
            "little better than it is"
        )
        yield from (f"- {text}" for text in manifest.comparison.warnings())
    yield "- no figure here was measured in service; light, products and cameras change"


def _hashes(bundle: Bundle) -> Iterator[str]:
    yield from _table(
        ("file", "SHA-256"),
        [
            ("manifest.json", bundle.digest),
            *((part.file, part.sha256) for part in parts(bundle.manifest)),
        ],
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(map(_text, row))} |" for row in rows)


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(_text, names))


def _text(value: object) -> str:
    """A name that others chose, which cannot pass for markup."""
    sign_texts = []
    for sign in replace_unprintable(str(value), keep=""):
        sign_text = f"\\{sign}" if sign in "\\`*[]<>|" else sign
        sign_texts.append(sign_text)
    return "".join(sign_texts)
