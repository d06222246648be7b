"""Leakage of images through patches of feature maps, and the effect of protection.

    python -m research.studies.patch_leak --drawn --kth FOLDER --weights VGG.safetensors --out
    patch_leak.jsonl python -m research.studies.patch_leak --table --out patch_leak.jsonl

Two plants with images of the same classes from different sources: drawn textures, or KTH's fabrics
(FOLDER has sample_a to sample_d: the first plant has a and b, the second c and d). The attacker
follows the protocol and knows the model and how patches are cut and protected. It has images of its
own, either of its own plant (`other`) or of the victim's source (`same`, the worse case), and
attacks the victim's patches with networks that it trained on them:

- pixels from whole maps (nobody sends them: an upper bound), from items whose places are known (who
  knows the node's random numbers), from items whose channels all come from one place, and from
  items as they are sent; PSNR and SSIM, beside those of a guess that is always the attacker's mean.
  Items give the 8 x 8 pixels under one place.
- from items as they are sent: class, plant, whether an image that the attacker has is behind one
  (found), whether two are of one image (linked). Areas under the ROC curve are 0.5 where nothing is
  learnt.

With `--accuracy` a federation that sends patches so is simulated first; it is its last broadcast
that is attacked. What is finished is a line of the file, and is not done again.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
import torch

from broker_config.protocol.messages import Spec
from edge_node.extensions.audit import measures
from edge_node.extensions.audit import patch_inference as inference
from edge_node.extensions.audit import patch_inversion as inversion
from edge_node.extensions.audit.patch_inversion import Items, Plant
from research.pretraining.texture_patterns import texture
from research.runner.store import Records
from research.studies import map_inversion, patch_guesses
from trainer.data import class_folders as data
from trainer.data import drawn_surfaces
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network, to_tensors
from trainer.privacy.patch_protection import Floats, Protection
from trainer.seeding import generator

Knows = Literal["same", "other"]
View = Literal["maps", "one place", "16 places known", "1 place known", "sent"]
MODEL, SIZE, MASK, NODES = "fedtfi_small", 64, 2, 2
QUOTA = 64  # items of a node in the bank, when images are looked for behind them
KINDS, EACH = 4, 240  # classes that are drawn, and images of each part of a pool
Plants = Mapping[str, Plant]
"""By the fields of `Pool`."""
EPOCHS: dict[View, int] = {
    "maps": 20,
    "1 place known": 20,
    "16 places known": 20,
    "one place": 30,
    "sent": 30,
}
PROTECTIONS = (
    Protection(),
    *(Protection(noise=noise) for noise in (0.5, 1.0, 2.0)),
    *(Protection(levels=levels) for levels in (8, 4, 2)),
    *(Protection(mix=mix) for mix in (2, 4)),
    Protection(noise=0.5, levels=4, mix=4),
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One attack."""

    data: str
    knows: Knows
    view: View
    protection: Protection
    rounds: int  # of training before; 0: the first broadcast
    seed: int


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """A line in the file."""

    asked: Asked
    psnr: float
    ssim: float
    guess_psnr: float  # of the attacker's mean
    guess_ssim: float
    told: Mapping[str, float] = {}  # from items as they are sent: see `told`
    accuracy: float | None = None  # of the federation, where it was trained


class Pool(NamedTuple):
    """The images of two plants, each in two or three parts that share no image."""

    classes: tuple[str, ...]
    other: LabelledImages  # the attacker's own
    same: LabelledImages  # of the victim's source, known to the attacker
    members: LabelledImages  # the victim's training images
    absent: LabelledImages  # of the victim's source, that nobody has


def drawn(size: int, seed: int) -> Pool:
    """Textures, in gray, as two plants see them."""
    labels = np.arange(EACH) % KINDS

    def images(plant: int, part: int) -> LabelledImages:
        look, random = (
            drawn_surfaces.draw_style(seed, plant),
            generator(seed, "patch leak", plant, part),
        )
        pixels = np.empty((EACH, size, size), np.uint8)
        for kind in range(KINDS):
            some = labels == kind
            pixels[some] = drawn_surfaces.draw_photographs(
                random, look, int(some.sum()), size, texture(seed, kind)
            )
        names = tuple(f"{plant} {part} {number}" for number in range(EACH))
        return LabelledImages(
            np.repeat(pixels[..., None], 3, -1), labels, names, tuple(map(Path, names))
        )

    return Pool(
        tuple(f"kind {kind}" for kind in range(KINDS)),
        images(0, 0),
        *(images(1, part) for part in range(3)),
    )


