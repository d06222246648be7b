"""Tables of the consensus head's study, and how well images that are left out forecast what is
reached.

    python -m research.studies.consensus_head_tables

prints what `python -m research.studies.consensus_head` has stored: means and standard deviations
over seeds, in %.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from research.afedcl.datasets import DATASETS
from research.runner.store import Records
from research.runner.tables import Table, format_spread
from research.studies.consensus_head import DIMENSIONS, SAMPLES, Plant, Result
from trainer.statistics.lda_head import fit_scale

HEADS = {
    "gaussian": "gaussian",
    "own sums": "its own sums alone",
    "pooled means": "pooled means",
    f"{DIMENSIONS} directions": f"{DIMENSIONS} directions",
}
NEWCOMER = {
    "no label": "no label",
    "one label a class, alone": "one label a class, alone",
    "one label a class": "one label a class, joined",
}
ARRIVING = ("own right", "own called another's", "arriving right")
PRIORS = {
    "left out, uniform": "uniform",
    "left out, default": "default, certainty of left-out images",
    "held out, default": "default, certainty of held-out images",
}
G = TypeVar("G", bound=Hashable)


class Forecast(NamedTuple):
    """What left-out images say of a plant; shares in 0..1."""

    own: float
    all: float  # of its own images, all classes being candidates
    images: int


Correction = Callable[[Sequence[Plant]], list[Forecast]]  # of a federation's plants


def left_out(plant: Plant) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, C] of a plant's images, each by a head without it, and their labels."""
    labels = np.array(plant.left_out.labels)
    return np.frombuffer(plant.left_out.logits, np.float32).astype(float).reshape(
        len(labels), -1
    ), labels


def plain(plants: Sequence[Plant]) -> list[Forecast]:
    """The share of its left-out images that are right."""
    return [_forecast(plant, np.ones(len(plant.left_out.labels))) for plant in plants]


def fewer_errors(plants: Sequence[Plant]) -> list[Forecast]:
    """An error counts (N - 1) / N where plants have N images of its class:
    as if errors fell as 1 / N.
    """
    rest = [np.add(plant.left_out.rest, plant.left_out.elsewhere) for plant in plants]
    return [_forecast(plant, each / (each + 1)) for plant, each in zip(plants, rest, strict=True)]


def two_thirds(plants: Sequence[Plant]) -> list[Forecast]:
    """An error counts two thirds."""
    return [_forecast(plant, np.full(len(plant.left_out.labels), 2 / 3)) for plant in plants]


def half_an_image(plants: Sequence[Plant]) -> list[Forecast]:
    """As if half an image more were right."""
    return [
        _forecast(plant, np.full(images := len(plant.left_out.labels), images / (images + 0.5)))
        for plant in plants
    ]


def shrunk(images: float, inner: Correction) -> Correction:
    """Moved towards the federation's mean, which counts as so many images."""

    def correct(plants: Sequence[Plant]) -> list[Forecast]:
        found = inner(plants)
        counts = [each.images for each in found]
        own, among = (
            np.average(shares, weights=counts)
            for shares in ([f.own for f in found], [f.all for f in found])
        )
        return [
            Forecast(float(w * f.own + (1 - w) * own), float(w * f.all + (1 - w) * among), f.images)
            for f, w in ((each, each.images / (each.images + images)) for each in found)
        ]

    return correct


CORRECTIONS: dict[str, Correction] = {
    "plain": plain,
    "half an image": half_an_image,
    "fewer errors": fewer_errors,
    "two thirds of errors": two_thirds,
    **{f"shrunk, {images} images": shrunk(images, plain) for images in (5, 10, 20)},
    "fewer errors, shrunk, 10 images": shrunk(10, fewer_errors),
    "two thirds of errors, shrunk, 10 images": shrunk(10, two_thirds),
}
CHOSEN = "two thirds of errors, shrunk, 10 images"  # on the tuning pool


def _forecast(plant: Plant, errors: np.ndarray) -> Forecast:
    """With what an error at each image counts."""
    logits, labels = left_out(plant)
    own = np.unique(labels)
    among = float((errors * (logits.argmax(1) != labels)).mean())
    return Forecast(
        1 - float((errors * (own[logits[:, own].argmax(1)] != labels)).mean()),
        1 - among,
        len(labels),
    )


