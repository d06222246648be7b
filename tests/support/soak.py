"""One daemon for long, under all that happens to a line at once:
`python -m tests.support.soak` prints the outcome.

Images come over HTTP, MQTT and a folder; a part of them is truncated, empty, a bomb, or of a mode
that few expect. Meanwhile the model is swapped for one that gives other answers, the broker is
restarted, settings are read again, disks are full, and malformed requests come. In the end each
image that was taken must have exactly one outcome in each sink, each answer must be that of the
model it names, and the daemon must not have grown.
"""

import argparse
import contextlib
import http.client
import io
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, getrandbits
from typing import Any, NamedTuple

import httpx
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from PIL import Image as Picture

from broker_config.protocol import topics
from edge.registry import control_requests
from edge.registry.bundle_store import line_store
from tests.support.daemon_process import Daemon
from tests.support.fuzz_http import Battle
from tests.support.mosquitto import Mosquitto
from tests.support.plants import start
from tests.support.tiny_bundle import BLUE, CLASSES, GREEN, RED, tiny_bundle
from tests.support.waiting import wait_until

DRIFT = 0.02  # how much the resident memory may grow
WARM = 0.25  # share of the time after which memory counts
BEAT = 0.1  # seconds between two images of the folder, and of MQTT
EVENT = 3.0  # seconds between two disturbances
FULL = 2.0  # seconds for which a disk is full
PATIENCE = 120.0  # seconds for what is left at the end
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
ROTATED = CLASSES[1:] + CLASSES[:1]  # how the second model calls them


class Sort(NamedTuple):
    """One image file, and what is expected: its color, "any" outcome, or "bad": a failure."""

    expected: str
    data: bytes


def sorts() -> list[Sort]:
    """What comes, the usual first."""
    plain = [Sort(name, data) for name, data in zip(CLASSES, (RED, GREEN, BLUE), strict=True)]
    odd = [
        Sort("bad", data)
        for data in (b"", b"no image", RED[:-30], RED[:20], _saved(_bomb(), "PNG"))
    ]
    for name, rgb in COLORS.items():
        image = Picture.new("RGB", (48, 32), rgb)
        odd += [
            Sort(name, _saved(image.convert("P"), "PNG")),
            Sort(name, _saved(image, "JPEG", quality=95, exif=_rotated(6))),
            Sort(name, _saved(image, "JPEG", quality=95, exif=_rotated(3))),
            Sort(name, _saved(image.convert("RGBA"), "PNG")),
            Sort("any", _saved(image.convert("CMYK"), "JPEG")),
            Sort("any", _saved(image.convert("LA"), "PNG")),
            Sort("any", _saved(image.convert("1"), "PNG")),
            Sort("any", _saved(image.convert("L"), "BMP")),
            Sort("any", _saved(Picture.new("I;16", (48, 32), 40_000), "PNG")),
            Sort("bad", _saved(image, "JPEG")[:200]),
        ]
    return plain * (len(odd) * 3) + odd


def _bomb() -> Picture.Image:
    return Picture.new("1", (10_000, 10_000))


def _rotated(orientation: int) -> Picture.Exif:
    exif = Picture.Exif()
    exif[0x0112] = orientation
    return exif


