"""Shares of class-folder data sets for several simulated plants.

No image is in two shares, except for common training images, and none is both in training and held
out; the same goes for groups of images, if there are any. Shares depend on digests, class names,
groups and the seed alone, not on file names or folder order.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from broker_config.protocol.errors import UsageError, suggest
from trainer.data.class_folders import Catalogue, drop_duplicates, merge
from trainer.data.folder_scan import Entry
from trainer.data.partitions import make
from trainer.data.partitions.partition_rule import Partition, round_to_total, split_evenly
from trainer.seeding import generator

Pool = Literal["report", "tuning", "all"]


class Share(NamedTuple):
    """The images of one node."""

    node: str
    train: Catalogue
    test: Catalogue


class Scheme(NamedTuple):
    """Partition of a data set among nodes.

    Each node gets exactly `samples` training images, or there is an error. Held-out images come
    second: one of each of its classes is reserved for each node, and a class's remaining images go
    to the nodes that have it in proportion, up to `test_samples` each. Where images suffice for
    both, `shared` ones do not change a node's other images.
    """

    partition: str  # one of PARTITIONS; its options may follow: NAME,OPTION=VALUE
    nodes: int
    samples: int  # training images of each node
    seed: int
    options: Mapping[str, object] = {}  # of any partition
    pool: str = "report"
    test_samples: int = 60  # held-out images of each node at most, but one of each of its classes
    # of each class: the same training images for every node, beside its own (Zhao et al., 2018)
    shared: int = 0

    def rule(self) -> Partition:
        """The partition, with its options.

        Raises:
            UsageError: there is no such partition, option or pool, or a value is out of range.
        """
        if self.pool not in get_args(Pool):
            raise UsageError(f"there is no pool {self.pool!r}", suggest(self.pool, get_args(Pool)))
        return make(self.partition, self.options)

    def shares(self, *sources: Catalogue, groups: Mapping[str, int] = {}) -> list[Share]:
        """The nodes' shares of the images of all sources, which a partition may keep apart.

        An image in several sources belongs to the first of them. `groups` number images that belong
        together, by digest: each group goes to one side of one node, or to what is common; what
        that leaves over nobody gets.

        Raises:
            UsageError: as `rule`, or a class lacks images (it says how many).
        """
        partition = self.rule()
        owners = _Owners(groups, {})
        pooled = [select_pool(source, self.pool) for source in drop_duplicates(sources)]
        for number, source in enumerate(pooled, 1):
            if not source.entries:
                raise UsageError(
                    f"source {number} has no image in pool {self.pool} that no source before it "
                    "has",
                    "leave it out, bring more images, or take --pool all",
                )
        if within := partition.within_source():
            shares, common = self._deal(
                within, pooled, owners, [f" of source {n + 1}" for n in range(len(pooled))]
            )
        else:
            shares, common = self._deal(partition, [merge(pooled)], owners, [""])
        return [share._replace(train=merge([share.train, common])) for share in shares]

    def _deal(
        self,
        partition: Partition,
        sources: Sequence[Catalogue],
        owners: "_Owners",
        suffixes: Sequence[str],
    ) -> "_Dealt":
        """Sources are dealt to nodes in turn, whose nodes share it by the partition;
        errors name it by its suffix.

        A class's common images come from all sources that have it, evenly.
        """
        if self.nodes < len(sources):
            raise UsageError(
                f"{self.nodes} nodes cannot have {len(sources)} sources, one each",
                "take more --nodes, or fewer --data",
            )
        partition.check([source.classes for source in sources], self.nodes, self.samples)
        shares: dict[int, Share] = {}
        shown = []
        for first, (source, common) in enumerate(zip(sources, self._common(sources), strict=True)):
            numbers = range(first, self.nodes, len(sources))
            mine, theirs = self._share(
                partition, source, len(numbers), common, owners, suffixes[first]
            )
            shares |= dict(zip(numbers, mine, strict=True))
            shown.append(theirs)
        ordered = [
            shares[number]._replace(node=f"plant-{number + 1}") for number in range(self.nodes)
        ]
        return _Dealt(ordered, merge(shown))

    def _common(self, sources: Sequence[Catalogue]) -> list[Counter[str]]:
        """The number of common images that each source contributes, by class."""
        counts = [Counter[str]() for _ in sources]
        for name in merge(sources).classes:
            holders = [number for number, source in enumerate(sources) if name in source.classes]
            for number, n in zip(holders, split_evenly(self.shared, len(holders)), strict=True):
                counts[number][name] = n
        return counts

    def _share(
        self,
        partition: Partition,
        catalogue: Catalogue,
        nodes: int,
        common: Counter[str],
        owners: "_Owners",
        suffix: str,
    ) -> "_Dealt":
        """The shares of one catalogue, redrawn while a class lacks images;
        errors name it by `suffix`.
        """
        least = Counter[str]()
        for attempt in range(partition.draws):
            random = generator(self.seed, "partition", partition.name, attempt)
            train_counts = partition.count(catalogue.classes, nodes, self.samples, random)
            lacking = _count_lacking(catalogue, train_counts, common)
            if not lacking:
                test_counts = [_scale_counts(counts, self.test_samples) for counts in train_counts]
                dealt = _deal_images(
                    catalogue, train_counts, test_counts, common, random, owners, suffix
                )
                if isinstance(dealt, _Dealt):
                    return dealt
                lacking = dealt
            least = min(least or lacking, lacking, key=Counter.total)
        there = Counter(entry.class_name for entry in catalogue.entries)
        classes = "; ".join(
            f"class {name} lacks {count} of {there[name] + count} images"
            for name, count in sorted(least.items())
        )
        drawn = f", not in {partition.draws} draws; in the nearest" if partition.draws > 1 else ""
        shared_text = f" and {self.shared} common ones a class" if self.shared else ""
        images = f"{self.samples} images{shared_text}{suffix}"
        whole = "; look-alikes go to one side of one node" if owners.has_groups(catalogue) else ""
        raise UsageError(
            f"{nodes} {partition.name} shares of {images} cannot be had{drawn}: {classes}{whole}",
            "take fewer --nodes, --samples or --shared, or bring more images of that class",
        )


class _Dealt(NamedTuple):
    shares: list[Share]
    common: Catalogue  # that all nodes train on


class _Owners(NamedTuple):
    """Who has taken images of each group: one side of a node, or all nodes."""

    groups: Mapping[str, int]  # by digest
    taken: dict[int, str]

    def has_groups(self, catalogue: Catalogue) -> bool:
        """Whether there are groups of several images."""
        numbers = [
            self.groups[entry.digest] for entry in catalogue.entries if entry.digest in self.groups
        ]
        return len(set(numbers)) < len(numbers)

    def draw(self, deck: list[Entry], count: int, owner: str) -> list[Entry]:
        """Take images, or fewer, from a deck's end;
        those of groups that another one has taken are dropped.
        """
        drawn: list[Entry] = []
        while deck and len(drawn) < count:
            entry = deck.pop()
            group = self.groups.get(entry.digest)
            if group is None or self.taken.setdefault(group, owner) == owner:
                drawn.append(entry)
        return drawn

    def gather(self, deck: Sequence[Entry]) -> list[Entry]:
        """The deck with each group's images in a row, where the first of them is."""
        first: dict[int, int] = {}
        places = [
            first.setdefault(self.groups.get(entry.digest, -1 - at), at)
            for at, entry in enumerate(deck)
        ]
        return [deck[at] for at in sorted(range(len(deck)), key=places.__getitem__)]


