"""A tree of aggregators as real processes: plants in regions, their relays, and the coordinator of it all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from safetensors.numpy import load_file

from tests.support.plants import CLASSES, FEDERATION, Process, drawn_weights, load_images, start
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays

Tensors = dict[str, bytes]  # by `global/NAME` and `NODE/NAME`
SETTINGS = Request("afedcl", model="small", size=32, rounds=2, seed=7, codec=None)


class Tree:
    """Commands of a federation with regions, and their processes; state folders and logs are `folder/NAME`.

    A context, at whose end no process is left.

    Args:
        url: of the coordinator's broker.
        regions: each region's plants, by its relay's name.
        direct: plants in no region.
        folder: of all.
        below: URL of a region's broker, by its relay's name, where it is another one.
        flags: of the coordinator.
    """

    def __init__(
        self,
        url: str,
        regions: Mapping[str, Mapping[str, Path]],
        direct: Mapping[str, Path],
        folder: Path,
        below: Mapping[str, str] = {},
        flags: Sequence[object] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        granted = [word for relay, plants in regions.items() for word in ("--region", f"{relay}={len(plants)}")]
        self.folder = folder
        self.commands: dict[str, list[object]] = {
            "coordinator": [
                "coordinate", url, "--federation", "tree", "--classes", ",".join(CLASSES), *FEDERATION, "--weights",
                drawn_weights(), "--nodes", len(regions) + len(direct), *granted, *flags,
            ],
            **{
                relay: [
                    "relay", below.get(relay, url), "--federation", "tree", "--name", relay, "--region",
                    f"{relay}-plants", "--nodes", len(plants),
                ]
                for relay, plants in regions.items()
            },
        }  # fmt: skip
        homes = [("tree", url, direct), *((f"{each}-plants", below.get(each, url), regions[each]) for each in regions)]
        for federation, broker, plants in homes:
            for name, images in plants.items():
                self.commands[name] = ["join", broker, "--federation", federation, "--name", name, "--data", images]
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()

    def start(self, *names: str) -> None:
        """Start these processes, or all; again, if they were killed."""
        for name in names or self.commands:
            log = self.folder / f"{name}.log"
            self.processes[name] = start(*self.commands[name], "--state", self.folder / name, log=log)

    def kill(self, name: str) -> None:
        """Kill -9, and wait until it is dead."""
        self.processes[name].kill()
        self.processes[name].wait()

    def end(self, seconds: float = 120) -> None:
        """Wait until all have ended well. AssertionError with the logs if one has not."""
        codes = {name: process.wait(seconds) for name, process in self.processes.items()}
        logs = "\n".join(f"== {name}\n{(self.folder / f'{name}.log').read_text()}" for name in self.processes)
        assert set(codes.values()) == {0}, f"{codes}\n{logs}"

    def left(self) -> Tensors:
        """The tensors that they have left."""
        return left_by(self.folder)


def left_by(folder: Path) -> Tensors:
    """The tensors that processes have left whose state folders are `folder/NAME`."""
    files = {"global": folder / "coordinator" / "global.safetensors"}
    files |= {path.parent.parent.name: path for path in folder.glob("*/model/personal.safetensors")}
    return {f"{who}/{name}": each.tobytes() for who, path in files.items() for name, each in load_file(path).items()}


def simulate_flat(plants: Mapping[str, Path], request: Request = SETTINGS) -> Tensors:
    """What one coordinator of all these plants comes to, by the exact mean, without a broker."""
    asked = request._replace(aggregate="mean", weights=str(drawn_weights()))
    spec, broadcast = draft(asked, federation="flat", classes=CLASSES, nodes=len(plants))
    outcome = simulate(spec, broadcast, {name: load_images(spec, each) for name, each in plants.items()}, compare=True)
    found = {f"global/{name}": value.tobytes() for name, value in outcome.broadcast.items()}
    for node, model in outcome.models.items():
        found |= {f"{node}/{name}": value.tobytes() for name, value in to_arrays(model.tensors).items()}
    return found
