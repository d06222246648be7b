"""Drift on real images: false alarms on ordinary images, and the delay until a change is detected.

    python -m research.studies.drift_detection NEU --other XSDD --weights mobilenet_v2.safetensors

A federation is simulated for each seed: AFedCL on NEU-CLS, three classes to a node. Each node's
model, calibrated on its 60 held-out images, then sees a stream of other images of its own classes,
drawn at random; after a thousand they are darker, blurred, noisy, or those of another plant
(X-SDD). A stream that is only ordinary counts false alarms. Prints a line of JSON for each seed and
window, then a table.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageFilter

from edge.bundle.reference import Reference
from edge.inference.outcomes import Outcome, Verdict
from edge.inference.pipeline import Inspection
from edge.inference.predictor import Outputs
from edge.inference.served_model import Model
from edge.uncertainty import drift, uncertainty_check
from research.studies.novelty import MOST, NODES, SIZE, Seen, look
from trainer.data import class_folders, folder_scan
from trainer.data.class_folders import Catalogue, LabelledImages
from trainer.data.partition import Scheme, select_pool
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.seeding import generator
from trainer.training.calibration import calibrate, softmax

# images: before and after a change, and of a stream without one
BEFORE, AFTER, ORDINARY = 1000, 2000, 20_000


def darker(pixels: np.ndarray) -> np.ndarray:
    """A lamp that ages: 85 % of the light."""
    return (pixels * 0.85).astype(np.uint8)


def blurred(pixels: np.ndarray) -> np.ndarray:
    """A lens out of focus, by one of the network's pixels."""
    return np.stack(
        [np.asarray(Image.fromarray(each).filter(ImageFilter.GaussianBlur(1))) for each in pixels]
    )


def noisy(pixels: np.ndarray) -> np.ndarray:
    """A sensor that grows old: normal noise, 10 of 255 wide."""
    noise = np.random.default_rng(0).normal(0, 10, pixels.shape)
    return np.clip(pixels + noise, 0, 255).astype(np.uint8)


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "darker": darker,
    "blurred": blurred,
    "noisy": noisy,
}


class Node(NamedTuple):
    """A model as the line has it, and what it makes of each kind of image."""

    model: Model
    kinds: dict[str, Outputs]


class Told:
    """Counts alarms."""

    def __init__(self) -> None:
        self.alarms = 0

    def put(self, outcome: Outcome) -> None:
        """One that begins."""
        self.alarms += getattr(outcome, "details", {}).get("state") == "drifted"


def nodes(asked: argparse.Namespace, seed: int) -> list[Node]:
    """Train a federation and show its models everything."""
    catalogue, strangers = (
        select_pool(class_folders.scan(each), asked.pool) for each in (asked.folder, asked.other)
    )
    shares = Scheme("disjoint", NODES, 12, seed, {"classes_per_node": 3}, pool="all").shares(
        catalogue
    )
    images = {
        s.node: class_folders.load_both(s.train, s.test, catalogue.classes, SIZE) for s in shares
    }
    request = Request(
        "afedcl",
        model="mobilenet_v2",
        weights=asked.weights,
        size=SIZE,
        rounds=asked.rounds,
        seed=seed,
    )
    request = request._replace(aggregate="mean")
    spec, broadcast = draft(request, federation="drift", classes=catalogue.classes, nodes=NODES)
    models = simulate(spec, broadcast, images, evaluate_every=asked.rounds).models
    used = {entry.digest for share in shares for entry in share.train.entries}
    found = []
    for share in shares:
        test = images[share.node].test
        assert test is not None
        fresh = _pictures(
            [
                entry
                for entry in catalogue.entries
                if entry.class_name in share.train.classes
                and entry.digest not in used | set(test.digests)
            ],
            seed,
        )
        shown = {
            name: fresh._replace(images=change(fresh.images)) for name, change in CHANGES.items()
        }
        shown |= {"ordinary": fresh, "another plant": _pictures(strangers.entries, seed)}
        held_out = look(models[share.node], spec, test)
        model = served(held_out, test.labels, catalogue.classes)
        divisor = model.manifest.confidence.temperature if model.manifest.confidence else 1
        kinds = {
            kind: outputs(look(models[share.node], spec, pictures), divisor)
            for kind, pictures in shown.items()
        }
        found.append(Node(model, kinds))
    return found


