"""Identity and progress of a node, its run's spec and confirmed class names,
durable in its state folder. No torch.

Each file holds a checksum of itself. The states after the last rounds are kept: a node goes back to
one of them where a file of the newest is damaged, and where its coordinator has gone back.
"""

import contextlib
import secrets
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from safetensors.numpy import load, save_file

from broker_config.protocol.errors import EdgeNodeError, UsageError, abbreviate
from broker_config.protocol.messages import CommonSpec, Digest, Manifest, Spec
from broker_config.security.one_time import digest_spec
from broker_config.storage import checksums, disk
from trainer.federation.masking.member_state import Record as MaskRecord
from trainer.models.named_tensors import Arrays

T = TypeVar("T")
KEPT = 4  # rounds whose end is kept: enough to go back by two from anywhere in a round
# without one, a node is a stranger to its coordinator
_IDENTITIES = ("identity.json", "identity-copy.json")
# digest of the spec of every run that the folder was in; two, since nothing else knows them
_RUNS = ("runs.json", "runs-copy.json")
_PROGRESS = "progress.json"
_ALONE = "alone.json"
_FIRST = "first-sums.safetensors"
_FIRST_RECORD = "first-sums.json"
_SPEC = "spec.json"
ALIASES = "aliases.json"
# an older copy of one file must not have its masks hide another contribution
_MASKS = ("masks.json", "masks-copy.json")
_RECORDS = "progress-*.json"
_STATES = "state-*.safetensors*"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a state folder for its lifetime,
    and `session` of the `incarnation`-th process that uses it.
    """

    identity: str
    incarnation: int
    session: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a node. A restarted node resumes from here."""

    run: str
    round: int
    stage: Literal["contributed", "refined"]
    state: str  # file name of the State
    digest: Digest  # of that file
    broadcast: Manifest  # that the round started from
    weight: float
    blob: Manifest | None  # the contribution
    history: tuple[dict[str, float], ...]  # metrics of each round so far, the open one included
    # whether the run's result holds the node's part of the last round, once that is known
    counted: bool | None = None
    images: str = ""  # digest of the images and labels that the node had


class AloneProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the training without others, for comparison."""

    run: str
    round: Annotated[int, msgspec.Meta(ge=0)]
    initial: Digest  # of the file of the encoder that it began with
    state: Digest | None  # of the file of the State after that round; None before the first


def load_identity(folder: Path) -> Identity | None:
    """The identity of the process that used the folder last; None if it is new.

    EdgeNodeError if it is damaged.
    """
    found = _read_copies(folder, _IDENTITIES, Identity)
    return max(found, key=lambda each: each.incarnation, default=None)


def begin_session(folder: Path) -> Identity:
    """Write down that a new process uses the folder, and return its identity."""
    try:
        last = load_identity(folder)
    except EdgeNodeError:
        # the coordinator knows the node by a new one as soon as the former process has gone
        last = None
    identity = last.identity if last else secrets.token_hex(8)
    incarnation = last.incarnation + 1 if last else 1
    new = Identity(identity=identity, incarnation=incarnation, session=secrets.token_hex(8))
    _write_copies(folder, _IDENTITIES, new)
    _remove(folder, ".tmp*", set())  # what safetensors was writing when a process was killed
    return new


def keep_spec(folder: Path, spec: CommonSpec) -> None:
    """Write down the spec by which a node takes part in a run:
    it holds for the whole run, also after other runs.

    Raises: as `check_known`.
    """
    check_known(folder, spec)
    _write_copies(folder, _RUNS, {**_known_runs(folder), spec.run: digest_spec(spec)})
    _write(folder / _SPEC, spec)


def check_known(folder: Path, spec: CommonSpec) -> bool:
    """Return whether the folder was in this run before, which must have been by this spec.

    Raises:
        UsageError: an earlier process of it took part in this run by another one.
        EdgeNodeError: what it knows of its runs is damaged.
    """
    try:
        first = checksums.read_record(folder / _SPEC, type(spec))
    except checksums.DamagedError:
        first = None  # a fault of the disk; what the node has learnt does not depend on this file
    is_known = first is not None and first.run == spec.run
    if differ := [
        name
        for name in spec.__struct_fields__
        if is_known and getattr(first, name) != getattr(spec, name)
    ]:
        changes = (
            f"{name} was {getattr(first, name)}, is {getattr(spec, name)}" for name in differ
        )
        raise UsageError(
            f"the spec of this run is not the one by which this node has taken part in it: "
            f"{'; '.join(abbreviate(each, 120) for each in changes)}",
            "ask the operator of the federation's server to start it again with its --state: it "
            "publishes the spec that the run began with. If that is this one, join with another "
            "--state folder",
        )
    digest = _known_runs(folder).get(spec.run)
    if digest not in (None, digest_spec(spec)):
        raise UsageError(
            f"run {spec.run} is announced with another spec than the one by which this node has "
            "taken part in it: what it has sent would be sent again in another form",
            "ask the operator of the federation's server why; do not join it from another --state "
            "folder before that is known",
        )
    return is_known or digest is not None


def _known_runs(folder: Path) -> dict[str, str]:
    """Return the digest of the spec of every run that the folder was in."""
    known: dict[str, str] = {}
    for copy in _read_copies(folder, _RUNS, dict[str, str]):
        known |= copy
    return known


def load_spec(folder: Path) -> Spec | None:
    """The spec of the federation in which a node took part last; None if there is none.

    EdgeNodeError if damaged.
    """
    return _read(folder / _SPEC, Spec)


class Found(NamedTuple):
    """What a state folder knows of a run."""

    # the newest whose state is intact; None if the node has not contributed to the run
    progress: Progress | None
    lost: Manifest | None  # broadcast of the round after that, which is to be trained again
    damaged: tuple[Path, ...]


def has_progress(folder: Path, run: str) -> bool:
    """Whether the node has contributed to this run."""
    return find_progress(folder, run).progress is not None


def find_progress(folder: Path, run: str) -> Found:
    """Progress of the node in this run, as far as its files are what was written.

    Raises:
        EdgeNodeError: none of them is.
    """
    newest = None
    damaged = list[Path]()
    try:
        newest = _read(folder / _PROGRESS, Progress)
    except EdgeNodeError:
        damaged.append(folder / _PROGRESS)
    ends = kept(folder, run)
    if newest is None and ends and not damaged:
        damaged.append(folder / _PROGRESS)  # it was there
    newest_end = [newest] if newest and newest.run == run else []
    records = [*ends, *newest_end]
    for number, record in reversed([*enumerate(records)]):
        path = folder / record.state
        if path.is_file() and checksums.digest_of(path) == record.digest:
            later = [each for each in records[number:] if each.round > record.round]
            broadcast = later[0].broadcast if later else None
            return Found(record, broadcast, tuple(damaged))
        damaged.append(path)
    if records and len(records[-1].history) == 1:
        return Found(None, records[-1].broadcast, tuple(damaged))  # it was the first one
    if damaged:
        raise _damaged(damaged[0], "it is missing, or was changed")
    return Found(None, None, ())


def kept(folder: Path, run: str) -> list[Progress]:
    """The ends of rounds of this run that the node can go back to, in order,
    as far as they are written down.
    """
    ends = list[Progress]()
    for path in folder.glob(_RECORDS):
        with contextlib.suppress(EdgeNodeError):
            record = _read(path, Progress)
            ends += [record] if record and record.run == run else []
    return sorted(ends, key=lambda each: each.round)


def save_progress(folder: Path, reached: Progress) -> None:
    """Write down how far the node is, and keep what it can go back to."""
    _write(folder / _PROGRESS, reached)
    if reached.stage == "refined":
        _write(folder / _record(reached), reached)
    ends = [each for each in kept(folder, reached.run) if each.round <= reached.round][-KEPT:]
    _remove(folder, _RECORDS, {_record(each) for each in ends})
    _remove(folder, _STATES, {each.state for each in (reached, *ends)})


def go_back(folder: Path, reached: Progress, round_: int) -> tuple[Progress | None, bool]:
    """Go back to before a round: how far that is,
    and whether that state was kept and no nearby one is taken.
    """
    history = tuple(each for each in reached.history if each["round"] < round_)
    if not history:
        forget_progress(folder)
        return None, True
    ends = kept(folder, reached.run)
    earlier = [each for each in ends if each.round < round_]
    if earlier:
        end = earlier[-1]
    elif ends:
        end = ends[0]
    else:
        end = reached
    exact = end.round == history[-1]["round"]
    blob = end.blob if exact else None
    gone_back = msgspec.structs.replace(
        end, round=round_ - 1, stage="refined", blob=blob, history=history, counted=None
    )
    save_progress(folder, gone_back)
    return gone_back, exact


def forget_progress(folder: Path) -> None:
    """Be as before the first round."""
    for files in (_RECORDS, _PROGRESS, _STATES):
        _remove(folder, files, set())


def _record(progress: Progress) -> str:
    return f"progress-{progress.round}.json"


def _remove(folder: Path, files: str, keep: Collection[str]) -> None:
    for path in folder.glob(files):
        if path.name not in keep:
            path.unlink()


class FirstRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the model of the first sums is made of is on disk."""

    run: str
    digest: Digest