def _saved(image: Picture.Image, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def load(port: int, count: int, seed: int, notes: Path) -> None:
    """A client: sends so many images over one connection and notes the id of each outcome
    (a process of its own).
    """
    random, wares = Random(seed), sorts()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with notes.open("w") as file:
        for number in range(count):
            sort = random.choice(wares)
            while True:
                connection.request(
                    "POST", f"/classify?name={sort.expected}/http-{seed}-{number}", sort.data
                )
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 503:
                    break
            assert answer.status in (200, 400), (answer.status, body)
            file.write(json.loads(body)["id"] + "\n")


class Subscriber:
    """A receiver of the line's verdicts, with a session that lasts."""

    def __init__(self, port: int, line: str) -> None:
        self.ids: Counter[str] = Counter()
        self.client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, "receiver", protocol=paho.MQTTv5
        )
        self.client.on_message = self._note
        self.client.on_connect = lambda client, *_: client.subscribe(topics.verdicts(line), qos=1)
        self.client.reconnect_delay_set(1, 1)
        lasting = Properties(PacketTypes.CONNECT)
        lasting.SessionExpiryInterval = 3600
        self.client.connect("127.0.0.1", port, clean_start=False, properties=lasting)
        self.client.loop_start()

    def _note(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self.ids[json.loads(message.payload)["id"]] += 1


class Line:
    """The daemon, its settings and what was sent to it by the folder and MQTT."""

    def __init__(self, folder: Path, broker: Mosquitto) -> None:
        self.folder, self.broker = folder, broker
        for name in ("camera", "state"):
            (folder / name).mkdir()
        self.log = folder / "log"
        self.store = line_store(folder / "state", "line-1")
        tiny_bundle(folder / "one")
        tiny_bundle(folder / "two", round_=2, classes=(ROTATED[0], ROTATED[1], ROTATED[2]))
        self.names: list[str] = []
        self.ready = False

    def begin(self) -> None:
        """Start it; return when it is ready."""
        self.write(extra=False)
        environment = {"STATE_DIRECTORY": str(self.folder / "state")}
        self.process = start(
            "serve", "--config", self.folder / "line.toml", log=self.log, **environment
        )
        wait_until(
            lambda: "ready http" in self.log.read_text(),
            meanwhile=lambda: self.process.poll() is None,
            said=self.log.read_text,
        )
        [url] = [
            line.split()[1]
            for line in self.log.read_text().splitlines()
            if line.startswith("ready ")
        ]
        self.url = httpx.URL(url)
        [one] = self.store.digests()
        two = self.store.add(self.folder / "two", "soak")
        self.digests = (one, two)
        self.labels = {
            one: dict(zip(CLASSES, CLASSES, strict=True)),
            two: dict(zip(CLASSES, ROTATED, strict=True)),
        }

    def write(self, *, extra: bool) -> None:
        """The settings, with a sink more or less."""
        sinks = [
            f'kind = "jsonl"\npath = "{name}"'
            for name in ("out.jsonl", *(["extra.jsonl"] if extra else []))
        ]
        sinks += [
            'kind = "sqlite"\npath = "out.sqlite"',
            f'kind = "mqtt"\nurl = "{self.broker.url}"',
        ]
        sources = ['kind = "folder"\npath = "camera"\nafter = "delete"']
        sources += [f'kind = "mqtt"\nurl = "{self.broker.url}"\ntopic = "images/#"']
        tables = [f"[[sinks]]\n{each}\n" for each in sinks] + [
            f"[[sources]]\n{each}\n" for each in sources
        ]
        text = 'bundle = "one"\nport = 0\n[log]\nlevel = "info"\n' + "".join(tables)
        (self.folder / "next.toml").write_text(text)
        (self.folder / "next.toml").replace(self.folder / "line.toml")

    def rss(self) -> int:
        """Resident memory, bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # Disturbances, one after the other

    def swap(self) -> str:
        """Serve the other model."""
        active = self.store.state().active
        other = next(each for each in self.digests if each != active)
        wanted = control_requests.Request(action="activate", by="soak", bundle=other, force=True)
        answer = control_requests.send_request(
            self.store.folder, wanted, PATIENCE, self.store.is_locked
        )
        assert answer.done, answer
        return "swaps"

    def restart_broker(self) -> str:
        """In order: what it has acknowledged it still has then."""
        self.broker.end()
        time.sleep(0.5)  # that it is away
        self.broker.start()
        return "broker restarts"

    def reload(self) -> str:
        """A sink more, then one less."""
        self._extra = not getattr(self, "_extra", False)
        self.write(extra=self._extra)
        self.process.send_signal(signal.SIGHUP)
        return "reloads"

    def fill_disk(self) -> str:
        """No file of the daemon's can grow for a while."""
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        time.sleep(FULL)  # that the disk is full
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, unlimited)
        return "full disks"


