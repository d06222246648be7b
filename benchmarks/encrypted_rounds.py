"""Cost of encrypting messages and chunks end to end: rounds without training,
over TLS with kits, with and without it.

    python -m benchmarks.encrypted_rounds --nodes 5 --rounds 10 --turns 3

Both are signed, and take turns, since other work on the machine comes and goes. Seconds are from
one round's end to the next; processor time is a round's.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

from safetensors.numpy import save_file

from benchmarks.federation_rounds import EmptyNode
from benchmarks.node_scale import cpu_seconds, find_spec
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.messages import Encryption, Spec
from broker_config.security.kit import Kit
from broker_config.security.secret_environment import PASSPHRASE
from tests.support.provisioned_federation import Guarded, guarded
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix


class Figures(NamedTuple):
    """What a federation's rounds took, but the first: seconds, the median,
    and those of a processor, the mean.
    """

    round: float
    coordinator: float
    node: float


def take_part(kit: Kit, spec: Spec, folder: Path) -> None:
    """Be a node to the federation's end."""
    EmptyNode(Endpoint.from_kit(kit), kit.name, spec, folder).run()


def measure(broker: Guarded, folder: Path, rounds: int, encryption: Encryption) -> Figures:
    """Run a federation that does not train."""
    folder.mkdir()
    save_file(
        strip_prefix("encoder", initial_encoder("mobilenet_v2", "none", 0)),
        folder / "initial.safetensors",
    )
    coordinator = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "edge_node",
            "coordinate",
            "--kit",
            str(broker.folder / "kits/coordinator.kit"),
            "--json",
            "--classes",
            "a,b",
            "--method",
            "afedcl",
            "--codec",
            "none",
            "--rounds",
            str(rounds),
            "--model",
            "mobilenet_v2",
            "--weights",
            str(folder / "initial.safetensors"),
            "--state",
            str(folder / "coordinator"),
            "--encryption",
            encryption,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, PASSPHRASE: broker.members.passphrase("coordinator")},
    )
    kits = [kit for kit in broker.kits.values() if kit.name.startswith("node-")]
    while (
        spec := find_spec(Endpoint.from_kit(kits[0]), coordinator, "steel")
    ).encryption != encryption:
        pass  # that of the turn before is still retained
    context = multiprocessing.get_context("spawn")
    nodes = [context.Process(target=take_part, args=(kit, spec, folder / kit.name)) for kit in kits]
    for node in nodes:
        node.start()
    assert coordinator.stdout is not None
    closed, used = list[float](), list[tuple[float, float]]()
    watched = [Path(f"/proc/{pid}") for pid in (coordinator.pid, nodes[0].pid)]
    for event in map(json.loads, coordinator.stdout):
        if event["event"] == "RoundClosed":
            closed.append(time.perf_counter())
            used.append((cpu_seconds(watched[0]), cpu_seconds(watched[1])))
    for node in nodes:
        node.join()
    taken = [later - earlier for earlier, later in pairwise(closed)]
    cpu = [(last - first) / len(taken) for first, last in zip(used[0], used[-1], strict=True)]
    return Figures(statistics.median(taken), *cpu)


def main() -> None:
    """Print what rounds took with and without encryption, and the ratios of each turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    names = [f"node-{number}" for number in range(asked.nodes)]
    found: dict[Encryption, list[Figures]] = {each: [] for each in get_args(Encryption)}
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before, {asked.nodes} nodes",
        flush=True,
    )
    folders = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    with folders[0] as keys, folders[1] as name, guarded(Path(keys), nodes=names) as broker:
        for turn in range(asked.turns):
            for encryption, figures in found.items():
                figures.append(
                    measure(broker, Path(name) / f"{encryption}-{turn}", asked.rounds, encryption)
                )
                print(encryption, *(f"{1000 * each:.0f} ms" for each in figures[-1]), flush=True)
    for field in Figures._fields:
        plain, encrypted = (
            [getattr(each, field) for each in found[kind]] for kind in ("none", "group")
        )
        ratios = [more / less for less, more in zip(plain, encrypted, strict=True)]
        without, with_it = (1000 * statistics.median(each) for each in (plain, encrypted))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        ratio = statistics.median(ratios)
        print(
            f"{field:12} {without:6.0f} ms, encrypted {with_it:6.0f} ms, ratio {ratio:.2f} "
            f"({spread})"
        )
    print(f"load {os.getloadavg()[0]:.1f} afterwards")


if __name__ == "__main__":
    main()
