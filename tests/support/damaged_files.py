"""Faults of every file that a state folder holds: each is tried,
and must end with recovery or a remedy that works.

`python -m tests.support.damaged_files` tries them all and prints the table of docs/security.md.
"""

import fnmatch
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest

from broker_config.protocol.errors import BugError, EdgeNodeError, explain

_RESULTS = "DAMAGED_FILES_RESULTS"  # in the environment: a file for what becomes of each case
Outcome = Literal["recovered", "recovered, loss told", "refused, remedy works"]
OUTCOMES: tuple[Outcome, ...] = ("recovered", "recovered, loss told", "refused, remedy works")
RECOVERED, LOSS_TOLD, REFUSED = OUTCOMES


class Case(NamedTuple):
    """A fault of one file."""

    file: str  # in the folder of all that take part
    fault: str

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}"

    @property
    def owner(self) -> str:
        """The folder of the process whose file it is."""
        return self.file.partition("/")[0]


class Snapshot(NamedTuple):
    """The folders that killed processes have left, and an older copy of the same folders."""

    newer: Path
    older: Path
    # files of several parts are damaged at once
    part: Callable[[str], str] = lambda file: file.partition("/")[0]

    def files(self) -> list[str]:
        """All of them, by walking."""
        return sorted(
            str(path.relative_to(self.newer)) for path in self.newer.rglob("*") if path.is_file()
        )

    def cases(self) -> list[Case]:
        """Every fault of every file, but for those that would change nothing."""
        return [
            Case(file, fault)
            for file in self.files()
            for fault in FAULTS
            if self._makes_sense(file, fault)
        ]

    def _makes_sense(self, file: str, fault: str) -> bool:
        now, before = self.newer / file, self.older / file
        if fault == "older":
            return before.is_file() and before.read_bytes() != now.read_bytes()
        return fault == "missing" or now.stat().st_size > 1

    def copy(self, cases: Iterable[Case], folder: Path) -> Path:
        """Copy the newer folders to `folder`, with these faults."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.newer, folder)
        for case in cases:
            FAULTS[case.fault](folder / case.file, self.older / case.file)
        return folder


def _truncate(share: float) -> Callable[[Path, Path], object]:
    return lambda path, _: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def _flip(share: float) -> Callable[[Path, Path], object]:
    def flip(path: Path, _: Path) -> None:
        data = bytearray(path.read_bytes())
        at = min(int(len(data) * share), len(data) - 1)
        data[at] ^= 1 << at % 7
        path.write_bytes(data)

    return flip


FAULTS: Mapping[str, Callable[[Path, Path], object]] = {
    "cut to half": _truncate(0.5),
    "cut to nothing": _truncate(0),
    "bit flipped at the start": _flip(0),
    "bit flipped before the middle": _flip(0.4),
    "bit flipped in the middle": _flip(0.5),
    "bit flipped at the end": _flip(1),
    "missing": lambda path, _: path.unlink(),
    "older": lambda path, older: shutil.copyfile(older, path),
}
Start = Callable[[Path, str], Outcome]
"""Starts all whose folders are in a folder, and checks that they go on rightly.

EdgeNodeError: one has refused to.

