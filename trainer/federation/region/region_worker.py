"""Region of a relay, whose sums are what it contributes to the federation above; its coordinator runs in a thread.

To the session above it stands in the place of what trains: a round of the region is its training. Without torch.
"""

import contextlib
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.codec import DecodeError, encode_tensors, read_tensors
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Delta, Manifest, Spec
from broker_config.protocol.round_contents import SHARES, broadcast_tensors
from broker_config.transfer.blob_transfer import BlobStore
from trainer import progress as events
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.received_delta import apply_delta
from trainer.federation.client.session_events import Contributed, Deployed, Failed, Refined
from trainer.federation.server.aggregation import WEIGHT_BITS
from trainer.federation.server.coordinator import coordinate
from trainer.federation.server.journal import Run
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.region_link import BroadcastAbove, RegionLink
from trainer.methods import make
from trainer.models.named_tensors import Arrays

_INBOX = 512  # events of the region's coordinator
_PAUSE = 0.2  # seconds


class Region(NamedTuple):
    """A relay's region, as its coordinator runs it."""

    spec: Spec
    endpoint: Endpoint  # of its broker
    folder: Path  # of its ledger
    linger: float  # as in `coordinate`


class RegionWorker:
    """The coordinator of a region, in a thread. Its sums are on disk before they are reported to `inbox`.

    Args:
        above: spec of the federation above.
        name: of the relay there.
        region: what it coordinates.
        folder: the relay's state folder as a node of the federation above.
        inbox: receives Contributed, Refined, Deployed or Failed.
        report: shows progress of the region.

    Raises:
        EdgeNodeError: the state in `folder` is damaged.
    """

    needs_final, deploys_final, judged = True, True, (0, 0)
    classes: Sequence[int] = ()

    def __init__(
        self,
        above: Spec,
        name: str,
        region: Region,
        folder: Path,
        inbox: queue.Queue[object],
        report: events.Report,
    ):
        self._above, self._name, self._region, self._folder = above, name, region, folder
        self._inbox, self._report = inbox, report
        self.store = BlobStore(folder / "blobs")
        self.method = make(above.method, above.training, above.options, above.head, above.privacy)
        self.found = checkpoint.find_progress(folder, above.run)
        self.progress = self.found.progress
        self._opened: Manifest | None = None  # the broadcast of the round that is open above
        self._delta: tuple[str, tuple[str, bytes]] | None = None  # the digest of a broadcast, and what has made it
        forwarded = self.progress.round if self.progress else 0
        self._link = RegionLink(queue.Queue(_INBOX), self._forward, forwarded)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="region")
        self._thread.start()

    def train(self, broadcast: Manifest) -> None:
        """Let the region open the round that starts from `broadcast`, which is in the store, or go on with it."""
        self._opened = broadcast
        self._tell(broadcast, broadcast.round)

    def go_back(self, round_: int) -> bool:
        """Forward the newest round again.

        Raises:
            EdgeNodeError: it is an earlier one, whose contributions are not there any more.
        """
        assert self.progress is not None
        if round_ < self.progress.round:
            raise EdgeNodeError(
                f"the coordinator of federation {self._above.federation!r} is in round {round_} again, and this region "
                f"has been in round {self.progress.round}: a region cannot go back with it",
                "put the newer state folder of that coordinator back, or have its run ended (edge-node abort) and "
                "another one begun",
            )
        self.progress, exact = checkpoint.go_back(self._folder, self.progress, round_)
        return exact

    def apply(self, delta: Delta, broadcast: Manifest, *, final: bool) -> bool:
        """Make a broadcast, or the `final` result, of the one before it and a delta; whether it is that.

        The region's nodes may fetch the delta, too.
        """
        coded = apply_delta(self.store, self._above, delta, broadcast, final=final)
        if coded is None:
            return False
        self._delta = broadcast.digest, (delta.base, coded)
        return True

    def deploy(self, final: Manifest, *, counted: bool) -> None:
        """Let the region finish with the result of the federation above; Deployed follows when its nodes have it."""
        if self.progress is not None:
            self.progress = msgspec.structs.replace(self.progress, counted=counted)
            checkpoint.save_progress(self._folder, self.progress)
        self._tell(final, self._above.rounds + 1)

    def close(self) -> None:
        """Suspend the region, and wait for that."""
        self._stopping.set()
        self._thread.join()

    def _tell(self, broadcast: Manifest, round_: int) -> None:
        digest, delta = self._delta or ("", None)
        self._link.inbox.put(
            BroadcastAbove(
                round_,
                self.store.path(broadcast.digest),
                broadcast.digest,
                delta if digest == broadcast.digest else None,
            )
        )

    # The region's thread

    def _run(self) -> None:
        try:
            with Ledger(self._region.folder) as ledger:
                run = ledger.run
                is_known = run is not None and run.spec.run == self._region.spec.run
                first = self._find(run) if run and is_known else self._await_first()
                if first is None:
                    return
                if run and not is_known and run.outcome is None:
                    ledger.abort()  # the federation above has given that run up
                outcome = coordinate(
                    ledger,
                    self._region.spec,
                    first,
                    self._region.endpoint,
                    self._report,
                    new=not is_known,
                    linger=self._region.linger,
                    stop=self._stopping.is_set,
                    link=self._link,
                )
                if outcome is not None:
                    self._inbox.put(Deployed(ledger.save_result(), (), {}))
        except BaseException as error:
            self._inbox.put(Failed(error))

    def _find(self, run: Run) -> Arrays:
        """The broadcast where the region stands, as the session above has it; empty if it has it no more.

        A process that was killed may have written down that the run begins, and not yet what it begins with.
        """
        if not self.store.is_intact(digest := run.broadcast.digest):
            return {}
        return dict(read_tensors(self.store.path(digest), broadcast_tensors(self._above, run.round)))

    def _await_first(self) -> Arrays | None:
        """The broadcast that the region begins with; None if the session ends before it comes."""
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Empty):
                first = self._link.inbox.get(timeout=_PAUSE)
                assert isinstance(first, BroadcastAbove)
                if first.round > self._above.rounds:
                    raise EdgeNodeError(
                        f"federation {self._above.federation!r} ended before this region began",
                        "ask its operator for a new run",
                    )
                self._link.inbox.put(first)
                try:
                    return dict(read_tensors(first.blob, self._above.tensors))
                except DecodeError as error:
                    raise EdgeNodeError(
                        f"the broadcast of federation {self._above.federation!r} is none of its spec: {error}",
                        "ask whoever runs its coordinator",
                    ) from error
        return None

    def _forward(self, round_: int, sums: Arrays) -> None:
        """Contribute a round's sums: on disk first, then the progress that names them."""
        assert self._opened is not None
        assert self._opened.round == round_
        digest, size = self.store.put(encode_tensors(sums))
        past = self.progress.history if self.progress else ()
        self.progress = Progress(
            run=self._above.run,
            round=round_,
            stage="refined",
            state="",
            digest="",
            broadcast=self._opened,
            weight=float(np.ldexp(float(sums[SHARES]), -WEIGHT_BITS)) * self.method.weight_cap,
            blob=msgspec.structs.replace(
                self._opened, node=self._name, digest=digest, size=size, signature="", record=None
            ),
            history=(*past, {"round": float(round_)}),
        )
        checkpoint.save_progress(self._folder, self.progress)
        self._inbox.put(Contributed(self.progress))
        self._inbox.put(Refined(self.progress))
