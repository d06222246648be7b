"""Verification of a chaos run: the same bytes, no round lost,
nothing done twice with two results.
"""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from safetensors.numpy import load_file

from tests.support.chaos import tracing
from tests.support.chaos.run import Federation, Kill, Outcome
from tests.support.chaos.schedule import COORDINATOR, Strike
from tests.support.mosquitto import BROKER
from tests.support.plants import CLASSES, load_images
from trainer.federation.server.journal import history
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays
from trainer.progress import timeline
from trainer.training.personal_model import load_metadata

Tensors = dict[str, bytes]  # by `global/NAME` and `NODE/NAME`


def simulated(federation: Federation, plants: dict[str, Path]) -> Tensors:
    """The federation in this process, without broker, processes or kills."""
    request = Request(
        federation.method,
        federation.options,
        model=federation.model,
        weights="none",
        size=federation.size,
        training={"local_epochs": 1},
        rounds=federation.rounds_of_training,
        head=federation.head,
        codec=federation.codec,
        seed=federation.seed,
        secure_aggregation=federation.is_masked,
    )
    spec, broadcast = draft(request, federation="default", classes=CLASSES, nodes=federation.nodes)
    images = {name: load_images(spec, each) for name, each in plants.items()}
    outcome = simulate(spec, broadcast, images, compare=True)
    found = {f"global/{name}": value.tobytes() for name, value in outcome.broadcast.items()}
    for node, model in outcome.models.items():
        found |= {
            f"{node}/{name}": value.tobytes() for name, value in to_arrays(model.tensors).items()
        }
    return found


def left(folder: Path, federation: Federation) -> Tensors:
    """What the processes of a campaign left on disk."""
    files = {"global": folder / COORDINATOR / "global.safetensors"}
    files |= {node: folder / node / "model" / "personal.safetensors" for node in federation.names}
    return {
        f"{who}/{name}": value.tobytes()
        for who, path in files.items()
        if path.exists()
        for name, value in load_file(path).items()
    }


def complaints(
    folder: Path, federation: Federation, expected: Tensors, again: int | None = None
) -> list[str]:
    """All that is not as it must be in a campaign's folder; nothing if the promise was kept.

    From round `again` on, nodes may have trained again, to the same bytes: they went back with
    their coordinator.
    """
    found = left(folder, federation)
    different = [name for name in expected if found.get(name) != expected[name]]
    said = (
        [f"{len(different)} of {len(expected)} tensors differ, {different[0]} first"]
        if different
        else []
    )
    names = set(federation.names)
    rounds = {line.round for line in history(folder / COORDINATOR) if set(line.weights) == names}
    said += [
        f"round {number} is lost"
        for number in range(1, federation.rounds + 1)
        if number not in rounds
    ]
    journalled = _journalled(folder / COORDINATOR)
    for node in federation.names:
        is_plain = federation.codec == "none" and not federation.is_masked
        said += _repeated(
            folder, node, journalled, again or federation.rounds + 1, is_plain=is_plain
        )
    return said


def _journalled(folder: Path) -> dict[tuple[str, int], str]:
    """The digest of each contribution (node, round) that counted."""
    with closing(
        sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True)
    ) as database:
        rows = database.execute("SELECT node, round, digest FROM contributions").fetchall()
    return {(node, round_): digest or "" for node, round_, digest in rows}


def _repeated(
    folder: Path, node: str, journalled: dict[tuple[str, int], str], again: int, *, is_plain: bool
) -> list[str]:
    """Rounds that a node trained again although its contribution was durable,
    or with another result.
    """
    said, durable, digests = [], set[int](), dict[int, set[str]]()
    for moment in tracing.read(folder, node):
        if (
            moment.kind == "training"
            and moment.when == "before"
            and again > moment.round in durable
        ):
            said.append(f"{node} trained round {moment.round} again")
        elif moment.kind == "contributed":
            digests.setdefault(moment.round, set()).add(moment.digest)
            if moment.when == "after":
                durable.add(moment.round)
    for round_, found in digests.items():
        counted = journalled.get((node, round_))
        # The journal knows a coded or masked blob by what it is made of or into, of which the
        # result tells.
        if found != {counted} if is_plain else not counted or len(found) != 1:
            said.append(f"{node} contributed {found} to round {round_}, the journal says otherwise")
    spans = timeline.read_spans(folder / node, load_metadata(folder / node / "model").run)
    trained = Counter(span.round for span in spans if span.activity == "training")
    repeated = {each: count for each, count in trained.items() if count > 1 and each < again}
    return said + [f"{node} trained round {each} {count} times" for each, count in repeated.items()]


def missed(strikes: Sequence[Strike], kills: Sequence[Kill]) -> list[str]:
    """Kills that were planned and did not happen."""
    planned = Counter((strike.victim, " ".join(strike.fault)) for strike in strikes if strike.fault)
    happened = Counter((kill.victim, kill.fault) for kill in kills)
    said = [f"{victim} was not killed right {fault}" for victim, fault in planned - happened]
    return said + (
        [f"{len(kills)} kills instead of {len(strikes)}"] if len(kills) != len(strikes) else []
    )


def unnoticed(outcome: Outcome) -> list[str]:
    """Processes on copied state folders that did not give way, or did not say why."""
    return [
        f"{each.name} ended with exit code {each.code}, and said {each.said!r}"
        for each in outcome.twins
        if not each.code or "What to do" not in each.said
    ]


def histogram(folder: Path, outcome: Outcome) -> list[str]:
    """Lines of a table: who died between which transitions of the journal;
    nodes also between which of their steps.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for kill in outcome.kills:
        who = kill.victim if kill.victim in (COORDINATOR, BROKER) else "a node"
        counts[_where(folder, COORDINATOR, kill), who] += 1
        if who == "a node":
            counts["own: " + _where(folder, kill.victim, kill), "in its own steps"] += 1
    columns = (COORDINATOR, "a node", BROKER)
    lines = [
        f"{'between the transitions of the journal':<44}"
        + "".join(f"{each:>13}" for each in columns)
    ]
    for place in sorted({place for place, _ in counts if not place.startswith("own: ")}):
        lines.append(
            f"{place:<44}" + "".join(f"{counts[place, each] or '':>13}" for each in columns)
        )
    lines.append(f"{'between the steps of the node that died':<44}")
    own = [
        (place, count) for (place, _), count in sorted(counts.items()) if place.startswith("own: ")
    ]
    return lines + [f"{place.removeprefix('own: '):<44}{'':>13}{count:>13}" for place, count in own]


def _where(folder: Path, name: str, kill: Kill) -> str:
    """The step before the kill and the one after it, in the trace of `name`."""
    if kill.fault and kill.victim == name:
        return f"right {kill.fault}"
    moments = tracing.read(folder, name)
    last = next((moment for moment in reversed(moments) if moment.time <= kill.time), None)
    if last and last.when == "before":
        return f"in {last.kind}"
    following = next((moment.kind for moment in moments if moment.time > kill.time), "the end")
    return f"{last.kind if last else 'the start'} > {following}"
