"""Services of `vfl serve`, and the bundle writers with which `vfl coordinate` and `vfl join`
prepare them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker_config.protocol.errors import UsageError

if TYPE_CHECKING:
    from broker_config.mqtt.endpoint import Endpoint
    from broker_config.security.kit import Kit
    from edge.bundle.verification import Verifier
    from edge_node.extensions.vfl.client.sensor_trainer import Deploy as SensorDeploy
    from edge_node.extensions.vfl.line.party_bundle import Array, Manifest
    from edge_node.extensions.vfl.line.sensor_rows import RowFile
    from edge_node.extensions.vfl.line.sensor_service import Protect
    from edge_node.extensions.vfl.server.head_model import Deploy as HeadDeploy
    from export.bundle_signing import Signer

_DAYS = 365  # that a signed bundle may be served


def serve(
    bundle: Path,
    endpoint: "Endpoint",
    memory: Path,
    data: Path | None,
    output: Path | None,
    deadline: float,
    threads: int,
    stop: Callable[[], bool],
) -> None:
    """Serve a sensor or the head, by the role of the bundle, until `stop`.

    Raises EdgeNodeError as the services do.
    """
    from edge_node.extensions.vfl.line.head_service import serve_head
    from edge_node.extensions.vfl.line.party_bundle import HEAD, read_unverified
    from edge_node.extensions.vfl.line.party_model import load_head, load_sensor
    from edge_node.extensions.vfl.line.sensor_service import serve_sensor

    said = read_unverified(bundle)
    kit = endpoint.kit
    if kit and (kit.name, kit.federation) != (said.node, said.federation):
        raise UsageError(
            f"{bundle} is of {said.node} in federation {said.federation!r}, "
            f"the kit of {kit.name} in {kit.federation!r}",
            f"pass the kit of {said.node}, or a bundle of {kit.name}",
        )
    verifier = _verifier(kit, memory) if kit else None
    if said.role == HEAD:
        if data:
            raise UsageError(f"{bundle} is the head's, which reads no rows", "leave out --data")
        serve_head(
            bundle,
            partial(load_head, verifier=verifier, threads=threads),
            endpoint,
            memory,
            output,
            deadline,
            stop,
        )
    else:
        if data is None:
            raise UsageError(f"{bundle} is a sensor's, whose rows are missing", "write --data FILE")
        if output:
            raise UsageError(
                f"{bundle} is a sensor's, which predicts nothing", "leave out --output"
            )
        serve_sensor(
            bundle,
            partial(load_sensor, verifier=verifier, threads=threads),
            data,
            endpoint,
            _make_protection(),
            stop,
        )


def head_bundle_writer(folder: Path, kit: "Kit | None") -> "HeadDeploy":
    """Writer of the bundles in `folder` from which a head is served."""
    from edge_node.extensions.vfl.party_export import HeadBundleWriter

    return HeadBundleWriter(folder, _signer(kit))


def sensor_bundle_writer(folder: Path, rows: "RowFile", kit: "Kit | None") -> "SensorDeploy":
    """Writer of the bundles in `folder` from which a sensor is served."""
    from edge_node.extensions.vfl.party_export import SensorBundleWriter

    return SensorBundleWriter(folder, rows, _signer(kit))


def _signer(kit: "Kit | None") -> "Signer | None":
    from export.bundle_signing import Signer

    return Signer(kit, _DAYS) if kit else None


def _verifier(kit: "Kit", memory: Path) -> "Verifier":
    """A verifier that admits only bundles of the kit's member,
    and none older than what was served.
    """
    from broker_config.security.trust import Trust
    from edge.bundle.verification import Verifier

    trust = Trust(
        federation=kit.federation, node=kit.name, authority=kit.authority, charter=kit.charter
    )
    return Verifier(trust, memory)


def _make_protection() -> "Protect":
    """Protection and a simulated channel, as in training; each product is a message of its own."""
    from secrets import token_bytes

    import numpy as np

    from edge_node.extensions.vfl.channel_noise import Extent, transmit
    from edge_node.extensions.vfl.privacy import protect
    from trainer.seeding import generator

    secret = token_bytes(32)  # nobody else can draw this noise

    def protect_and_transmit(
        model: "Manifest", embeddings: "Array", products: Sequence[str]
    ) -> "Array":
        hidden = protect(model.privacy, embeddings, secret)
        keys = [generator(model.seed, model.node, model.round, product) for product in products]
        measure = Extent(np.array(model.low), np.array(model.high), model.deviation)
        sent = [
            transmit(model.channel, row[None], random, measure)
            for row, random in zip(hidden, keys, strict=True)
        ]
        return np.concatenate(sent)

    return protect_and_transmit
