"""`python -m tests.support.chaos`: a federation under fire,
compared byte for byte with the same one in peace.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from broker_config.protocol.messages import Codec, Head
from tests.support.chaos import schedule, verification
from tests.support.chaos.run import ChaosRun, Federation, Outcome, prepare
from tests.support.unreliable_network import STORM


def main() -> int:
    """Run it; 0 if the promise was kept."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing running
    federation = Federation(
        given.rounds,
        given.nodes,
        given.seed,
        given.method,
        given.head,
        given.codec,
        given.kits or given.secure_aggregation,
        given.secure_aggregation,
    )
    folder = given.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    plants = prepare(federation, folder / "images")
    expected = verification.simulated(federation, plants)
    quiet = ChaosRun(federation, plants, folder / "quiet", chunk=given.chunk_size).run()
    print(
        f"in peace: {federation.rounds} rounds of {federation.nodes} processes in "
        f"{quiet.seconds:.0f} s",
        flush=True,
    )
    failed = verification.complaints(folder / "quiet", federation, expected)
    strikes = schedule.draw(
        given.seed, given.kills, given.rounds, federation.names, is_masked=given.secure_aggregation
    )
    copies = schedule.draw_copies(given.seed, given.copies, given.rounds, federation.names)
    strikes = sorted([*strikes, *copies], key=lambda strike: strike.round)
    started = time.monotonic()
    outcome = ChaosRun(
        federation,
        plants,
        folder / "fire",
        strikes=strikes,
        weather=STORM if given.storm else None,
        persistence=given.persistence,
        chunk=given.chunk_size,
        say=lambda text: print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True),
    ).run()
    failed += verification.complaints(folder / "fire", federation, expected, outcome.again)
    # A twin takes its time, in which nobody is killed: the federation may end before all are.
    failed += [] if given.copies else verification.missed(strikes, outcome.kills)
    failed += verification.unnoticed(outcome)
    _tell(folder / "fire", federation, outcome)
    for line in failed:
        print(f"FAILED: {line}")
    if failed:
        print(f"seed {given.seed}; everything is kept in {folder}")
    else:
        print(
            "global encoder and all personal models are the same, byte for byte; no round lost, "
            "none trained twice"
        )
        shutil.rmtree(folder)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument(
        "--copies",
        type=int,
        default=0,
        help="of state folders: this many twins, and as many restores",
    )
    parser.add_argument("--method", default="afedcl")
    parser.add_argument("--head", choices=get_args(Head), default="trained")
    parser.add_argument("--codec", choices=get_args(Codec), default="none")
    parser.add_argument(
        "--chunk-size", type=int, default=16, help="KiB; a contribution has about 240"
    )
    parser.add_argument(
        "--kits", action="store_true", help="messages are signed and encrypted, over TLS"
    )
    parser.add_argument(
        "--secure-aggregation", action="store_true", help="contributions are masked; with --kits"
    )
    parser.add_argument(
        "--storm", action="store_true", help="a proxy drops, doubles, delays and cuts all the while"
    )
    parser.add_argument(
        "--no-persistence", dest="persistence", action="store_false", help="the broker forgets all"
    )
    parser.add_argument("--folder", type=Path, help="must not hold anything yet")
    given = parser.parse_args()
    if given.secure_aggregation and given.copies:
        parser.error(
            "nodes do not go back with a restored coordinator where contributions are masked"
        )
    if (given.kits or given.secure_aggregation) and given.storm:
        parser.error("the proxy of --storm sees no packets in the TLS of --kits")
    return given


def _tell(folder: Path, federation: Federation, outcome: Outcome) -> None:
    midway = sum(kill.midway for kill in outcome.kills)
    print(
        f"\n{len(outcome.kills)} kills in {federation.rounds} rounds, {outcome.seconds:.0f} s;",
        end=" ",
    )
    print(f"{midway} of them while a blob was under way")
    print(*(f"{what}: {count}" for what, count in outcome.weather.items()), sep=", ")
    print("\n".join(verification.histogram(folder, outcome)))
    for name, code, said in outcome.twins:
        print(f"{name} gave way with exit code {code}: {said}")
    for name, code, said in outcome.exits:
        print(f"{name} gave up with exit code {code} and was started again: {said}")


if __name__ == "__main__":
    sys.exit(main())
