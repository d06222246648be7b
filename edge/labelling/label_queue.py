"""Queue of a line's kept images that wait for a person's label.

The image stays for as long as that can be undone.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.storage import disk
from broker_config.storage.checksums import DamagedError
from edge.inference.image_decoding import MAX_BYTES, ImageError, Photo, read_image
from edge.inference.outcomes import current_time, new_id
from edge.inference.pipeline import Inspection
from edge.labelling.label_folder import LabelFolder
from edge.labelling.label_history import LabelHistory, LabelledImage, Labelling, Undo
from edge.labelling.label_order import SimilarityGroups, instructiveness, order
from edge.uncertainty.image_retention import (
    LARGEST_SIDECAR,
    OVERRULED,
    STEM,
    ImageRetention,
    KeptImage,
    encode,
)

UNDOABLE = 20  # labellings, the newest of each person
_SIDECAR = ".json"


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[labels]` of a line's settings: where images go that a person has labelled."""

    # the plant's images, a folder for each class; made if need be
    path: Annotated[str, Meta(min_length=1)]


class DamagedHistoryError(EdgeNodeError):
    """What people have labelled so far is not known: nobody can label now."""


class WaitingImage(NamedTuple):
    """A kept image without a label, as a page shows it."""

    kept: str  # the name of its file
    group: int  # of images that the model finds alike
    verdict: str  # the model's class
    confidence: float
    doubts: tuple[str, ...]
    time: str
    image: str  # as its source called it
    sampled: bool  # kept at random


class _Indexed(NamedTuple):
    found: KeptImage
    group: int
    uncertainty: float  # 1 less the difference of the two likeliest classes' probabilities