def save_first(folder: Path, run: str, first: Arrays) -> None:
    """Write down what the model of a run's first sums is made of, as `take_first` gives it."""
    with disk.writing(folder):
        disk.replace(folder / _FIRST, partial(save_file, first))
    digest = checksums.digest_of(folder / _FIRST)
    _write(folder / _FIRST_RECORD, FirstRecord(run=run, digest=digest))


def load_first(folder: Path, run: str) -> Arrays | None:
    """What `save_first` has written in this run; None if nothing, or if it is damaged."""
    try:
        record = _read(folder / _FIRST_RECORD, FirstRecord)
    except EdgeNodeError:
        return None
    if record is None or record.run != run:
        return None
    content = checksums.read_unchanged(folder / _FIRST, record.digest)
    return None if content is None else dict(load(content))


def load_alone(folder: Path, run: str) -> AloneProgress | None:
    """Progress of the training without others in this run; None if it has not begun,
    or its file is damaged.
    """
    try:
        found = _read(folder / _ALONE, AloneProgress)
    except EdgeNodeError:
        return None
    return found if found and found.run == run else None


def save_alone(folder: Path, reached: AloneProgress) -> None:
    """Write down how far the training without others is."""
    _write(folder / _ALONE, reached)


def load_masks(folder: Path) -> MaskRecord | None:
    """What the node must not forget of its masks; None if it has had none.

    Of two copies the one that was written last counts, so that an older copy in the place of one
    is without effect.

    Raises:
        EdgeNodeError: both are damaged. An older copy of both could have the same masks hide
            another contribution, so that is no remedy.
    """
    paths = [folder / name for name in _MASKS]
    try:
        found = checksums.read_copies(paths, MaskRecord)
    except checksums.DamagedError as error:
        raise EdgeNodeError(
            f"{paths[0]} and its copy, with what this node must not forget of its masks, are "
            f"damaged ({error})",
            f"ask the coordinator's operator to end this run (edge-node abort), then remove "
            f"{paths[0]} and {paths[1]}, and join the next one",
        ) from error
    return max(found, key=lambda each: each.writes, default=None)


def save_masks(folder: Path, record: MaskRecord) -> None:
    """Write down what the node must not forget of its masks."""
    _write_copies(folder, _MASKS, record)


def has_passed(folder: Path, file: str, digest: str) -> bool:
    """Return whether `file` says that what the node demands was met, with this digest."""
    try:
        return _read(folder / file, str) == digest
    except EdgeNodeError:
        return False


def save_passed(folder: Path, file: str, digest: str) -> None:
    """Write to `file` the digest with which what the node demands was met."""
    _write(folder / file, digest)


def load_aliases(folder: Path) -> dict[str, str]:
    """The classes that a person has confirmed for folders that are called otherwise."""
    path = folder / ALIASES
    try:
        return checksums.read_record(path, dict[str, str]) or {}
    except (OSError, checksums.DamagedError) as error:
        damage = error
    try:
        # earlier versions wrote no checksum; what has one is no table of strings, however damaged
        return msgspec.json.decode(disk.read_regular(path), type=dict[str, str])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        raise EdgeNodeError(
            f"{path} cannot be read ({damage})", f"remove {path}: you are asked again"
        ) from None


def confirm_alias(folder: Path, name: str, class_name: str) -> None:
    """Write down that a person has confirmed a folder's class."""
    _write(folder / ALIASES, load_aliases(folder) | {name: class_name})


def _write_copies(folder: Path, names: Sequence[str], value: object) -> None:
    with disk.writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # before a session locks it
        checksums.write_copies([folder / name for name in names], value)


def _read_copies(folder: Path, names: Sequence[str], expect: type[T]) -> list[T]:
    try:
        return checksums.read_copies([folder / name for name in names], expect)
    except checksums.DamagedError as error:
        raise _damaged(folder / names[0], str(error)) from error


def _write(path: Path, value: object) -> None:
    """Replace the file durably, with a checksum:
    after a kill it is the old one or the new one, whole.
    """
    with disk.writing(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # before a session locks it
        checksums.write_record(path, value)


def _read(path: Path, expect: type[T]) -> T | None:
    try:
        return checksums.read_record(path, expect)
    except checksums.DamagedError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, how: str) -> EdgeNodeError:
    return EdgeNodeError(
        f"{path} is damaged ({how})",
        f"restore {path.parent} from a copy, which may be an older one, or remove that folder "
        "and join again: what this node alone has learnt then begins anew",
    )