def fabrics(folder: Path, size: int, seed: int) -> Pool:
    """KTH's, dealt to parts at random."""
    plants = [
        data.merge([data.scan(folder / f"sample_{name}") for name in sources])
        for sources in ("ab", "cd")
    ]
    classes = tuple(plants[0].classes)
    other, victim = (data.load(plant, classes, size) for plant in plants)
    random = generator(seed, "patch leak")
    own = random.permutation(len(other.labels))[:EACH]
    parts = random.permutation(len(victim.labels))[: 3 * EACH].reshape(3, EACH)
    return Pool(classes, other.take(own), *map(victim.take, parts))


def told(plants: Plants, knows: Knows, protection: Protection, seed: int) -> dict[str, float]:
    """What items as they are sent tell besides pixels: shares that are right,
    and areas under the ROC curve.
    """
    known, victim = plants[knows], plants["members"]
    random = generator(seed, "told")
    own = inversion.items(known, 2 * len(known.labels), protection, random)
    sent = inversion.items(victim, len(victim.labels), protection, random)
    labels, truth = known.labels[own.images[:, 0]], victim.labels[sent.images[:, 0]]
    classes = patch_guesses.classified(own.patches, labels, sent.patches, known.measure, seed)
    sent = Items(sent.patches[:QUOTA], sent.images[:QUOTA], sent.places[:QUOTA])
    behind = np.unique(sent.images)
    suspects = victim.take(behind).join(plants["absent"])
    measure = victim.measure if protection.levels else known.measure  # levels tell the sender's
    scores = inference.found(sent, suspects, known, measure, protection)
    positive = np.arange(len(scores)) < len(behind)
    linked, alike = patch_guesses.linked(known, victim, protection, len(victim.labels) // 2, seed)
    return {
        "class": float((classes == truth).mean()),
        "most frequent class": float(np.bincount(truth).max() / len(truth)),
        "plant": whose(plants, protection, seed),
        "found": measures.auc(scores, positive),
        "found at 1 %": patch_guesses.caught(scores, positive),
        "linked": measures.auc(linked, alike == 1),
    }


def whose(plants: Plants, protection: Protection, seed: int) -> float:
    """How often an item's plant is told, of two that send as many;
    learnt from items of other images of both.
    """
    half = np.arange(len(plants["other"].labels)) % 2 == 0
    sides = [
        (plants["other"].take(np.flatnonzero(half)), plants["same"]),
        (plants["other"].take(np.flatnonzero(~half)), plants["members"]),
    ]
    quota, random = (
        min(len(plant.labels) for side in sides for plant in side),
        generator(seed, "whose"),
    )
    (known, asked), labels = (
        [
            np.concatenate(
                [
                    inversion.items(plant, times * quota, protection, random).patches
                    for plant in side
                ]
            )
            for side, times in zip(sides, (2, 1), strict=True)
        ],
        [np.repeat([0, 1], times * quota) for times in (2, 1)],
    )
    classes = patch_guesses.classified(known, labels[0], asked, plants["other"].measure, seed)
    return float((classes == labels[1]).mean())


class Picture(NamedTuple):
    """What an attack makes of the victim's images, and the truth, [n, 3, s, s]."""

    guess: Floats
    truth: Floats
    blind: Floats  # the attacker's mean, [1, 3, s, s]


def attack(plants: Plants, asked: Asked) -> Picture:
    """Reconstruct pixels of the victim's images."""
    known, victim, protection = plants[asked.knows], plants["members"], asked.protection
    epochs, seed, random = EPOCHS[asked.view], asked.seed, generator(asked.seed, "attack")
    if asked.view in ("one place", "sent"):
        together = asked.view == "one place"
        invert = inversion.of_items(known, protection, epochs, seed, together=together)
        sent = inversion.items(victim, len(victim.labels), protection, random, together=together)
        blind = known.images.mean((0, 2, 3), keepdims=True)
        truth = inversion.pixels(victim, sent)
        return Picture(
            invert(torch.from_numpy(sent.patches)),
            truth,
            np.broadcast_to(blind, (1, *truth.shape[1:])),
        )
    blind = known.images.mean(0, keepdims=True)
    if asked.view == "maps":
        return Picture(
            map_inversion.of_maps(known, epochs, seed)(victim.maps), victim.images, blind
        )
    count = int(asked.view.split()[0])
    seen = map_inversion.scatter(victim, protection, count, random, known.measure)
    return Picture(
        map_inversion.of_places(known, protection, count, epochs, seed)(seen), victim.images, blind
    )


def measured(plants: Plants, asked: Asked, accuracy: float | None) -> Leak:
    """One line of the file."""
    guess, truth, blind = attack(plants, asked)
    blind = np.ascontiguousarray(np.broadcast_to(blind, truth.shape))
    return Leak(
        asked=asked,
        psnr=map_inversion.psnr(guess, truth),
        ssim=measures.ssim(guess, truth),
        guess_psnr=map_inversion.psnr(blind, truth),
        guess_ssim=measures.ssim(blind, truth),
        told=told(plants, asked.knows, asked.protection, asked.seed)
        if asked.view == "sent"
        else {},
        accuracy=accuracy,
    )


def seen(pool: Pool, spec: Spec, broadcast: Arrays) -> Plants:
    """The images with their maps under the model that is broadcast."""
    network, tensors = Network(spec.model, len(spec.classes)), to_tensors(broadcast)

    def maps(images: LabelledImages) -> Floats:
        with torch.no_grad():
            stem = TrainingSet.of(images, spec.preprocessing).encoder_input(
                network, tensors, slice(None)
            )
            found: Floats = network.part("project", tensors, stem).numpy()
        return found

    def plant(images: LabelledImages) -> Plant:
        pixels = images.images.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
        return inversion.plant(pixels, images.labels, maps(images), MASK)

    return {name: plant(images) for name, images in zip(Pool._fields[1:], pool[1:], strict=True)}


def federation(
    pool: Pool, weights: str, protection: Protection, rounds: int, seed: int
) -> tuple[Spec, Arrays, float | None]:
    """The model after so many rounds in which patches were sent,
    and how many absent images it recognises.
    """
    request = Request(
        method="fedtfi",
        options=msgspec.structs.asdict(protection),
        model=MODEL,
        weights=weights,
        rounds=max(1, rounds),
        seed=seed,
        aggregate="mean",
    )
    spec, broadcast = draft(request, federation="leak", classes=pool.classes, nodes=NODES)
    if not rounds:
        return spec, broadcast, None
    images = {
        "attacker": Images(pool.other, pool.absent),
        "victim": Images(pool.members, pool.absent),
    }
    outcome = simulate(spec, broadcast, images, evaluate_every=rounds)
    return spec, outcome.broadcast, outcome.models["victim"].metadata.metrics["accuracy_own"]


def asked_for(given: argparse.Namespace, name: str, seed: int) -> Iterator[Asked]:
    """The attacks on one pool: all on what is not protected,
    and the worse ones on items under each protection.
    """

    def asked(knows: Knows, view: View, protection: Protection = PROTECTIONS[0]) -> Asked:
        return Asked(
            data=name, knows=knows, view=view, protection=protection, rounds=given.rounds, seed=seed
        )

    yield from (asked("same", "sent", protection) for protection in PROTECTIONS)
    yield from (
        asked("other", "sent", protection) for protection in (PROTECTIONS[0], PROTECTIONS[-1])
    )
    yield from (asked(knows, view) for view in get_args(View)[:-1] for knows in get_args(Knows))


def run(given: argparse.Namespace) -> Iterator[Leak]:
    """What is not in the file yet; each is written there before the next begins."""
    records = Records(given.out, Leak)
    finished = {each.asked for each in records}
    pools: dict[str, Callable[[int], Pool]] = (
        {"drawn": lambda seed: drawn(SIZE, seed)} if given.drawn else {}
    )
    if given.kth:
        pools["kth"] = lambda seed: fabrics(given.kth, SIZE, seed)
    for seed, (name, make) in product(given.seeds, pools.items()):
        missing: dict[Protection, list[Asked]] = defaultdict(list)
        for asked in asked_for(given, name, seed):
            if asked not in finished:
                missing[asked.protection if given.rounds else Protection()].append(asked)
        pool = make(seed) if missing else None
        for protection, some in missing.items():
            assert pool is not None
            spec, broadcast, accuracy = federation(
                pool, given.weights, protection, given.rounds, seed
            )
            plants = seen(pool, spec, broadcast)
            for asked in some:
                leak = measured(plants, asked, accuracy)
                records.add(leak)
                yield leak


def main() -> None:
    """Attack what is not in the file yet, or print the table of what is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drawn", action="store_true", help="attack drawn textures")
    parser.add_argument(
        "--kth", type=Path, help="attack KTH's fabrics: folder of sample_a to sample_d"
    )
    parser.add_argument(
        "--weights", default="none", help="of the stem: none, imagenet or a safetensors file"
    )
    parser.add_argument(
        "--accuracy", dest="rounds", type=int, nargs="?", const=10, default=0, metavar="ROUNDS"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/patch_leak.jsonl")
    )
    parser.add_argument("--json", action="store_true", help="print lines as in the file")
    parser.add_argument(
        "--table", action="store_true", help="print what the file holds, as Markdown"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.table:
        print(table(list(Records(given.out, Leak))))
    else:
        for leak in run(given):
            print(msgspec.json.encode(leak).decode() if given.json else told_of(leak), flush=True)


def told_of(leak: Leak) -> str:
    """One attack in a line."""
    asked, told = leak.asked, ", ".join(f"{name} {value:.2f}" for name, value in leak.told.items())
    pixels = (
        f"PSNR {leak.psnr:.1f} dB (mean: {leak.guess_psnr:.1f}), SSIM {leak.ssim:.2f} "
        f"({leak.guess_ssim:.2f})"
    )
    reached = "" if leak.accuracy is None else f", accuracy {100 * leak.accuracy:.1f} %"
    return (
        f"{asked.data}, knows {asked.knows}, {asked.view}, {words(asked.protection)}: {pixels} "
        f"{told}{reached}"
    )


def words(protection: Protection) -> str:
    """As options are written."""
    differ = (f"{name}={value:g}" for name, value in msgspec.structs.asdict(protection).items())
    usual = {f"{name}={value:g}" for name, value in msgspec.structs.asdict(Protection()).items()}
    return " ".join(each for each in differ if each not in usual) or "none"


def table(lines: Sequence[Leak]) -> str:
    """Markdown, means over seeds: an attack a row."""
    groups: dict[Asked, list[Leak]] = defaultdict(list)
    for each in lines:
        groups[msgspec.structs.replace(each.asked, seed=0)].append(each)
    told = ("class", "most frequent class", "plant", "found", "found at 1 %", "linked")
    head = [
        "data",
        "knows",
        "rounds",
        "seen",
        "protection",
        "PSNR",
        "mean's",
        "SSIM",
        "mean's",
        *told,
        "accuracy",
    ]
    rows = [head, ["---"] * len(head)]
    for asked, group in groups.items():
        figures = [
            _mean(getattr(each, name) for each in group)
            for name in ("psnr", "guess_psnr", "ssim", "guess_ssim")
        ]
        more = [
            f"{_mean(each.told[name] for each in group):.2f}" if group[0].told else ""
            for name in told
        ]
        reached = [each.accuracy for each in group if each.accuracy is not None]
        what = [asked.data, asked.knows, str(asked.rounds), asked.view, words(asked.protection)]
        more.append(f"{100 * _mean(reached):.1f} %" if reached else "")
        rows.append(
            [
                *what,
                *(f"{each:.{digits}f}" for each, digits in zip(figures, (1, 1, 2, 2), strict=True)),
                *more,
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


if __name__ == "__main__":
    main()