def _pictures(entries: Sequence[folder_scan.Entry], seed: int) -> LabelledImages:
    order = generator(seed, "stream").permutation(len(entries))[: 3 * MOST]
    chosen = Catalogue(tuple(entries[position] for position in order))
    return class_folders.load(chosen, chosen.classes, SIZE)


def served(held_out: Seen, labels: np.ndarray, classes: Sequence[str]) -> Model:
    """What of a line's model its watchers use."""
    confidence = calibrate(held_out.logits, labels, classes, np.ones(len(classes))).confidence
    opinions = softmax(held_out.opinions / confidence.temperature)
    reference = Reference.from_features(
        held_out.features, held_out.logits.argmax(1), len(classes), opinions
    )
    manifest = SimpleNamespace(classes=tuple(classes), confidence=confidence)
    return cast(
        Model, SimpleNamespace(manifest=manifest, predictor=SimpleNamespace(reference=reference))
    )


def outputs(seen: Seen, divisor: float) -> Outputs:
    """As the graph gives them."""
    return Outputs(softmax(seen.logits / divisor), softmax(seen.opinions / divisor), seen.features)


def stream(node: Node, kinds: Sequence[str], window: int, seed: int) -> tuple[Told, int]:
    """Show images of these kinds, drawn at random, until there is an alarm or they end;
    and how many were shown.
    """
    told, settings = Told(), uncertainty_check.Settings()
    doubting = uncertainty_check.UncertaintyCheck(settings)
    watchers = doubting, drift.Drift(drift.Settings(window=window), doubting, told)
    random = generator(seed, "frames")
    for count, kind in enumerate(kinds):
        of_kind = node.kinds[kind]
        one = random.integers(len(of_kind.probabilities), size=1)
        seen = Outputs(*(each[one] for each in of_kind[:3] if each is not None))
        nothing = cast(Any, None)
        verdict = _verdict(node, seen)
        shown = Inspection(
            node.model, nothing, nothing, seen, seen.probabilities, verdict, 0, 0, 0, 0
        )
        for watcher in watchers:
            shown = shown._replace(verdict=watcher(shown))
        if told.alarms and kind != "ordinary":
            return told, count
    return told, len(kinds)


def _verdict(node: Node, seen: Outputs) -> Verdict:
    [row] = seen.probabilities
    return Verdict(
        image="",
        label=node.model.manifest.classes[int(row.argmax())],
        confidence=float(row.max()),
        probabilities={},
        bundle="",
        milliseconds=0,
        time="",
    )


def measure(found: Sequence[Node], window: int, seed: int) -> dict[str, list[float]]:
    """By kind of change, for each node: images until the alarm (AFTER: none).

    False alarms, in ORDINARY images.
    """
    result: dict[str, list[float]] = defaultdict(list)
    for node in found:
        result["false alarms"].append(stream(node, ["ordinary"] * ORDINARY, window, seed)[0].alarms)
        for kind in node.kinds:
            if kind != "ordinary":
                told, shown = stream(node, ["ordinary"] * BEFORE + [kind] * AFTER, window, seed)
                result[kind].append(shown - BEFORE if told.alarms else AFTER)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="class folders of NEU-CLS")
    parser.add_argument(
        "--other", type=Path, required=True, help="class folders of another plant: X-SDD"
    )
    parser.add_argument("--weights", default="surface", help="surface, or a safetensors file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--windows", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument(
        "--pool", choices=("report", "tuning"), default="report", help="tuning for choices"
    )
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    all_: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in asked.seeds:
        found = nodes(asked, seed)
        for window in asked.windows:
            result = measure(found, window, seed)
            print(json.dumps({"seed": seed, "window": window, **result}), flush=True)
            for name, values in result.items():
                all_[window][name] += values
    for window, results in all_.items():
        false = results.pop("false alarms")
        print(
            f"window {window}: {sum(false):.0f} false alarms in {len(false) * ORDINARY} images "
            f"of {len(false)} nodes"
        )
        for name, values in results.items():
            missed = sum(value == AFTER for value in values)
            print(
                f"  {name:14} median {np.median(values):5.0f} images, worst {max(values):.0f}, "
                f"missed by {missed}"
            )


if __name__ == "__main__":
    main()