def repeat(
    action: Callable[[], object], pause: float, stop: threading.Event, failures: list[str]
) -> threading.Thread:
    """Do it again and again, in a thread, until `stop`."""

    def run() -> None:
        try:
            while not stop.wait(pause):
                action()
        except Exception as error:
            failures.append(
                f"{getattr(action, '__name__', action)}: {type(error).__name__}: {error}"
            )

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def feeders(line: Line, seed: int) -> tuple[Callable[[], None], Callable[[], None], paho.Client]:
    """What puts an image into the folder, what publishes one, and with what."""
    random, wares, numbers = Random(seed), sorts(), itertools.count()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, "camera")
    client.reconnect_delay_set(1, 1)
    client.connect("127.0.0.1", line.broker.port)
    client.loop_start()

    def put() -> None:
        sort, number = random.choice(wares), next(numbers)
        name = f"{sort.expected}-folder-{number}.png"
        (line.folder / "camera" / f".{name}").write_bytes(sort.data)
        (line.folder / "camera" / f".{name}").rename(line.folder / "camera" / name)
        line.names.append(name)

    def publish() -> None:
        sort = random.choice([each for each in wares if each.data])
        topic = f"images/{sort.expected}-mqtt-{next(numbers)}"
        # not connected: whether it comes later is not known
        with contextlib.suppress(RuntimeError):
            # once, also over a restart
            client.publish(topic, sort.data, qos=2).wait_for_publish(PATIENCE)
            line.names.append(topic)

    return put, publish, client


def outcomes(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of outcomes."""
    with file.open("rb") as lines:
        for each in lines:
            yield json.loads(each)


def judge(line: Line, known: set[str], subscriber: Subscriber) -> dict[str, int]:
    """What went wrong, counted; all must be 0."""
    wrong: Counter[str] = Counter()
    ids: Counter[str] = Counter()
    images: Counter[str] = Counter()
    for each in outcomes(line.folder / "out.jsonl"):
        ids[each["id"]] += 1
        if each["type"] == "Notice":
            continue
        name = each["image"]
        images[name.rpartition("/")[2] if name.startswith(str(line.folder)) else name] += 1
        expected = name.removeprefix("images/").partition("/")[0].partition("-")[0]
        if each["type"] == "Failure":
            wrong["good images that failed"] += expected in COLORS
        else:
            wrong["bad images that were judged"] += expected == "bad"
            label = line.labels[each["model"]].get(expected)
            wrong["answers of another model"] += label not in (None, each["label"])
    with sqlite3.connect(line.folder / "out.sqlite") as database:
        rows = {row[0] for row in database.execute("SELECT id FROM outcomes")}
    wrong["lost by jsonl"] = len(known - ids.keys())
    wrong["twice in jsonl"] = sum(count - 1 for count in ids.values())
    wrong["lost by sqlite"] = len(ids.keys() - rows)
    wrong["lost by MQTT"] = len(ids.keys() - subscriber.ids.keys())
    wrong["images of folder and MQTT without an outcome"] = sum(
        not images[name] for name in line.names
    )
    wrong["images of folder and MQTT with two"] = sum(images[name] > 1 for name in line.names)
    print(*(name for name in line.names if images[name] != 1))
    others = sum(images[name] for name in line.names)
    print(
        f"{sum(ids.values())} outcomes: {len(known)} of HTTP, {others} of folder and MQTT, the "
        "rest malformed"
    )
    return dict(wrong)


def drift(memory: list[int]) -> float:
    """Growth of the median of the last third over that of the first, after the warm-up."""
    settled = memory[int(len(memory) * WARM) :]
    third = max(1, len(settled) // 3)
    first, last = statistics.median(settled[:third]), statistics.median(settled[-third:])
    print(
        f"resident memory: {first / 1e6:.1f} MB, then {last / 1e6:.1f} MB; at most "
        f"{max(memory) / 1e6:.1f} MB"
    )
    return last / first - 1


def main() -> None:
    """Run it, and say what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inferences", type=int, default=200_000)
    parser.add_argument("--malformed", type=int, default=10_000, help="malformed HTTP requests")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=getrandbits(16))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        broker = Mosquitto(folder / "broker", persistence=True)
        broker.start()
        line = Line(folder, broker)
        try:
            problems = soak(line, options)
        finally:
            line.process.kill()
            broker.end()
            if line.process.returncode:
                print(line.log.read_text()[-5000:], file=sys.stderr)
    for what, count in problems.items():
        print(f"{count} {what}")
    sys.exit(any(problems.values()))