def accuracies(results: Sequence[Result]) -> Table:
    """Own / all of each kind of head in each setting."""
    rows = []
    for setting, group in _by(results, _setting):
        row = [setting]
        for head in HEADS:
            views = [
                [_mean(plant.heads[head][view] for plant in each.plants) for each in group]
                for view in (0, 2)
            ]
            row.append(" / ".join(map(format_spread, views)))
        rows.append(row)
    return Table("Own / all", ["", *HEADS.values()], rows)


def newcomers(results: Sequence[Result]) -> Table:
    """Own accuracy of a plant that joins four others."""
    rows = []
    for setting, group in _by([each for each in results if each.trial.classes == 3], _setting):
        row = [setting]
        for name in NEWCOMER:
            row.append(
                format_spread(
                    [_mean(plant.newcomer[name] for plant in each.plants) for each in group]  # type: ignore[index]
                )
            )
        for head in ("own sums", "gaussian"):
            row.append(
                format_spread(
                    [_mean(plant.heads[head][0] for plant in each.plants) for each in group]
                )
            )
        rows.append(row)
    return Table(
        "A newcomer", ["", *NEWCOMER.values(), "all labels, alone", "all labels, joined"], rows
    )


def arriving(results: Sequence[Result]) -> Table:
    """Classes that a plant has none of, by the weight that they have."""
    rows = []
    for setting, group in _by(results, _setting):
        row = [setting]
        for prior in PRIORS:
            shares = (
                [
                    _mean(plant.arriving.get(f"{prior}: {name}", np.nan) for plant in each.plants)  # type: ignore[union-attr]
                    for each in group
                ]
                for name in ARRIVING
            )
            row.append(" / ".join(f"{np.mean(share):.1f}" for share in shares))
        rows.append(row)
    return Table(" / ".join(ARRIVING), ["", *PRIORS.values()], rows)


def forecasts(results: Sequence[Result], names: Iterable[str]) -> Table:
    """Correlation, mean difference and mean absolute difference of forecast and reached
    accuracy.
    """
    rows = []
    for name in names:
        row = [name]
        plants, federations = [], []
        for each in results:
            found = CORRECTIONS[name](each.plants)
            reached = [plant.heads["gaussian"] for plant in each.plants]
            plants += [(f.own, r[0], f.all, r[1]) for f, r in zip(found, reached, strict=True)]
            counts = [f.images for f in found]
            own, among = (np.average([f[view] for f in found], weights=counts) for view in (0, 1))
            federations.append(
                (own, np.mean([r[0] for r in reached]), among, np.mean([r[2] for r in reached]))
            )
        for values in (np.array(plants), np.array(federations)):
            row += [_agreement(values[:, 0], values[:, 1]), _agreement(values[:, 2], values[:, 3])]
        rows.append(row)
    columns = [
        "forecast",
        "plant, own",
        "plant, its images among all classes",
        "federation, own",
        "federation, all",
    ]
    return Table("Correlation, mean error, mean absolute error", columns, rows)


def _agreement(forecast: np.ndarray, reached: np.ndarray) -> str:
    error = 100 * (forecast - reached)
    return (
        f"{np.corrcoef(forecast, reached)[0, 1]:.2f}, {error.mean():+.1f}, "
        f"{np.abs(error).mean():.1f}"
    )


def encoder_accuracies(results: Sequence[Result]) -> Table:
    """Own / all by encoder: means over partitions and seeds."""
    names = list(dict.fromkeys(each.trial.encoder for each in results))
    rows = []
    for (dataset, samples), group in _by(
        results, lambda each: (each.trial.dataset, each.trial.samples)
    ):
        row = [f"{DATASETS[dataset].name}, {samples} images"]
        for name in names:
            plants = [
                plant for each in group if each.trial.encoder == name for plant in each.plants
            ]
            row.append(
                " / ".join(
                    f"{_mean(plant.heads['gaussian'][view] for plant in plants):.1f}"
                    for view in (0, 2)
                )
            )
        rows.append(row)
    return Table("Own / all by encoder", ["", *names], rows)


