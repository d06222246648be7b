"""Contributions whose blobs are under way to the coordinator: at most one of each node, the newest that it offered."""

from collections.abc import Iterator

from broker_config.protocol.messages import Contribution, Manifest
from broker_config.transfer.blob_transfer import Courier


class Arrivals:
    """What the courier is to bring, and for which message."""

    def __init__(self, courier: Courier):
        self._courier = courier
        self._expected: dict[str, Contribution] = {}  # by node

    def __iter__(self) -> Iterator[Manifest]:
        return (message.blob for message in self._expected.values() if message.blob)

    def expect(self, message: Contribution) -> None:
        """Fetch the blob of a contribution, instead of another one of its node."""
        assert message.blob is not None
        if message.blob not in self:
            self.forget(message.blob.node)
        self._courier.fetch(message.blob)  # again: a blob that waits for a silent holder waits no longer
        self._expected[message.blob.node] = message

    def __contains__(self, blob: Manifest) -> bool:
        message = self._expected.get(blob.node)
        return message is not None and message.blob == blob

    def take(self, blob: Manifest) -> Contribution | None:
        """The contribution whose blob has arrived; None if nobody waits for it any more."""
        return self._expected.pop(blob.node) if blob in self else None

    def forget(self, node: str) -> None:
        """Fetch nothing more from a node."""
        message = self._expected.pop(node, None)
        if message is not None and message.blob is not None:
            self._courier.cancel(message.blob)

    def clear(self) -> None:
        """Fetch nothing more from any."""
        for node in list(self._expected):
            self.forget(node)
