"""A proxy that reads MQTT packets and treats them as a bad network with a careless or lying
broker behind it would.
"""

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from typing import NamedTuple, Self

_PUBLISH = 3
_DUP = 0x08


class FaultRates(NamedTuple):
    """What may befall a packet, each as a chance from 0 to 1; only PUBLISH is dropped,
    doubled or held back.

    TCP neither loses nor doubles, but brokers, bridges and reconnections do: QoS 0 may be lost, QoS
    1 may come twice.
    """

    drop: float = 0.0  # of QoS 0
    double: float = 0.0  # comes twice; QoS 1 with the DUP flag
    hold: float = 0.0  # comes later, and what follows overtakes it
    stall: float = 0.0  # it and all that follows in its direction wait
    cut: float = 0.0  # the connection breaks somewhere within it
    longest: float = 0.3  # seconds of holding and stalling


FAIR = FaultRates()
STORM = FaultRates(drop=0.02, double=0.05, hold=0.03, stall=0.01, cut=0.004)


class UnreliableProxy:
    """Forwards connections to the broker at `port` on this machine, packet by packet.

    `counts` says what befell them; `weather` may change.
    """

    def __init__(self, port: int, weather: FaultRates = FAIR, seed: int = 0):
        self.counts: Counter[str] = Counter()
        self.weather = weather
        self._target, self._random = port, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"mqtt://127.0.0.1:{self.port}"
        self._clients = set[asyncio.StreamWriter]()
        self._raging = threading.Event()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._rage(),), name="storm", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._raging.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def say(self, topic: str, payload: bytes) -> None:
        """Have all clients (MQTT 5) receive a message that the broker has not sent,
        on whatever topic.
        """
        name = topic.encode()
        body = struct.pack("!H", len(name)) + name + b"\0" + payload  # QoS 0, no properties
        assert len(body) < 128 * 128
        packet = bytes((_PUBLISH << 4, len(body) & 127 | 128, len(body) >> 7)) + body
        self._loop.call_soon_threadsafe(lambda: [_write(each, packet) for each in self._clients])

    async def _rage(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connect, sock=self._listener)
        self._raging.set()
        await self._over.wait()
        server.close()  # what is under way is cancelled with the loop

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the broker is away
            writer.transport.abort()
            return
        for each in (writer, broker_writer):
            each.transport.set_write_buffer_limits(0)
        self._clients.add(writer)
        pumps = [
            asyncio.ensure_future(self._pump(*pair))
            for pair in ((reader, broker_writer), (broker_reader, writer))
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._clients.remove(writer)
        for pump in pumps:
            pump.cancel()
        for each in (writer, broker_writer):
            each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._carry(await _packet(reader), writer):
                await writer.drain()
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # one end has closed, and so we close the other

    async def _carry(self, packet: bytes, writer: asyncio.StreamWriter) -> bool:
        """Forward a packet as the weather allows; False when the connection breaks."""
        weather, publish, qos = self.weather, packet[0] >> 4 == _PUBLISH, packet[0] >> 1 & 3
        if self._befalls("stall", weather.stall):
            seconds = self._random.uniform(0, weather.longest)
            await asyncio.sleep(seconds)  # nothing gets through meanwhile
        if self._befalls("cut", weather.cut):
            writer.write(packet[: self._random.randrange(len(packet))])
            return False
        if publish and not qos and self._befalls("drop", weather.drop):
            return True
        if publish and self._befalls("hold", weather.hold):
            self._loop.call_later(self._random.uniform(0, weather.longest), _write, writer, packet)
            return True
        writer.write(packet)
        if publish and self._befalls("double", weather.double):
            writer.write(bytes([packet[0] | _DUP if qos else packet[0]]) + packet[1:])
        return True

    def _befalls(self, what: str, chance: float) -> bool:
        hit = self._random.random() < chance
        self.counts[what] += hit
        return hit


def _write(writer: asyncio.StreamWriter, packet: bytes) -> None:
    if not writer.is_closing():
        writer.write(packet)


async def _packet(reader: asyncio.StreamReader) -> bytes:
    """The next packet: a byte of type and flags, the length in groups of seven bits,
    and as many bytes.
    """
    head = await reader.readexactly(2)
    while head[-1] & 0x80:
        head += await reader.readexactly(1)
    length = sum((byte & 0x7F) << 7 * index for index, byte in enumerate(head[1:]))
    return head + await reader.readexactly(length)
