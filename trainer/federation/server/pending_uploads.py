"""Uploads of contributions to the coordinator: at most one for each node,
the newest that it has offered.
"""

from collections.abc import Iterator

from broker_config.protocol.messages import Contribution, Manifest
from broker_config.transfer.blob_transfer import BlobTransfer


class PendingUploads:
    """A blob to fetch, and the message that announced it."""

    def __init__(self, transfer: BlobTransfer):
        self._transfer = transfer
        self._pending: dict[str, Contribution] = {}  # by node

    def __iter__(self) -> Iterator[Manifest]:
        return (message.blob for message in self._pending.values() if message.blob)

    def fetch(self, message: Contribution) -> None:
        """Fetch the blob of a contribution, in place of an earlier one of its node."""
        assert message.blob is not None
        if message.blob not in self:
            self.cancel(message.blob.node)
        # again: a blob that waits for a silent holder waits no longer
        self._transfer.fetch(message.blob)
        self._pending[message.blob.node] = message

    def in_progress(self) -> list[Manifest]:
        """Return the blobs that are arriving.

        The others wait, and a look at each of them does not pay.
        """
        return [blob for blob in self._transfer.in_progress() if blob in self]

    def __contains__(self, blob: Manifest) -> bool:
        message = self._pending.get(blob.node)
        return message is not None and message.blob == blob

    def pop(self, blob: Manifest) -> Contribution | None:
        """The contribution whose blob has arrived; None if it is no longer wanted."""
        return self._pending.pop(blob.node) if blob in self else None

    def cancel(self, node: str) -> None:
        """Fetch nothing more from a node."""
        message = self._pending.pop(node, None)
        if message is not None and message.blob is not None:
            self._transfer.cancel(message.blob)

    def cancel_all(self) -> None:
        """Fetch nothing more from any node."""
        for node in list(self._pending):
            self.cancel(node)
