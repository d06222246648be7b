"""Shares of class-folder data sets for several simulated plants.

No image is in two shares, except for common training images, and none is both in training and held out; the same goes
for groups of images, if there are any. Shares depend on digests, class names, groups and the seed alone, not on file
names or folder order.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from broker_config.protocol.errors import UsageError
from trainer.data.class_folders import Catalogue, drop_duplicates, merge
from trainer.data.folder_scan import Entry
from trainer.training.seeding import generator

_TRIES = 200  # draws before a partition counts as impossible
PARTITIONS = ("disjoint", "dirichlet", "iid", "groups", "sources", "sources_groups")
Pool = Literal["report", "tuning", "all"]


class Share(NamedTuple):
    """The images of one node."""

    node: str
    train: Catalogue
    test: Catalogue


class Scheme(NamedTuple):
    """Partition of a data set among nodes.

    Each node gets exactly `samples` training images, or there is an error. Held-out images come second: one of each
    of its classes is reserved for each node, and a class's remaining images go to the nodes that have it in proportion,
    up to `test_samples` each. Where images suffice for both, `shared` ones do not change a node's other images.
    """

    partition: str  # one of PARTITIONS
    nodes: int
    samples: int  # training images of each node
    seed: int
    classes_per_node: int = 2  # disjoint; of a group of nodes
    alpha: float = 0.1  # dirichlet
    pool: str = "report"
    test_samples: int = 60  # held-out images of each node at most, but one of each of its classes
    shared: int = 0  # of each class: the same training images for every node, beside its own (Zhao et al., 2018)

    def shares(self, *sources: Catalogue, groups: Mapping[str, int] = {}) -> list[Share]:
        """The nodes' shares of the images of all sources, which only `sources` and `sources_groups` keep apart.

        An image in several sources belongs to the first of them. `groups` number images that belong together, by
        digest: each group goes to one side of one node, or to what is common; what that leaves over nobody gets.

        Raises:
            UsageError: there is no such partition or pool, or a class lacks images (it says how many).
        """
        if self.partition not in PARTITIONS or self.pool not in get_args(Pool):
            raise UsageError(
                f"there is no partition {self.partition!r} of pool {self.pool!r}",
                f"partitions are {', '.join(PARTITIONS[:-1])} and {PARTITIONS[-1]}; pools are report, tuning and all",
            )
        pooled = [select_pool(source, self.pool) for source in drop_duplicates(sources)]
        owners = _Owners(groups, {})
        if self.partition in _INNER:
            shares, common = self._by_source(pooled, owners)
        else:
            whole = merge(pooled)
            if self.partition == "groups":
                self._check_groups([whole])
            shares, common = self._shares(whole, self._common([whole])[0], owners)
        return [share._replace(train=merge([share.train, common])) for share in shares]

    def _by_source(self, sources: Sequence[Catalogue], owners: "_Owners") -> "_Dealt":
        """Feature skew: sources are dealt to nodes in turn, whose nodes share it evenly, or by groups of its classes.

        A class's common images come from all sources that have it, evenly.
        """
        if self.nodes < len(sources):
            raise UsageError(
                f"{self.nodes} nodes cannot have {len(sources)} sources, one each",
                "take more --nodes, or fewer --data",
            )
        if self.partition == "sources_groups":
            self._check_groups(sources)
        common = self._common(sources)
        shares: dict[int, Share] = {}
        shown = []
        for first, source in enumerate(sources):
            numbers = range(first, self.nodes, len(sources))
            inner = self._replace(partition=_INNER[self.partition], nodes=len(numbers))
            mine, theirs = inner._shares(source, common[first], owners, f" of source {first + 1}")
            shares |= dict(zip(numbers, mine, strict=True))
            shown.append(theirs)
        ordered = [shares[number]._replace(node=f"plant-{number + 1}") for number in range(self.nodes)]
        return _Dealt(ordered, merge(shown))

    def _common(self, sources: Sequence[Catalogue]) -> list[Counter[str]]:
        """The number of common images that each source contributes, by class."""
        counts = [Counter[str]() for _ in sources]
        for name in merge(sources).classes:
            holders = [number for number, source in enumerate(sources) if name in source.classes]
            for number, n in zip(holders, _split_evenly(self.shared, len(holders)), strict=True):
                counts[number][name] = n
        return counts

    def _shares(self, catalogue: Catalogue, common: Counter[str], owners: "_Owners", suffix: str = "") -> "_Dealt":
        """The shares of one catalogue, redrawn while a class lacks images; errors name it by `suffix`."""
        draws = {"disjoint": self._disjoint, "dirichlet": self._dirichlet, "iid": self._iid, "groups": self._groups}
        tries = _TRIES if self.partition == "dirichlet" else 1  # the others always need as many images of a class
        least = Counter[str]()
        for attempt in range(tries):
            random = generator(self.seed, "partition", self.partition, attempt)
            train_counts = draws[self.partition](catalogue, random)
            lacking = _count_lacking(catalogue, train_counts, common)
            if not lacking:
                test_counts = [_scale_counts(counts, self.test_samples) for counts in train_counts]
                dealt = _deal_images(catalogue, train_counts, test_counts, common, random, owners, suffix)
                if isinstance(dealt, _Dealt):
                    return dealt
                lacking = dealt
            least = min(least or lacking, lacking, key=Counter.total)
        there = Counter(entry.class_name for entry in catalogue.entries)
        classes = "; ".join(
            f"class {name} lacks {count} of {there[name] + count} images" for name, count in sorted(least.items())
        )
        drawn = f", not in {tries} draws; in the nearest" if tries > 1 else ""
        images = f"{self.samples} images{f' and {self.shared} common ones a class' if self.shared else ''}{suffix}"
        whole = "; look-alikes go to one side of one node" if owners.has_groups(catalogue) else ""
        raise UsageError(
            f"{self.nodes} {self.partition} shares of {images} cannot be had{drawn}: {classes}{whole}",
            "take fewer --nodes, --samples or --shared, or bring more images of that class",
        )

    def _disjoint(self, catalogue: Catalogue, random: np.random.Generator) -> list[Counter[str]]:
        """Each node gets `classes_per_node` random classes, its images split as evenly as possible among them.

        Classes are dealt from shuffled decks, so every class is somebody's before one is dealt again.
        """
        each = self._each(catalogue)
        deck: list[str] = []
        shares = []
        for _ in range(self.nodes):
            mine: list[str] = []
            while len(mine) < each:
                if not [name for name in deck if name not in mine]:
                    deck += [str(name) for name in random.permutation(catalogue.classes)]
                name = next(name for name in deck if name not in mine)
                deck.remove(name)
                mine.append(name)
            shares.append(self._evenly(mine))
        return shares

    def _groups(self, catalogue: Catalogue, random: np.random.Generator) -> list[Counter[str]]:
        """Label skew: each class is one group's, which has `classes_per_node`, the last what is left (FedTFI, 4.2.1).

        Nodes are dealt to groups in turn, and those of a group have its classes evenly. Sources with the same classes
        have the same groups.
        """
        each, classes = self._each(catalogue), [str(name) for name in random.permutation(catalogue.classes)]
        groups = [classes[first : first + each] for first in range(0, len(classes), each)]
        return [self._evenly(groups[number % len(groups)]) for number in range(self.nodes)]

    def _check_groups(self, sources: Sequence[Catalogue]) -> None:
        """Raise UsageError unless each group of each source, to which nodes are dealt in turn, has a node."""
        groups = [-(-len(source.classes) // self._each(source)) for source in sources]
        needed = max(first + 1 + (count - 1) * len(sources) for first, count in enumerate(groups))
        for first, (source, count) in enumerate(zip(sources, groups, strict=True)):
            mine = len(range(first, self.nodes, len(sources)))
            if mine < count:
                each, classes = self.classes_per_node, len(source.classes)
                of_source = f"the nodes of source {first + 1}, {mine} of {self.nodes},"
                raise UsageError(
                    f"{of_source if len(sources) > 1 else f'{mine} nodes'} cannot have {count} groups of {each} of "
                    f"{classes} classes, one each",
                    f"take --nodes {needed} or more, or more --classes-per-node",
                )

    def _each(self, catalogue: Catalogue) -> int:
        """The number of classes of each node. UsageError if there are too few classes or images for it."""
        classes, each = len(catalogue.classes), self.classes_per_node
        if each > min(classes, self.samples):
            raise UsageError(
                f"{each} classes for each node cannot be had from {classes} classes, {self.samples} images a node",
                "pass fewer --classes-per-node",
            )
        return each

    def _dirichlet(self, catalogue: Catalogue, random: np.random.Generator) -> list[Counter[str]]:
        """Each node draws its class proportions from Dir(alpha)."""
        classes = catalogue.classes
        draws = random.dirichlet(np.full(len(classes), self.alpha), self.nodes)
        return [
            Counter(
                {
                    name: n
                    for name, n in zip(classes, _round_to_total(row * self.samples, self.samples), strict=True)
                    if n
                }
            )
            for row in draws
        ]

    def _iid(self, catalogue: Catalogue, random: np.random.Generator) -> list[Counter[str]]:  # noqa: ARG002
        """Every node gets the same number of each class. What cannot be split goes to the first classes, one each."""
        return [self._evenly(catalogue.classes)] * self.nodes

    def _evenly(self, classes: Sequence[str]) -> Counter[str]:
        """A node's training images, of these classes in equal parts."""
        return Counter(
            {name: n for name, n in zip(classes, _split_evenly(self.samples, len(classes)), strict=True) if n}
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
        numbers = [self.groups[entry.digest] for entry in catalogue.entries if entry.digest in self.groups]
        return len(set(numbers)) < len(numbers)

    def draw(self, deck: list[Entry], count: int, owner: str) -> list[Entry]:
        """Take images, or fewer, from a deck's end; those of groups that another one has taken are dropped."""
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
        places = [first.setdefault(self.groups.get(entry.digest, -1 - at), at) for at, entry in enumerate(deck)]
        return [deck[at] for at in sorted(range(len(deck)), key=places.__getitem__)]


_INNER = {"sources": "iid", "sources_groups": "groups"}  # how the nodes of one source share it


def select_pool(catalogue: Catalogue, name: str) -> Catalogue:
    """One side of the data set's only split: about a third for `tuning`, the rest for `report`, by content hash.

    It depends on no seed: what is tuned on the tuning pool has never seen an image of the report pool.
    """
    if name == "all":
        return catalogue
    chosen = tuple(entry for entry in catalogue.entries if (int(entry.digest[:8], 16) % 3 == 0) == (name == "tuning"))
    return Catalogue(chosen)


def write_shares(shares: Sequence[Share], folder: Path) -> None:
    """Lay the shares out as folders that `edge-node join` takes: NODE/train/CLASS/ and NODE/test/CLASS/."""
    for share in shares:
        for side, catalogue in (("train", share.train), ("test", share.test)):
            for entry in catalogue.entries:
                target = folder / share.node / side / entry.class_name / (entry.digest[:16] + entry.path.suffix.lower())
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry.path, target)


