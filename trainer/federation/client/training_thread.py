"""Training thread of a node, whose results are on disk before they are reported."""

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path

import msgspec
import numpy as np

from broker_config.protocol.codec import read_tensors
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Delta, Manifest, Spec
from broker_config.protocol.round_contents import broadcast_tensors
from broker_config.storage import checksums, disk
from broker_config.transfer.blob_transfer import BlobStore
from edge.inference import native_memory
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint
from trainer.federation.client.alone_training import AloneTraining
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.plant_checks import PlantCheck
from trainer.federation.client.plant_images import digest_images
from trainer.federation.client.privacy_file import check_account, open_account
from trainer.federation.client.received_delta import apply_delta
from trainer.federation.client.session_events import (
    Begun,
    Contributed,
    Deployed,
    Failed,
    Refined,
)
from trainer.federation.client.spec_check import check_scales
from trainer.federation.update_codec import encode_contribution
from trainer.methods import make
from trainer.models.named_tensors import Arrays, select
from trainer.progress.events import ModelReady
from trainer.progress.long_work import Stopped, watched
from trainer.training import personal_model
from trainer.training.alone import NotComparableError
from trainer.training.conclusion import conclude, conclude_first, conclude_unjudged
from trainer.training.engine import DivergedError
from trainer.training.first_sums import take_first
from trainer.training.participant import Participant, State
from trainer.training.personal_model import ModelMetadata, PersonalModel
from trainer.training.preview import preview

_AFTER_SUMS = 2  # the round that starts from the totals of the first one


