"""A real OPC UA server in a process of its own, with variables as a PLC has them;
each write is a line of its log.
"""

import asyncio
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncua import Client, Server, ua
from asyncua.crypto.permission_rules import User, UserRole
from asyncua.crypto.uacrypto import CertProperties

from tests.support.ports import HOST, free_port
from tests.support.waiting import wait_until

VARIABLES = {  # the namespace is 2
    "image": "String",
    "label": "String",
    "confidence": "Float",
    "defect": "Boolean",
    "doubt": "Boolean",
    "status": "String",
    "id": "String",
    "time": "DateTime",
    "seq": "UInt32",
    "counter": "UInt16",
    "ready": "Boolean",
    "part": "String",
}
FIRST = {
    "String": "",
    "Float": 0.0,
    "Boolean": False,
    "UInt32": 0,
    "UInt16": 0,
    "DateTime": datetime(2026, 1, 1),
}
LOCKED = "ns=2;s=locked"


def node(name: str) -> str:
    return f"ns=2;s={name}"


class OpcUaServer:
    """Started, killed and started again at one address."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.port, self._folder, self._settings = free_port(), folder, settings
        self.url = f"opc.tcp://{HOST}:{self.port}/plc"
        self._process: subprocess.Popen[bytes] | None = None
        self._writes = folder / "writes.jsonl"
        self._writes.touch()

    def start(self) -> "OpcUaServer":
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        settings = {"url": self.url, "folder": str(self._folder), **self._settings}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.opcua_server", json.dumps(settings)],
                stdout=log,
                stderr=log,
            )
        wait_until(ready.exists)
        return self

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def written(self, name: str) -> list[Any]:
        """What was written to a variable, in order."""
        lines = [json.loads(line) for line in self._writes.read_text().splitlines()]
        return [value for each, value in lines if each == name]

    def names(self) -> list[str]:
        """The variables that were written, in order."""
        return [json.loads(line)[0] for line in self._writes.read_text().splitlines()]

    def forget(self) -> None:
        """Forget what was written."""
        self._writes.write_bytes(b"")

    async def write(self, **values: Any) -> None:
        """Write variables as the PLC's program does."""
        async with Client(self.url) as client:
            for name, value in values.items():
                await client.get_node(node(name)).write_value(
                    ua.Variant(value, ua.VariantType[VARIABLES[name]])
                )


class _Users:
    def __init__(self, users: dict[str, str]) -> None:
        self._users = users

    def get_user(
        self, _server: object, username: str | None = None, password: str | None = None, **_: object
    ) -> Any:
        return (
            User(role=UserRole.User) if username and self._users.get(username) == password else None
        )


async def _serve(
    url: str, folder: str, users: dict[str, str] | None = None, cert: str = "", key: str = ""
) -> None:
    server = Server(user_manager=_Users(users) if users else None)  # type: ignore[arg-type]
    await server.init()
    server.set_endpoint(url)
    if cert:
        await server.load_certificate(cert)
        await server.load_private_key(CertProperties(key, "pem").path_or_content)
        server.set_security_policy([ua.SecurityPolicyType.Basic256Sha256_SignAndEncrypt])
    await server.register_namespace("urn:plc")
    place = await server.nodes.objects.add_object(2, "Vision")
    writes = (Path(folder) / "writes.jsonl").open("a")
    for name, kind in VARIABLES.items():
        variable = await place.add_variable(node(name), name, FIRST[kind], ua.VariantType[kind])
        await variable.set_writable()

        def store(data: Any, attribute: Any, value: Any, name: str = name) -> None:
            data.attributes[attribute].value = value
            found = value.Value.Value
            writes.write(
                json.dumps([name, found.isoformat() if isinstance(found, datetime) else found])
                + "\n"
            )
            writes.flush()

        server.iserver.aspace.set_attribute_value_setter(
            variable.nodeid, ua.AttributeIds.Value, store
        )
    await place.add_variable(LOCKED, "locked", "")
    async with server:
        (Path(folder) / "ready").touch()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(**json.loads(sys.argv[1])))