def select_pool(catalogue: Catalogue, name: str) -> Catalogue:
    """One side of the data set's only split: about a third for `tuning`,
    the rest for `report`, by content hash.

    It depends on no seed: what is tuned on the tuning pool has never seen an image of the report
    pool.
    """
    if name == "all":
        return catalogue
    chosen = tuple(
        entry
        for entry in catalogue.entries
        if (int(entry.digest[:8], 16) % 3 == 0) == (name == "tuning")
    )
    return Catalogue(chosen)


def write_shares(shares: Sequence[Share], folder: Path) -> None:
    """Lay the shares out as folders that `edge-node join` takes:
    NODE/train/CLASS/ and NODE/test/CLASS/.
    """
    for share in shares:
        for side, catalogue in (("train", share.train), ("test", share.test)):
            for entry in catalogue.entries:
                target = (
                    folder
                    / share.node
                    / side
                    / entry.class_name
                    / (entry.digest[:16] + entry.path.suffix.lower())
                )
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry.path, target)


def _scale_counts(counts: Counter[str], total: int) -> Counter[str]:
    """The same proportions, adding up to `total`, but at least one of each class."""
    scaled = np.maximum(
        1, round_to_total(np.array(list(counts.values())) * (total / counts.total()), total)
    )
    while scaled.sum() > max(total, len(scaled)):  # the ones above are taken from the largest
        scaled[scaled.argmax()] -= 1
    return Counter(dict(zip(counts, scaled.tolist(), strict=True)))