The second argument is a remedy whose commands, abort and --new, are carried out before.
"""


def unknown(files: Sequence[str], known: Sequence[str]) -> list[str]:
    """Files of a kind that nobody has thought of:
    they need a look at what becomes of a damaged one.
    """
    return [file for file in files if not any(fnmatch.fnmatchcase(file, each) for each in known)]


def try_all(
    kind: str,
    snapshot: Snapshot,
    cases: Sequence[Case],
    start: Start,
    folder: Path,
    most: int | None = None,
) -> dict[Case, Outcome]:
    """What became of each.

    Several files of different owners are damaged at once; after a refusal, one by one.

    Where a start takes seconds, `most` is how many times several are damaged in a test: always the
    same ones. `main` tries all.
    """
    outcomes: dict[Case, Outcome] = {}
    batches = [*_batches(cases, snapshot.part)]
    if most is not None and _RESULTS not in os.environ:
        batches = random.Random(f"{kind} {cases[0].fault}").sample(batches, min(most, len(batches)))
    for batch in batches:
        try:
            ended = start(snapshot.copy(batch, folder), "")
        except EdgeNodeError:
            ended = REFUSED
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(map(str, batch))}: {error}") from error
        if ended == RECOVERED:
            outcomes |= dict.fromkeys(batch, RECOVERED)
        else:
            outcomes |= {case: _try(snapshot, case, start, folder) for case in batch}
    if file := os.environ.get(_RESULTS):
        with Path(file).open("ab") as results:
            results.writelines(
                msgspec.json.encode((kind, *case, ended)) + b"\n"
                for case, ended in outcomes.items()
            )
    return outcomes


def _batches(cases: Sequence[Case], part: Callable[[str], str]) -> Iterator[list[Case]]:
    queues: dict[str, list[Case]] = {}
    for case in cases:
        queues.setdefault(part(case.file), []).append(case)
    while any(queues.values()):
        yield [queue.pop() for queue in queues.values() if queue]


def _try(snapshot: Snapshot, case: Case, start: Start, folder: Path) -> Outcome:
    try:
        return start(snapshot.copy([case], folder), "")
    except EdgeNodeError as error:
        check_refusal(error, case, folder)
        for apply, commands in _remedies(error.remedy, snapshot, case):
            snapshot.copy([case], folder)
            apply(folder)
            try:
                start(folder, commands)
            except EdgeNodeError as again:
                pytest.fail(f"{case}: {error}\nAfter that: {again}")
        return REFUSED


def check_refusal(error: EdgeNodeError, case: Case, folder: Path) -> None:
    """A message names the file or its folder, the fault and a remedy."""
    assert not isinstance(explain(error), BugError), f"{case}: {error}"
    assert str(folder / case.owner) in str(error) or Path(case.file).name in str(error), (
        f"{case}: {error}"
    )
    assert error.remedy, f"{case}: {error}"


def _remedies(
    text: str, snapshot: Snapshot, case: Case
) -> list[tuple[Callable[[Path], object], str]]:
    """What a remedy offers to do: with the files, and what commands come then."""
    found: list[tuple[Callable[[Path], object], str]] = []
    if re.search("restore|copy .* again|bring (.* )?back|put .* back", text):
        found.append((lambda folder: snapshot.copy([], folder), ""))
    if removed := re.search(r"remove (/\S+?)(?: and (/\S+?))?[,;:]?(?:\s|$)", text):
        paths = [Path(each) for each in removed.groups() if each]
        found.append((lambda _: _remove_all(paths), text))
    elif "--new" in text:
        found.append((lambda _: None, text))
    assert found, f"{case}: nobody can carry out {text!r}"
    return found


def _remove_all(paths: Iterable[Path]) -> None:
    """Remove files and folders, of which the first is there."""
    first, *others = paths
    if first.is_dir():
        shutil.rmtree(first)
    else:
        first.unlink(missing_ok=bool(others))
    for each in others:
        each.unlink(missing_ok=True)


def table(results: Iterable[tuple[str, str, str, Outcome]]) -> str:
    """Files, cases and their ends, by kind of state folder: a table in Markdown."""
    kinds: dict[str, list[tuple[str, str, Outcome]]] = {}
    for kind, *case in results:
        kinds.setdefault(kind, []).append(tuple(case))  # type: ignore[arg-type]
    faults = ("cut", "bit flipped", "missing", "older")
    lines = [f"| state of | files | {' | '.join((*faults, *OUTCOMES))} |", f"|---|{'---:|' * 8}"]
    for kind, cases in kinds.items():
        files, ends = {file for file, _, _ in cases}, Counter(ended for _, _, ended in cases)
        tried = [sum(fault.startswith(each) for _, fault, _ in cases) for each in faults]
        lines.append(
            f"| {kind} | "
            f"{' | '.join(map(str, (len(files), *tried, *(ends[each] for each in OUTCOMES))))} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Try all; the exit code of the tests."""
    with tempfile.NamedTemporaryFile() as results:
        os.environ[_RESULTS] = results.name
        modules = sorted(map(str, Path(__file__).parents[1].rglob("test_damaged_files.py")))
        # all cases take longer than the sample for which a test has its time
        code = pytest.main(["-q", "--timeout=0", "-m", "slow or not slow", *modules])
        rows = (msgspec.json.decode(line, type=tuple[str, str, str, Outcome]) for line in results)
        print(table(dict.fromkeys(rows)))  # some cases are tried by two tests
    return code


if __name__ == "__main__":
    sys.exit(main())
