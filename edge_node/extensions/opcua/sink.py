"""Verdicts to variables of an OPC UA server, such as a PLC: always those of the newest part."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from broker_config.protocol.errors import EdgeNodeError, UsageError, abbreviate
from edge.config.instance import Instance
from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.sinks.sink import Item, Origin, Refused, SinkDown
from edge_node.extensions.opcua.opcua_settings import OpcUaSettings

if TYPE_CHECKING:
    from asyncua import Client, ua

T = TypeVar("T")
Value = str | float | bool | int | datetime
_CLOSE = 3.0  # seconds
_TOO_MUCH = (
    "BadOutOfRange",
    "BadEncodingLimitsExceeded",
    "BadResponseTooLarge",
    "BadRequestTooLarge",
)
_TYPES = {  # those of a variable that can hold a value
    str: ("String",),
    bool: ("Boolean",),
    float: ("Double", "Float"),
    int: ("Int64", "UInt64", "UInt32", "Int32", "UInt16", "Int16", "Byte"),
    datetime: ("DateTime", "String"),
}
_BITS = {"Int64": 63, "UInt64": 64, "UInt32": 32, "Int32": 31, "UInt16": 16, "Int16": 15, "Byte": 8}


class Nodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The variables' node ids, such as `ns=2;s=Vision.Label`;
    those that are not given are not written.
    """

    image: str | None = None
    label: str | None = None
    confidence: str | None = None
    defect: str | None = None
    doubt: str | None = None  # whether somebody should look at the image
    status: str | None = None  # ok, doubtful or failed
    id: str | None = None
    time: str | None = None
    seq: str | None = None  # written last


class Settings(OpcUaSettings, frozen=True, kw_only=True, tag_field="kind", tag="opcua"):
    """`[[sinks]] kind = "opcua"`: values of the newest part."""

    nodes: Nodes

    def open_sink(self, instance: Instance, origin: Origin) -> "OpcUa":
        """Open the sink."""
        return OpcUa(self)


class OpcUa:
    """Writes each outcome of an image in order; `seq` after the others,
    so that a change of it says that these are new.

    An outcome whose write was not confirmed is written again. Notices have no variables.
    """

    def __init__(self, settings: Settings) -> None:
        """UsageError when the settings cannot be used."""
        self._nodes: dict[str, str] = {
            name: node for name, node in asdict(settings.nodes).items() if node
        }
        if not self._nodes:
            raise UsageError(
                "an OPC UA sink without nodes would write nothing",
                'name some: nodes = { label = "..." }',
            )
        settings.check(*self._nodes.values())
        self._settings = settings
        self.name = f"opcua:{settings.url}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
        self._thread.start()
        self._client: Client | None = None
        self._types: dict[str, ua.VariantType] = {}

    def deliver(self, items: Sequence[Item]) -> None:
        """Write what has values; without items, see whether the server is there."""
        delivered = 0
        try:
            self._run(self._connect())
            for item in items:
                if not isinstance(item.outcome, Notice):
                    self._run(self._write(to_values(item)))
                delivered += 1
        except Refused as refused:
            raise Refused(str(refused), delivered) from refused
        except EdgeNodeError as error:
            raise SinkDown(f"{error.what}; {error.remedy}", delivered) from error
        except Exception as error:  # asyncua's own are many
            self._run(self._disconnect())
            reason = abbreviate(str(error)) or type(error).__name__
            raise SinkDown(
                f"the connection was lost ({reason}); check that the server runs", delivered
            ) from error

    def close(self) -> None:
        """Disconnect."""
        self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the connection's own thread, which also keeps it alive between two deliveries."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self) -> None:
        if self._client:
            await self._client.check_connection()
            await self._client.nodes.server_state.read_value()
            return
        self._client = await self._settings.connect()
        try:
            self._types = {name: await self._type_of(name) for name in self._nodes}
        except EdgeNodeError:
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        client = self._client
        self._client = None
        if client:
            try:
                await asyncio.wait_for(client.disconnect(), _CLOSE)
            except Exception:  # it is gone already
                client.disconnect_socket()

    async def _type_of(self, name: str) -> "ua.VariantType":
        from asyncua import ua  # noqa: PLC0415

        assert self._client
        try:
            found = await self._client.get_node(self._nodes[name]).read_data_type_as_variant_type()
        except ua.UaStatusCodeError as error:
            raise _unusable(name, self._nodes[name], type(error).__name__) from error
        fitting = _TYPES[_KINDS[name]]
        if found.name not in fitting:
            raise EdgeNodeError(
                f"the node {self._nodes[name]} for {name} holds {found.name}",
                f"name one for {name} that holds {' or '.join(fitting)}",
            )
        return found

    async def _write(self, values: dict[str, Value]) -> None:
        names = [name for name in self._nodes if name != "seq"]
        for group in (names, [name for name in self._nodes if name == "seq"]):
            if group:
                await self._write_group({name: values[name] for name in group})

    async def _write_group(self, values: dict[str, Value]) -> None:
        from asyncua import ua  # noqa: PLC0415

        assert self._client
        types = self._types
        variants = [
            ua.Variant(_fit(value, types[name].name), types[name]) for name, value in values.items()
        ]
        nodes = [self._client.get_node(self._nodes[name]) for name in values]
        # Without a timestamp and a status: many PLCs refuse to be given these.
        written = await self._client.write_values(
            nodes, [ua.DataValue(each) for each in variants], False
        )
        for name, status in zip(values, written, strict=True):
            if not status.is_good():
                if status.name in _TOO_MUCH:
                    raise Refused(f"{status.name} for {name}")
                raise _unusable(name, self._nodes[name], status.name)


def _unusable(name: str, node: str, status: str) -> EdgeNodeError:
    if status in ("BadNotWritable", "BadUserAccessDenied", "BadWriteNotSupported"):
        return EdgeNodeError(
            f"the node {node} for {name} may not be written ({status})",
            "let this user write it at the server",
        )
    return EdgeNodeError(
        f"the node {node} for {name} cannot be used ({status})",
        "write its id as the server's browser shows it",
    )


def to_values(item: Item) -> dict[str, Value]:
    """What an outcome gives each variable.

    An image that could not be inspected counts as a defect, and in doubt.
    """
    outcome: Outcome = item.outcome
    assert isinstance(outcome, Verdict | Failure)
    common: dict[str, Value] = {
        "image": outcome.image,
        "id": outcome.id,
        "time": datetime.fromisoformat(outcome.time),
        "seq": item.seq,
    }
    own: dict[str, Value]
    match outcome:
        case Verdict():
            own = {
                "label": outcome.label,
                "confidence": outcome.confidence,
                "defect": outcome.defect,
            }
            own |= (
                {"doubt": True, "status": "doubtful"}
                if outcome.doubts
                else {"doubt": False, "status": "ok"}
            )
        case Failure():
            own = {
                "label": "",
                "confidence": 0.0,
                "defect": True,
                "doubt": True,
                "status": "failed",
            }
    return common | own


_KINDS: dict[str, type] = {
    "image": str,
    "label": str,
    "confidence": float,
    "defect": bool,
    "doubt": bool,
    "status": str,
    "id": str,
    "time": datetime,
    "seq": int,
}


def _fit(value: Value, kind: str) -> Value:
    """The value as a variable of this type holds it:
    of a number that is too large its lowest bits.
    """
    if isinstance(value, datetime):
        return value.isoformat() if kind == "String" else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value & ((1 << _BITS[kind]) - 1)
    return value
