"""The images of a plant for a federation: folders that are scanned first,
and read once its classes are known.
"""

import hashlib
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from broker_config.protocol.messages import Spec
from trainer.data import class_folders
from trainer.data.checks import image_rules
from trainer.data.checks.check_run import format_brief, image_options, load_checked
from trainer.data.checks.findings import raise_errors
from trainer.data.class_folders import HoldOut, Images, LabelledImages
from trainer.data.class_names import check_own_aliases
from trainer.data.folder_scan import FolderScan, scan_folder
from trainer.data.image_groups import UNGROUPED, read_keys
from trainer.federation.client.class_aliases import assign_classes
from trainer.methods.base import Method


def digest_images(images: LabelledImages) -> str:
    """A digest of which images there are, and of their labels; in whatever order."""
    listed = sorted(zip(images.digests, images.labels.tolist(), strict=True))
    return hashlib.sha256(msgspec.json.encode(listed)).hexdigest()


def digest_groups(images: LabelledImages) -> str:
    """A digest of which images belong together; in whatever order."""
    groups = []
    for each in images.sets:
        groups.append(sorted(images.digests[place] for place in each))
    return hashlib.sha256(msgspec.json.encode(sorted(groups))).hexdigest()


def suited_hold_out(spec: Spec, method: Method) -> HoldOut:
    """What a node of this federation holds out, where its plant brings no held-out images.

    Heads of a frozen encoder are judged by leaving out each image in its turn, those of the first
    sums as well.
    """
    if not method.train:
        return "nothing"
    return "what can be spared" if spec.first_totals else "every class"


class PlantImages(NamedTuple):
    """Folders of labelled images that have been looked at, and how they are to be taken."""

    folder: Path
    test: Path | None  # held-out images
    group: str | None  # which belong together beside look-alikes, as `read_keys` takes it
    aliases: Mapping[str, str]  # from the name of a folder to a class of the federation
    scans: tuple[FolderScan, ...]
    keys: Mapping[Path, str]

    @classmethod
    def find(
        cls, folder: Path, test: Path | None, group: str | None, aliases: Mapping[str, str]
    ) -> "PlantImages":
        """Look at the folders.

        Raises UsageError for what is wrong with them, before anybody waits for a federation.
        """
        scans = tuple(scan_folder(each) for each in (folder, test) if each)
        for found in scans:
            raise_errors(image_rules.check_layout(found))
        check_own_aliases(aliases, set(chain.from_iterable(found.names for found in scans)))
        keys = (
            read_keys(group, list(chain.from_iterable(found.entries for found in scans)))
            if group
            else {}
        )
        return cls(folder, test, group, aliases, scans, keys)

    def load(
        self,
        spec: Spec,
        state: Path,
        notify: Callable[[str], None],
        *,
        like: Path | None = None,
        confirm: Callable[[str], bool] | None = None,
        hold_out: HoldOut,
        least: int = image_rules.MIN_TO_TRAIN,
    ) -> Images:
        """Read and check them, as a federation's classes.

        Args:
            spec: of the federation.
            state: folder of the node, where classes that a person has confirmed are kept.
            notify: is told what is worth a warning.
            like: a bundle of an earlier model, by which images may look like a class.
            confirm: asks a person a question; None where there is nobody to ask.
            hold_out: what is held out where there is no `test` folder.
            least: images that there must be.

        Raises:
            UsageError: what is wrong with the images, and what to do.
        """
        known = assign_classes(self.scans, spec, self.aliases, state, like, confirm, notify)
        train, *tests = [
            class_folders.make_catalogue(each.with_aliases(known)) for each in self.scans
        ]
        test = tests[0] if tests else None
        images, findings = load_checked(
            train,
            test,
            spec.classes,
            spec.preprocessing.size,
            spec.seed,
            self.keys,
            hold_out=hold_out,
            least=least,
        )
        for line in format_brief(
            findings, self.folder, image_options(self.test, self.group, self.aliases)
        ):
            notify(line)
        if not self.keys and len(images.whole.train.sets) == len(images.whole.train.labels):
            notify(UNGROUPED)
        return images