class LabelQueue:
    """The queue of one line. For one thread at a time.

    Which images are kept is read from their folder at each look: a person may delete or sort them
    by hand, too.
    """

    def __init__(
        self, settings: Settings, line: str, retention: Callable[[], ImageRetention | None]
    ) -> None:
        """`retention` keeps the images.

        Raises:
            EdgeNodeError: the folder cannot be used.
            DamagedHistoryError: the history in it is not what was written.
        """
        self._target = Path(settings.path)
        self._current = retention
        self._images: dict[str, _Indexed] = {}  # by stem
        self._groups = SimilarityGroups()
        self.is_damaged = False  # the history, since it was read
        with disk.writing(self._target):
            self._folder = LabelFolder(self._target, line)
            self.history = _open_history(self._target / history_name(line))
            self._folder.finish(self.history.newest)
            # Labelled by a history that was removed: without this they would wait again, and get
            # into a second class.
            self._strangers = self._folder.stems - set(map(_stem, self.history.labelled))

    def folders(self) -> list[str]:
        """Names of classes that have a folder; EdgeNodeError when they cannot be read."""
        with disk.writing(self._target):
            return self._folder.classes

    def waiting(self) -> list[WaitingImage]:
        """The images that wait, the most instructive first.

        Before them come what a person has overruled, and images kept at random as they came: the
        accuracy in service follows from these.
        """
        self._refresh()
        overruled = list[_Indexed]()
        sampled = list[_Indexed]()
        others = list[_Indexed]()
        for each in self._unlabelled:
            if OVERRULED in each.found.doubts:
                group = overruled
            elif each.found.sampled:
                group = sampled
            else:
                group = others
            group.append(each)
        scores = instructiveness(
            np.array([each.uncertainty for each in others], np.float32),
            np.array([each.found.novelty or 0 for each in others], np.float32),
        )
        turns = order(scores, np.array([each.group for each in others], np.int64))
        ordered = (*overruled, *sampled, *(others[position] for position in turns.tolist()))
        return [_show(each) for each in ordered]

    def sample(self, model: str) -> tuple[list[bool], int]:
        """Of a model's images kept at random: whether each verdict was confirmed,
        and how many wait for a label.

        That of an image that was laid aside was not: it may show a class that the model does not
        know. Only those count that came before the first that waits: which ones get a label first
        has no influence then.
        """
        self._refresh()
        waiting = [
            each.found.kept
            for each in self._unlabelled
            if each.found.sampled and each.found.model == model
        ]
        first = min(map(str, waiting), default="~")  # names begin with the time
        right = []
        for labelling in self.history:
            for image in labelling.images:
                if image.sampled and image.model == model and image.kept < first:
                    right.append(image.verdict == labelling.label)
        return right, len(waiting)

    def label(self, names: Iterable[str], label: str | None, person: str) -> tuple[str, ...]:
        """Give images, by the names of their files, a label, or with None lay them aside:
        they shall teach nothing.

        Return those that have it now. Others do not wait any more, and stay as they are.
        EdgeNodeError, and nothing has changed, when the disk fails.
        """
        self._refresh()
        asked = list(dict.fromkeys(names))
        stems = dict.fromkeys(map(_stem, asked))
        wanted = [self._images[stem].found for stem in stems if stem in self._images]
        wanted = [image for image in wanted if not self._is_labelled(image)]
        repeated = self._given_before(asked, label, person)
        with disk.writing(self._target):
            self._folder.finish(self.history.newest)
            images = [self._prepare(image, label) for image in wanted]
            if not (there := tuple(each for each in images if each)):
                return repeated
            if label:
                self._folder.settle(label)
            labelling = Labelling(
                id=new_id(), time=current_time(), person=person, label=label, images=there
            )
            self._add(labelling)
            self._folder.finish(labelling)
        final = chain.from_iterable(
            each.images for each in islice(self._own(person), UNDOABLE, None)
        )
        self._retention.delete(image.kept for image in final)
        return (*repeated, *(image.kept for image in there))

    def _own(self, person: str) -> Iterator[Labelling]:
        """A person's labellings that stand, the newest first."""
        return (each for each in self.history if each.person == person)

    def _given_before(self, names: list[str], label: str | None, person: str) -> tuple[str, ...]:
        """Return the images to which this person's newest labelling has given this label.

        A page whose answer was lost on the way asks again: its label is saved, not too late.
        """
        newest = next(self._own(person), None)
        if newest is None or newest.label != label:
            return ()
        given = {image.kept for image in newest.images}
        return tuple(name for name in names if name in given)

    def overrule(self, inspection: Inspection) -> str:
        """Have an image that was just inspected wait before all others; the name of its file.

        EdgeNodeError when the disk fails.
        """
        retention = self._retention
        with disk.writing(retention.folder):
            name = retention.keep(inspection)
        self._images.pop(_stem(name), None)  # to be read anew
        self._refresh()
        return name

    def undo(self, person: str) -> Labelling:
        """Take a person's own newest labelling back: its images wait again.

        UsageError when there is none, or its images are not kept any more; EdgeNodeError when the
        disk fails.
        """
        newest = next(self._own(person), None)
        folder = self._retention.folder
        if newest is None or not all((folder / image.kept).exists() for image in newest.images):
            raise UsageError(
                f"{person} has no label to undo",
                f"only the newest {UNDOABLE} of one's own can be undone, while their images are "
                f"kept: move others by hand in {self._target}",
            )
        with disk.writing(self._target):
            self._folder.finish(self.history.newest)
            undo = Undo(time=current_time(), person=person, labelling=newest)
            self._add(undo)
            self._folder.finish(undo)
        return newest

    def picture(self, name: str, side: int) -> bytes:
        """What the network saw of an image of the queue,
        as JPEG within so many pixels; ImageError when it is gone.

        It changes nothing, and may be called in another thread than the rest.
        """
        if (image := self._images.get(_stem(name))) is None:
            raise ImageError(f"{name} is not kept any more", "load the queue again")
        picture = self._read(image.found).image
        picture.thumbnail((side, side))
        return encode(picture.convert("RGB"), "JPEG", quality=85)

    def _add(self, entry: Labelling | Undo) -> None:
        """Append an entry to the history; DamagedHistoryError if it was changed meanwhile."""
        try:
            self.history.add(entry)
        except DamagedError as error:
            self.is_damaged = True
            raise _damaged(self.history.path, error) from None

    @property
    def _retention(self) -> ImageRetention:
        if (found := self._current()) is None:
            raise UsageError("this line keeps no images", "add the table [keep] to its settings")
        return found

    @property
    def _unlabelled(self) -> list[_Indexed]:
        """The images that wait, the oldest first."""
        images = sorted(self._images.items())
        return [each for _, each in images if not self._is_labelled(each.found)]

    def _is_labelled(self, image: KeptImage) -> bool:
        kept = str(image.kept)
        return kept in self.history.labelled or _stem(kept) in self._strangers

    def _refresh(self) -> None:
        """Bring the index in step with the folder of kept images."""
        folder = self._retention.folder
        with disk.writing(folder):
            names = set(os.listdir(folder))  # noqa: PTH208  (a third of the time)
        stems = {_stem(name) for name in names if name.endswith(_SIDECAR)}
        for gone in self._images.keys() - stems:
            del self._images[gone]
        for stem in sorted(stems - self._images.keys()):
            if not STEM.fullmatch(stem):
                continue
            with contextlib.suppress(OSError, ValueError):  # it is gone meanwhile, or torn
                found = msgspec.json.decode(
                    disk.read_regular(folder / f"{stem}{_SIDECAR}", LARGEST_SIDECAR),
                    type=KeptImage,
                )
                if found.kept in names and _stem(found.kept) == stem:
                    self._images[stem] = self._index(found)

    def _index(self, found: KeptImage) -> _Indexed:
        """The entry of the index; ValueError for what no line has written."""
        second, best = sorted(found.probabilities.values())[-2:]
        group = self._groups.add(found.model, found.numbers)
        return _Indexed(
            msgspec.structs.replace(found, embedding=b"", tiles=()), group, 1 - (best - second)
        )

    def _prepare(self, image: KeptImage, label: str | None) -> LabelledImage | None:
        """Copy an image into its class folder, hidden; None if it is gone."""
        kept = str(image.kept)
        file = f"{_stem(kept)}.png" if image.seen else kept
        if label:
            try:
                data = disk.read_regular(self._retention.folder / kept, MAX_BYTES)
                content = encode(self._read(image).image, "PNG") if image.seen else data
            except (OSError, ImageError):  # it is gone, or no image any more
                return None
            self._folder.prepare(label, file, content)
        return LabelledImage(
            kept=kept,
            file=file,
            image=image.image,
            verdict=image.label,
            confidence=image.confidence,
            bundle=image.bundle,
            model=image.model,
            doubts=image.doubts,
            sampled=image.sampled,
        )

    def _read(self, image: KeptImage) -> Photo:
        """What the network saw of an image, in the file's own pixels."""
        photo = read_image(self._retention.folder / str(image.kept))
        if image.seen is None:
            return photo
        left, top, width, height = image.seen
        if min(left, top) < 0 or min(width, height) < 1:
            raise _not_seen(image)
        if left + width > photo.image.width or top + height > photo.image.height:
            raise _not_seen(image)
        return photo.crop(image.seen)


def history_name(line: str) -> str:
    """Return the name of the file in the folder of images that has a line's labels."""
    return f"labels-{line}.jsonl"


def _open_history(path: Path) -> LabelHistory:
    try:
        return LabelHistory(path)
    except DamagedError as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: DamagedError) -> DamagedHistoryError:
    return DamagedHistoryError(
        f"the history of labels {path} is damaged: {error}",
        f"restore it from a copy, or remove {path} and {path}.newest and start the line again: "
        "images that are in a class folder stay there, but who labelled them is not known",
    )


def _not_seen(image: KeptImage) -> ImageError:
    return ImageError(
        f"the network cannot have seen that part of {image.kept}",
        "remove the image, and the JSON beside it",
    )


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _show(each: _Indexed) -> WaitingImage:
    found = each.found
    return WaitingImage(
        kept=str(found.kept),
        group=each.group,
        verdict=found.label,
        confidence=round(found.confidence, 4),
        doubts=found.doubts,
        time=found.time,
        image=found.image,
        sampled=found.sampled,
    )