def soak(line: Line, options: argparse.Namespace) -> dict[str, int]:
    """Everything at once; what went wrong, counted."""
    begun, random = time.monotonic(), Random(options.seed)
    line.begin()
    subscriber = Subscriber(line.broker.port, "line-1")
    put, publish, camera = feeders(line, options.seed)
    stop, failures, done, memory = threading.Event(), list[str](), Counter[str](), list[int]()
    events = (line.swap, line.swap, line.reload, line.restart_broker, line.fill_disk)
    threads = [
        repeat(put, BEAT, stop, failures),
        repeat(publish, BEAT, stop, failures),
        repeat(lambda: done.update([random.choice(events)()]), EVENT, stop, failures),
        repeat(lambda: memory.append(line.rss()), 0.25, stop, failures),
        threading.Thread(target=attack, args=(line, options, failures)),
    ]
    threads[-1].start()
    share = options.inferences // options.clients
    clients = [
        multiprocessing.get_context("spawn").Process(
            target=load,
            args=(line.url.port, share, options.seed + number, line.folder / f"notes-{number}"),
        )
        for number in range(options.clients)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    failures += [f"a client ended with {client.exitcode}" for client in clients if client.exitcode]
    took = time.monotonic() - begun
    stop.set()
    for thread in threads:
        thread.join()
    known = {each for path in line.folder.glob("notes-*") for each in path.read_text().split()}
    settle(line, subscriber)
    line.process.send_signal(signal.SIGTERM)
    code = line.process.wait(PATIENCE)
    camera.loop_stop()
    subscriber.client.loop_stop()
    print(f"{len(known)} images over HTTP in {took:.0f} s, {len(known) / took:.0f} a second")
    print(", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    grown = drift(memory)
    print(f"drift {grown:+.2%}")
    for each in failures:
        print(each)
    tracebacks = line.log.read_text().count("Traceback")
    more = {"failures of the harness": len(failures), "tracebacks": tracebacks, "exit code": code}
    return judge(line, known, subscriber) | more | {"growth": int(grown > DRIFT)}


def attack(line: Line, options: argparse.Namespace, failures: list[str]) -> None:
    """Malformed requests."""
    try:
        if options.malformed:
            Battle(Daemon(line.process, str(line.url)), options.seed).fight(options.malformed)  # type: ignore[arg-type]
    except BaseExceptionGroup as group:
        failures += [
            f"malformed requests: {type(each).__name__}: {str(each)[:500]}"
            for each in group.exceptions
        ]


def settle(line: Line, subscriber: Subscriber) -> None:
    """Wait until the folder is empty and nothing more arrives."""
    deadline, before, since = time.monotonic() + PATIENCE, -1, time.monotonic()
    while time.monotonic() < min(deadline, since + 5):
        now = (
            len(subscriber.ids)
            + (line.folder / "out.jsonl").stat().st_size
            - len(list((line.folder / "camera").iterdir()))
        )
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.1)  # between two looks: nothing may change for seconds


if __name__ == "__main__":
    main()
