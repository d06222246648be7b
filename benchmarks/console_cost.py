"""Cost of the console in rounds without training: while it is stopped,
while nobody watches, while ten people do.

    python -m benchmarks.console_cost

One federation, whose rounds take turns: some with the console's process stopped, some with nobody
there, some with watchers. A watcher does what the page does: it follows the events and, at each,
asks for what is new of the run. All watchers are one process of the lowest priority, since people
elsewhere take no time from the coordinator's machine.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.federation_rounds import federate
from broker_config.broker.embedded import start_broker

WITHOUT, NOBODY, WATCHED = "console stopped", "nobody watches", "watched"
TURNS = (WITHOUT, NOBODY, WATCHED)
LONG = 5  # rounds of a turn; the first one, in which watchers come and go, does not count


async def watch(url: str) -> None:
    """Watch a run until cancelled."""
    version = 0
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("GET", "events") as events,
    ):
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                [run] = httpx.Response(200, content=line.removeprefix("data: ")).json()["runs"]
                found = await client.get(f"runs/{run['id']}", params={"since": version})
                version = found.json()["version"]


async def watch_on_command(url: str) -> None:
    """Watch as many times at once as each line of standard input says."""
    watching: list[asyncio.Task[None]] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        watching = [asyncio.create_task(watch(url)) for _ in range(int(line))]


class Turn(NamedTuple):
    """What the rounds of a turn took."""

    seconds: list[float]  # each round
    console: float  # processor seconds of the console


def processor_seconds(process: int) -> float:
    """What a process has taken so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, nodes: int, cycles: int, watchers: int) -> dict[str, list[Turn]]:
    """The turns of each kind, one in each cycle after the first."""
    turns: dict[str, list[Turn]] = {turn: [] for turn in TURNS}
    rounds = (cycles + 1) * len(TURNS) * LONG
    with contextlib.ExitStack() as ending:
        broker = ending.enter_context(start_broker(folder / "broker", kind="mosquitto"))
        seconds: list[float] = []
        before = 0.0
        for event in federate(broker, folder, nodes, rounds, "--http", "0"):
            if event["event"] == "Note" and event["text"].startswith("console: "):
                watch = [
                    sys.executable,
                    "-m",
                    "benchmarks.console_cost",
                    "--watch",
                    event["text"].split()[1],
                ]
                viewer = subprocess.Popen(watch, stdin=subprocess.PIPE, text=True)
                ending.callback(viewer.wait)
                ending.callback(viewer.kill)
                found = subprocess.check_output(
                    ["pgrep", "-f", f"trainer.console.console {folder / 'coordinator'} "]
                )
                console = int(found)
            number, place = divmod(event.get("round", 1) - 1, LONG)
            turn = TURNS[number % len(TURNS)]
            if event["event"] == "RoundOpened" and place == 0:
                assert viewer.stdin
                print(watchers if turn == WATCHED else 0, file=viewer.stdin, flush=True)
                os.kill(console, signal.SIGSTOP if turn == WITHOUT else signal.SIGCONT)
            if event["event"] == "RoundClosed" and place == 0:
                seconds, before = [], processor_seconds(console)
            elif event["event"] == "RoundClosed":
                seconds.append(event["seconds"])
                # while the first ones run, the console starts
                if place == LONG - 1 and number >= len(TURNS):
                    turns[turn].append(Turn(seconds, processor_seconds(console) - before))
                if event["round"] == rounds:
                    os.kill(console, signal.SIGCONT)  # or it would not end
    return turns


def main() -> None:
    """Print the times, and their ratios to those without the console, cycle by cycle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--watchers", type=int, default=10)
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        os.nice(19)
        asyncio.run(watch_on_command(arguments.watch))
        return
    with tempfile.TemporaryDirectory() as name:
        turns = measure(Path(name), arguments.nodes, arguments.cycles, arguments.watchers)
    for turn, found in turns.items():
        medians = [statistics.median(each.seconds) for each in found]
        without = [statistics.median(each.seconds) for each in turns[WITHOUT]]
        ratios = sorted(one / other for one, other in zip(medians, without, strict=True))
        console = sum(each.console for each in found) / sum(len(each.seconds) for each in found)
        print(
            f"{turn:16} {1000 * statistics.median(medians):6.0f} ms a round, ratio "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), of a "
            f"processor {1000 * console:.0f} ms for the console"
        )


if __name__ == "__main__":
    main()
