"""What a release leaves on disk, to be opened by every later one: `python -m
tests.support.checked_in_state ARCHIVE`.

`suspended/` is a federation between two of its rounds, `finished/` its coordinator and one plant at
its end, `bundle/` what that plant has exported, `outbox/` a line's with three verdicts that its
sink has not had. It is written once for each release, as it is then.
"""

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from edge.outbox.limits import Limits
from edge.outbox.outbox import open_outbox
from export.bundle_export import export
from tests.support.outcomes_at_noon import verdict
from tests.support.plants import draw
from tests.support.threaded_federation import PLANTS, Federation, Session, end_all
from tests.support.tiny_encoder import NAME, register_tiny_encoder
from trainer import progress
from trainer.federation.server.spec import Participation

ROUNDS = 3
SINK = "jsonl:verdicts.jsonl"


def federation(broker: Endpoint, state: Path, images: Path) -> Federation:
    """The federation whose states these are."""
    plants = {name: images / name for name in PLANTS}
    return Federation(broker, plants, state, "steel", ROUNDS, Participation(), "fedavg", model=NAME)


def begin(trial: Federation) -> list[Session]:
    """Its coordinator and its nodes."""
    return [trial.coordinator(), *(trial.node(name) for name in PLANTS)]


def write(folder: Path) -> None:
    """Write it all."""
    register_tiny_encoder()
    for number, name in enumerate(PLANTS):
        draw(folder / "images" / name, 4, number, size=16)
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        trial = federation(Endpoint.parse(broker.url), folder / "finished", folder / "images")
        sessions = begin(trial)
        sessions[0].wait_for(progress.RoundClosed)
        for each in sessions:
            each.stop()
        shutil.copytree(folder / "finished", folder / "suspended")
        end_all(begin(trial))
    shutil.rmtree(folder / "broker")
    for name in PLANTS[1:]:
        shutil.rmtree(folder / "finished" / name)
    (written,) = export(
        [folder / "finished" / "plant-a" / "model"], folder / "bundles", progress.ignore
    )
    written.folder.rename(folder / "bundle")
    shutil.rmtree(folder / "bundles")
    with open_outbox(folder / "outbox", Limits()) as outbox:
        outbox.set_sinks([SINK])
        for number in range(3):
            outbox.put(verdict(number))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, tarfile.open(sys.argv[1], "w:xz") as archive:
        write(Path(made))
        for path in sorted(Path(made).iterdir()):
            archive.add(path, path.name)
