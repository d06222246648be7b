"""The class of each of a plant's folders: by its own name, by an alias, or as a person confirms.

Without torch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from broker_config.protocol.messages import Spec
from trainer.data.class_names import (
    Proposal,
    add_votes,
    check_class_folders,
    check_own_aliases,
    format_proposal,
    propose,
)
from trainer.data.folder_scan import FolderScan
from trainer.federation.client import checkpoint


def assign_classes(
    folders: Sequence[FolderScan],
    spec: Spec,
    own: Mapping[str, str],
    state: Path,
    like: Path | None,
    confirm: Callable[[str], bool] | None,
    notify: Callable[[str], None],
) -> dict[str, str]:
    """The aliases by which all folders have classes of the federation.

    The plant's own come before those that a person has confirmed, and these before the
    federation's.

    Args:
        folders: the plant's, for training and perhaps held out.
        spec: the federation.
        own: the plant's aliases.
        state: the node's state folder, where confirmed ones are kept.
        like: a bundle of an earlier model, or None.
        confirm: asks a person a question; None where there is nobody to ask.
        notify: told which folder counts as which class.

    Raises:
        UsageError: a folder's class stays unknown, an alias stands for no class, or the bundle is
            of no use.
    """
    names = sorted(set(chain.from_iterable(found.names for found in folders)))
    check_own_aliases(own, names, spec.classes)
    confirmed = {
        name: of for name, of in checkpoint.load_aliases(state).items() if of in spec.classes
    }
    aliases = {**spec.aliases, **confirmed, **own}
    for name in names:
        if name in aliases:
            said = "--alias" if name in own else f"confirmed: {state / checkpoint.ALIASES}"
            source = said if name in own or name in confirmed else "an alias of the federation"
            notify(f"{name} is taught as {aliases[name]} ({source})")
    unknown = [name for name in names if name not in spec.classes and name not in aliases]
    proposals = (
        _propose(unknown, [each.with_aliases(aliases) for each in folders], spec, like)
        if unknown
        else {}
    )
    to_confirm = proposals.items() if confirm else ()
    for name, proposal in to_confirm:
        notify(f"{name!r} is none of the federation's classes; perhaps {format_proposal(proposal)}")
        if confirm and confirm(f"Shall the images in {name} be taught as {proposal.class_name}?"):
            checkpoint.confirm_alias(state, name, proposal.class_name)
            aliases[name] = proposal.class_name
    check_class_folders(
        [name for name in unknown if name not in aliases], spec.classes, spec.aliases, proposals
    )
    return aliases


def _propose(
    unknown: Sequence[str], folders: Sequence[FolderScan], spec: Spec, like: Path | None
) -> dict[str, Proposal]:
    """What each unknown name probably stands for, by the name and, with a bundle,
    by how its images look.
    """
    candidates = {name: propose(name, spec.classes, spec.aliases) for name in unknown}
    if like is None:
        return {name: found[0] for name, found in candidates.items() if found}
    from trainer.data.class_likeness import count_votes  # noqa: PLC0415  (imports onnxruntime)

    entries = list(chain.from_iterable(found.entries for found in folders))
    votes = count_votes(like, entries, spec.classes)
    return {
        name: proposal
        for name, found in candidates.items()
        if (proposal := add_votes(found, votes.get(name, Counter()), spec.classes, str(like)))
        is not None
    }