def _count_lacking(
    catalogue: Catalogue, train: Sequence[Counter[str]], common: Counter[str]
) -> Counter[str]:
    """The number of images that each class lacks for this; empty if none does.

    Each node must get its training images, and at least one held-out image of each of its classes;
    what is common to all comes on top.
    """
    there = Counter(entry.class_name for entry in catalogue.entries)
    needed = sum((counts + Counter(dict.fromkeys(counts, 1)) for counts in train), common)
    return needed - there


def _deal_images(
    catalogue: Catalogue,
    train: Sequence[Counter[str]],
    test: Sequence[Counter[str]],
    common: Counter[str],
    random: np.random.Generator,
    owners: _Owners,
    suffix: str,
) -> "_Dealt | Counter[str]":
    """Deal the images: common ones from one end of each class's shuffled deck,
    the nodes' own from the other.

    Where groups make images unusable, fewer are held out; if that is not enough, the answer is what
    each class lacks.
    """
    decks: dict[str, list[Entry]] = {}
    for name in catalogue.classes:
        mine = [entry for entry in catalogue.entries if entry.class_name == name]
        decks[name] = owners.gather([mine[position] for position in random.permutation(len(mine))])
    usable = Counter({name: len(deck) - common[name] for name, deck in decks.items()})
    while True:
        trial = owners._replace(taken=dict(owners.taken))
        tests = _fit_test_counts(usable, train, test)
        dealt, missing = _deal_once(decks, train, tests, common, trial, suffix)
        if not missing:
            owners.taken.update(trial.taken)
            return dealt
        for name in missing:
            if max(counts[name] for counts in tests) <= 1:
                return missing
        usable.subtract(missing)


def _deal_once(
    decks: Mapping[str, Sequence[Entry]],
    train: Sequence[Counter[str]],
    test: Sequence[Counter[str]],
    common: Counter[str],
    owners: _Owners,
    suffix: str,
) -> tuple[_Dealt, Counter[str]]:
    """What is dealt, and how many images of each class that lacks."""
    missing = Counter[str]()

    def draw(name: str, deck: list[Entry], count: int, owner: str) -> list[Entry]:
        drawn = owners.draw(deck, count, owner)
        missing[name] += count - len(drawn)
        return drawn

    left = {name: list(deck) for name, deck in decks.items()}
    shown: list[Entry] = []
    for name, deck in left.items():
        deck.reverse()
        shown += draw(name, deck, common[name], "common")
        deck.reverse()
    shares = []
    for number, (train_counts, test_counts) in enumerate(zip(train, test, strict=True), 1):
        parts = []
        for side, counts in (("train", train_counts), ("test", test_counts)):
            owner = f"plant-{number}{suffix}: {side}"
            drawn = list(
                chain.from_iterable(draw(name, left[name], n, owner) for name, n in counts.items())
            )
            parts.append(Catalogue(tuple(sorted(drawn, key=_by_digest))))
        shares.append(Share(f"plant-{number}", *parts))
    return _Dealt(shares, Catalogue(tuple(shown))), +missing


def _fit_test_counts(
    there: Counter[str], train: Sequence[Counter[str]], test: Sequence[Counter[str]]
) -> list[Counter[str]]:
    """The held-out counts; a class with fewer images left than they ask for is shared in
    proportion, one each first.
    """
    afforded = [counts.copy() for counts in test]
    for name, count in there.items():
        holders = [counts for counts in afforded if name in counts]
        beyond_one = np.array([counts[name] - 1 for counts in holders])
        spare = max(0, count - sum(counts[name] for counts in train) - len(holders))
        if beyond_one.sum() > spare:
            for counts, n in zip(
                holders, round_to_total(beyond_one * (spare / beyond_one.sum()), spare), strict=True
            ):
                counts[name] = 1 + n
    return afforded


def _by_digest(entry: Entry) -> str:
    return entry.digest