def _split_evenly(total: int, parts: int) -> list[int]:
    """`total` in equal parts; what cannot be split goes to the first, one each."""
    return _round_to_total(np.full(parts, total / parts), total)


def _round_to_total(shares: np.ndarray, total: int) -> list[int]:
    """Whole numbers that add up to `total`, by largest remainders."""
    counts = np.floor(shares + 1e-9).astype(int)
    largest = np.argsort(-(shares - counts), kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return [int(count) for count in counts]


def _scale_counts(counts: Counter[str], total: int) -> Counter[str]:
    """The same proportions, adding up to `total`, but at least one of each class."""
    scaled = np.maximum(1, _round_to_total(np.array(list(counts.values())) * (total / counts.total()), total))
    while scaled.sum() > max(total, len(scaled)):  # the ones above are taken from the largest
        scaled[scaled.argmax()] -= 1
    return Counter(dict(zip(counts, scaled.tolist(), strict=True)))


def _count_lacking(catalogue: Catalogue, train: Sequence[Counter[str]], common: Counter[str]) -> Counter[str]:
    """The number of images that each class lacks for this; empty if none does.

    Each node must get its training images, and at least one held-out image of each of its classes; what is common to
    all comes on top.
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
    """Deal the images: common ones from one end of each class's shuffled deck, the nodes' own from the other.

    Where groups make images unusable, fewer are held out; if that is not enough, the answer is what each class lacks.
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
        if any(max(counts[name] for counts in tests) <= 1 for name in missing):
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
            drawn = [entry for name, n in counts.items() for entry in draw(name, left[name], n, owner)]
            parts.append(Catalogue(tuple(sorted(drawn, key=_by_digest))))
        shares.append(Share(f"plant-{number}", *parts))
    return _Dealt(shares, Catalogue(tuple(shown))), +missing


def _fit_test_counts(
    there: Counter[str], train: Sequence[Counter[str]], test: Sequence[Counter[str]]
) -> list[Counter[str]]:
    """The held-out counts; a class with fewer images left than they ask for is shared in proportion, one each first."""
    afforded = [counts.copy() for counts in test]
    for name, count in there.items():
        holders = [counts for counts in afforded if name in counts]
        beyond_one = np.array([counts[name] - 1 for counts in holders])
        spare = max(0, count - sum(counts[name] for counts in train) - len(holders))
        if beyond_one.sum() > spare:
            for counts, n in zip(holders, _round_to_total(beyond_one * (spare / beyond_one.sum()), spare), strict=True):
                counts[name] = 1 + n
    return afforded


def _by_digest(entry: Entry) -> str:
    return entry.digest