def encoders(results: Sequence[Result], title: str) -> Table:
    """How often the encoder that left-out images choose is the best on held-out ones,
    and what is lost elsewhere.
    """
    trials: dict[Hashable, dict[str, Result]] = defaultdict(dict)
    for each in results:
        trial = each.trial
        trials[trial.dataset, trial.partition, trial.classes, trial.samples, trial.seed][
            trial.encoder
        ] = each
    most = max(map(len, trials.values()))
    complete = [found for found in trials.values() if len(found) == most]
    choices: dict[str, Callable[[Mapping[str, Result]], str]] = {
        name: lambda found, judge=judge: min(found, key=lambda encoder: judge(found[encoder]))  # type: ignore[misc]
        for name, judge in JUDGES.items()
    }
    for encoder in complete[0]:
        choices[f"always {encoder}"] = lambda _, encoder=encoder: encoder  # type: ignore[misc]
    rows = []
    for name, choose in choices.items():
        row = [name]
        for view in (0, 2):
            lost = []
            for found in complete:
                reached = {
                    key: _mean(plant.heads["gaussian"][view] for plant in each.plants)
                    for key, each in found.items()
                }
                lost.append(max(reached.values()) - reached[choose(found)])
            row.append(f"{lost.count(0)} of {len(complete)}, {np.mean(lost):.1f}")
        rows.append(row)
    return Table(f"Right choices, mean points lost: {title}", ["chosen by", "own", "all"], rows)


def _loss(result: Result, *, common: bool) -> float:
    """Cross-entropy of all plants' left-out images, scaled for all plants in common,
    or as it is.
    """
    pairs = [left_out(plant) for plant in result.plants]
    logits, labels = (np.concatenate(each) for each in zip(*pairs, strict=True))
    scaled = logits * (fit_scale(logits, labels) if common else 1)
    shifted = scaled - scaled.max(1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]).sum())


def _loss_by_plant(result: Result) -> float:
    """Likewise, scaled for each plant."""
    return sum(
        _loss(Result(trial=result.trial, plants=[plant]), common=True) for plant in result.plants
    )


JUDGES: dict[str, Callable[[Result], float]] = {
    "cross-entropy": lambda result: _loss(result, common=False),
    "cross-entropy, scaled for each plant": _loss_by_plant,
    "cross-entropy, scaled for all in common": lambda result: _loss(result, common=True),
    "errors among all classes": lambda result: -_mean(each.all for each in plain(result.plants)),
}


def _mean(shares: Iterable[float]) -> float:
    """In %."""
    return 100 * float(np.nanmean([*shares]))


def _setting(result: Result) -> str:
    trial = result.trial
    name = DATASETS[trial.dataset].name if trial.dataset in DATASETS else trial.dataset
    partition = f"{trial.partition}, {trial.classes} classes" if trial.classes else "Dirichlet"
    return f"{name}, {partition}, {trial.samples} images"


def _order(result: Result) -> tuple[str, str, int, int]:
    """Sorts settings: Dirichlet last."""
    trial = result.trial
    return trial.dataset, "" if trial.classes else trial.partition, trial.classes, trial.samples


def _by(results: Iterable[Result], key: Callable[[Result], G]) -> Iterator[tuple[G, list[Result]]]:
    groups: dict[G, list[Result]] = defaultdict(list)
    for each in results:
        groups[key(each)].append(each)
    return iter(groups.items())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--file", type=Path, default=Path("research/results/studies/consensus_head.jsonl")
    )
    parser.add_argument("--pool", choices=("report", "tuning"), default="report")
    asked = parser.parse_args()
    stored = [each for each in Records(asked.file, Result) if each.trial.pool == asked.pool]
    print(*(f"{each.trial}: {each.lacking}" for each in stored if each.lacking), sep="\n")
    results = sorted((each for each in stored if each.plants), key=_order)
    frozen = [each for each in results if each.trial.encoder == "imagenet"]
    names = CORRECTIONS if asked.pool == "tuning" else ("plain", CHOSEN)
    tables = [accuracies(frozen), newcomers(frozen), arriving(frozen), forecasts(frozen, names)]
    tables += [encoder_accuracies(results), encoders(results, "all encoders")]
    tables += [
        encoders([each for each in results if each.trial.samples == n], f"{n} images")
        for n in SAMPLES
    ]
    tables.append(
        encoders([each for each in results if each.trial.encoder != "surface"], "without surface")
    )
    for table in tables:
        print(f"{table.title}\n\n{table.markdown()}\n")


if __name__ == "__main__":
    main()