class Worker:
    """One thread that trains; it never touches the network. Its results go to `inbox`.

    Args:
        spec: the federation.
        name: of the node.
        images: the plant's.
        folder: the node's state folder.
        inbox: receives Contributed, Refined, Deployed or Failed, and how far long work is.
        previews: whether the node wants to know what joining would give, and no model.
        checks: what the plant demands, by the names under which its checks are registered.

    Raises:
        EdgeNodeError: the state in `folder` is damaged.
    """

    def __init__(
        self,
        spec: Spec,
        name: str,
        images: Images,
        folder: Path,
        inbox: queue.Queue[object],
        *,
        previews: bool = False,
        checks: Mapping[str, PlantCheck] = {},
    ):
        self._images = images
        self._checks = checks
        self._finish = self._preview if previews else self._deploy
        self._spec = spec
        self._name = name
        self.folder = folder
        self._inbox = inbox
        self._digest = digest_images(images.train)
        self.store = BlobStore(folder / "blobs")
        # A secret that outlives the process: made again, a contribution tells nothing new. Another
        # process would else send the same patches of images with other noise.
        secret = ""
        account = None
        relay = make(spec.method, spec.training, spec.options, spec.head, spec.privacy).relay
        if spec.privacy or (relay and relay.protection):
            most_epsilon = min((each.most_epsilon for each in checks.values()), default=inf)
            secret, account = open_account(folder, most_epsilon)
        self._participant = Participant(spec, name, images, secret=secret, account=account)
        self.method = self._participant.method
        self.classes = self._participant.own
        self.needs_final = self._participant.needs_final
        self.deploys_final = self._participant.deploys_final
        self.found = checkpoint.find_progress(folder, spec.run)
        self.progress = self.found.progress
        if spec.privacy and account and self.progress and self.progress.history:
            check_account(folder, account, spec.run)
        # Where no image can judge training, nothing that is trained will be deployed.
        can_judge = images.test is not None or not spec.first_totals
        self.alone = AloneTraining(spec, name, images, folder, wanted=can_judge and not previews)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._stopping = threading.Event()

    def train(self, broadcast: Manifest, *, counted: bool) -> None:
        """Begin the round that starts from `broadcast`, which is in the store;
        or go on with its stage 2.

        `counted` says whether the round before holds this node's contribution.
        """
        self._submit(partial(self._train_round, counted=counted), broadcast)

    def go_back(self, round_: int) -> bool:
        """Go back to where the node was before a round; whether that state was kept,
        and no nearby one is taken.
        """
        assert self.progress is not None
        self.progress, exact = checkpoint.go_back(self.folder, self.progress, round_)
        return exact

    def deploy(self, final: Manifest, *, counted: bool) -> None:
        """Write the personal model and what it reaches on held-out images, or the preview.

        `final` is the run's result; `counted`, whether it holds this node's contribution to the
        last round: that is on disk when this returns, so that a new process need not ask the
        coordinator again. A newcomer has none.
        """
        if self.progress is not None:
            self.progress = msgspec.structs.replace(self.progress, counted=counted)
            checkpoint.save_progress(self.folder, self.progress)
        self._submit(self._finish, final)

    def apply(self, delta: Delta, broadcast: Manifest, *, final: bool) -> bool:
        """Make a broadcast, or the `final` result, of the one before it and a delta;
        whether it is that.
        """
        return apply_delta(self.store, self._spec, delta, broadcast, final=final)

    @property
    def judged(self) -> tuple[int, int]:
        """Rounds that are trained without the others, and all of these."""
        return self.alone.rounds_done, self.alone.rounds

    def close(self) -> None:
        """Stop between two batches and wait for it."""
        self._stopping.set()
        self.alone.close()
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, job: Callable[[Manifest], None], manifest: Manifest) -> None:
        def run() -> None:
            self.alone.pause()
            try:
                with watched(self._inbox.put, self._stopping.is_set):
                    job(manifest)
            except Stopped:
                pass
            except BaseException as error:
                self._inbox.put(Failed(error))
            finally:
                native_memory.trim_heap()  # else the process keeps what the largest batch took
                self.alone.resume()

        self._pool.submit(run)

    def _train_round(self, manifest: Manifest, *, counted: bool) -> None:
        progress = self.progress
        if progress and (progress.round, progress.stage) == (manifest.round, "contributed"):
            self.alone.begin(None)
            state = self._load(progress)
            manifest = progress.broadcast
        else:
            if self._spec.first_totals and manifest.round == _AFTER_SUMS:
                self._make_first_model(manifest, counted=counted)
            state, progress = self._stage_1(manifest)
            progress = self._save(state, progress)
            self._inbox.put(Contributed(progress))
        state, progress = self._stage_2(state, progress)
        self._inbox.put(Refined(self._save(state, progress)))

    def _make_first_model(self, manifest: Manifest, *, counted: bool) -> None:
        """Write the model of the first sums, which holds until training gives a better one."""
        past = self.progress
        if past is None or past.round != _AFTER_SUMS - 1:
            return  # it was not there when they were made
        broadcast = self._read(manifest, whole=True)
        state = self._load(past)
        counted = counted or self._participant.may_hold_own(state, broadcast)
        first = take_first(self._participant, state, broadcast, counted=counted)
        if self._is_intact(past.broadcast):
            self._check_encoder(self._read(past.broadcast), first)
        checkpoint.save_first(self.folder, self._spec.run, first)
        metadata = self._save_model(conclude_first(self._participant, first), manifest)
        metrics = metadata.metrics
        ready = ModelReady(
            node=self._name,
            folder=str(self.folder / "model"),
            accuracy=metrics.get("accuracy"),
            low=metrics.get("accuracy_low"),
            high=metrics.get("accuracy_high"),
        )
        self._inbox.put(Begun(ready, personal_model.format_outcome(metadata)))

    def _find_own(self, progress: Progress, totals: Arrays) -> tuple[State, bool]:
        """Return the node's state at the end, and whether totals are taken to hold its sums.

        The coordinator says whether they do. Where it says no of sums that it may have, and the
        totals can hold them, they are taken out all the same: heads that are judged without an
        image would else know it from the totals, and flatter themselves.
        """
        state = self._load(progress)
        counted = progress.counted is True
        was_there = progress.round < self._spec.rounds or progress.blob is not None
        if self._spec.statistics and was_there:
            if progress.round < self._spec.rounds:  # its part of the last round is lost
                state = self._participant.with_statistics(state, totals)
            counted = counted or self._participant.may_hold_own(state, totals)
        return state, counted

    def _check_encoder(self, summed: Arrays, first: Arrays) -> None:
        """Check that totals come with the encoder whose features were summed."""
        encoder = select(summed, ("encoder",))
        if not all(np.array_equal(first[name], value) for name, value in encoder.items()):
            raise EdgeNodeError(
                "the coordinator has passed on totals of sums with another encoder than theirs",
                "ask its operator why; no model was made of them",
            )

    def _stage_1(self, manifest: Manifest) -> tuple[State, Progress]:
        broadcast = self._read(manifest)
        past = self.progress
        if past is None:  # afterwards the digest of the spec stands for its scales
            check_scales(self._spec, broadcast, manifest.round)
        for check in self._checks.values():
            check.check_begin(
                self._spec,
                self._images,
                broadcast,
                manifest.round,
                self._stopping.is_set,
                is_newcomer=past is None,
            )
        self._checks = {}  # later broadcasts are what training makes of this one
        given = None if past else broadcast
        self.alone.begin(given)
        before = self._load(past) if past else self._participant.start(broadcast)
        state, contributed, metrics = self._participant.contribute(
            before, broadcast, manifest.round, self._stopping.is_set
        )
        blob = None
        if contributed.tensors:
            digest, size = self.store.put(
                encode_contribution(self._spec, contributed.tensors, broadcast)
            )
            self._participant.confirm(manifest.round, digest)
            blob = msgspec.structs.replace(
                manifest, node=self._name, digest=digest, size=size, signature="", record=None
            )
        history = past.history if past else ()
        return state, Progress(
            run=self._spec.run,
            round=manifest.round,
            stage="contributed",
            state=f"state-{manifest.round}-1.safetensors",
            digest="",
            broadcast=manifest,
            weight=contributed.weight,
            blob=blob,
            history=(*history, {"round": float(manifest.round), **metrics}),
            images=self._digest,
        )

    def _stage_2(self, state: State, progress: Progress) -> tuple[State, Progress]:
        broadcast = self._read(progress.broadcast)
        round_ = progress.round
        state, metrics = self._participant.refine(state, broadcast, round_, self._stopping.is_set)
        history = (*progress.history[:-1], {**progress.history[-1], **metrics})
        return state, msgspec.structs.replace(
            progress, stage="refined", state=f"state-{round_}-2.safetensors", history=history
        )

    def _deploy(self, final: Manifest) -> None:
        progress = self.progress or self._begin_as_newcomer(final)
        is_newcomer = msgspec.structs.replace(progress.broadcast, record=final.record) == final
        source = (
            progress.broadcast
            if self._is_intact(progress.broadcast) and not self.deploys_final
            else final
        )
        broadcast = self._read(source, final=is_newcomer or source is final)
        last = self._read(final, final=True) if self.needs_final else broadcast
        alone = None
        notice = ""
        try:
            if is_newcomer and self.method.train:
                raise NotComparableError(
                    "this node was not in the run, and does not know what it began with", "nothing"
                )
            self.alone.begin(None)  # a process that has trained no round has not begun it
            alone = self.alone.result()
        except (DivergedError, NotComparableError) as error:
            notice = f"no comparison with training alone: {error}"
        state, counted = self._find_own(progress, last)
        if self._spec.statistics and counted and progress.images != self._digest:
            # The totals hold sums of images that the node has no more: it adds those of its images
            # of now, for itself.
            last = self._participant.without_own(state, last, counted=True)
            counted = False
        made = (self._participant, state, progress.round, broadcast, last, progress.history)
        origin = msgspec.structs.replace(source, record=final.record)  # which holds all rounds
        if not (self.folder / "model").exists():
            self._save_model(conclude_unjudged(*made, counted=counted), origin)
        first = checkpoint.load_first(self.folder, self._spec.run)
        model = conclude(*made, alone, counted=counted, first=first)
        metadata = self._save_model(model, origin)
        notices = [notice] if notice else []
        lines = [*notices, *personal_model.format_outcome(metadata)]
        self._inbox.put(Deployed(self.folder / "model", lines, {}))

    def _save_model(self, model: PersonalModel, origin: Manifest) -> ModelMetadata:
        """Write the personal model, made from the broadcast `origin`; return its metadata."""
        metadata = msgspec.structs.replace(model.metadata, broadcast=origin)
        personal_model.save(model._replace(metadata=metadata), self.folder / "model")
        return metadata

    def _preview(self, final: Manifest) -> None:
        progress = self.progress or self._begin_as_newcomer(final)
        result = self._read(final, final=True)
        state, counted = self._find_own(progress, result)
        others = self._participant.without_own(state, result, counted=counted)
        metrics: Mapping[str, float] = {}
        if not self._spec.chooses:
            model = conclude(
                self._participant, state, progress.round, result, result, (), None, counted=counted
            )
            metrics = model.metadata.metrics
        made = preview(self._spec, self._name, others, self._images.train, metrics)
        file = self.folder / "preview.json"
        disk.replace_bytes(file, msgspec.json.format(msgspec.json.encode(made)))
        told = made.metrics() if self._spec.chooses else {}
        self._inbox.put(Deployed(file, made.describe(), told))

    def _begin_as_newcomer(self, final: Manifest) -> Progress:
        """Write down that this node was in no round of the run,
        of whose result it makes its model.
        """
        result = self._read(final, final=True)
        rounds = self._spec.rounds
        state = self._participant.with_statistics(State({}, {}), result)
        self.alone.begin(result)
        progress = Progress(
            run=self._spec.run,
            round=rounds,
            stage="refined",
            state=f"state-{rounds}-2.safetensors",
            digest="",
            broadcast=final,
            weight=1.0,
            blob=None,
            history=(),
            counted=False,
        )
        return self._save(state, progress)

    # Disk

    def _read(self, manifest: Manifest, *, final: bool = False, whole: bool = False) -> Arrays:
        """What training takes of a broadcast, or the `whole` of it; the `final` one is whole."""
        expected = broadcast_tensors(self._spec, manifest.round + final)
        if not self._is_intact(manifest):
            raise EdgeNodeError(
                f"{self.store.path(manifest.digest)} is missing or was changed",
                f"join again: it is fetched again, or restore {self.folder} from a copy",
            )
        found = dict(read_tensors(self.store.path(manifest.digest), expected))
        return found if final or whole else select(found, self._spec.tensors)

    def _is_intact(self, manifest: Manifest) -> bool:
        return self.store.is_intact(manifest.digest)

    def _load(self, progress: Progress) -> State:
        path = self.folder / progress.state
        if checksums.digest_of(path) != progress.digest:
            raise EdgeNodeError(
                f"{path} was changed", "join again: the node goes back to the round before it"
            )
        return State.load(path)

    def _save(self, state: State, progress: Progress) -> Progress:
        """The state's file first, then the progress that names it:
        a kill in between leaves the earlier pair.
        """
        with disk.writing(self.folder):
            disk.replace(path := self.folder / progress.state, state.save)
        self.progress = msgspec.structs.replace(progress, digest=checksums.digest_of(path))
        checkpoint.save_progress(self.folder, self.progress)
        return self.progress
