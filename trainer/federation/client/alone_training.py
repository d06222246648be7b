"""Training thread for the comparison: the node trains without others while it waits for them."""

import contextlib
import os
import threading
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file

from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import count_training_rounds
from broker_config.storage import checksums, disk
from edge.inference import native_memory
from trainer.data.checks.image_rules import MIN_TO_TRAIN
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import AloneProgress
from trainer.methods.base import WHOLE
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import to_arrays, to_tensors
from trainer.training.alone import NotComparableError, TrainedAlone, trains_alone
from trainer.training.participant import Participant, State

_INITIAL = "alone-initial.safetensors"
_NEXT_TIME = "nothing: the next federation is compared again"
_NICENESS = 10  # the federation's rounds come first, also those of other nodes on this machine
_PATIENCE = 1.0  # seconds for a batch to end; with that priority it may take long on a busy machine


class AloneTraining:
    """A thread that trains between `resume` and `pause`, as many rounds as the federation trains.

    Pauses change no byte of what it gives, nor do kills: each finished round is on disk.

    Args:
        spec: the federation.
        name: of the node.
        images: the plant's.
        folder: the node's state folder.
        wanted: whether it is to train at all.
    """

    def __init__(self, spec: Spec, name: str, images: Images, folder: Path, *, wanted: bool = True):
        self._spec = spec
        self._folder = folder
        enough = len(images.train.labels) >= MIN_TO_TRAIN
        # Where nothing is trained, the plant's own head of the frozen encoder is what it can do
        # alone; `conclusion` makes it.
        trains = count_training_rounds(spec) > 0
        wanted = wanted and enough and trains and not trains_alone(spec)
        self._participant = Participant.alone(spec, name, images) if wanted else None
        self._thread: threading.Thread | None = None
        self._may_run = threading.Event()
        self._stopping = threading.Event()
        self._is_waiting = threading.Event()
        self._starting = (
            threading.Lock()
        )  # whoever closes waits for a thread that is being started, or none is any more
        self._trained: TrainedAlone | BaseException | None = None
        self.rounds = self._participant.spec.rounds if self._participant else 0
        self.rounds_done = 0

    def begin(self, first: Arrays | None) -> None:
        """Start from the first broadcast's encoder, or go on where an earlier process was;
        only the first call counts.

        What it starts from is on disk when this returns, so that no kill can make it a later
        broadcast's. `first` is None where an earlier process has begun it. EdgeNodeError if the
        disk fails.
        """
        if self._participant is None or self._thread is not None or self._trained is not None:
            return
        if checkpoint.load_alone(self._folder, self._spec.run) is None:
            if first is None:
                self._trained = NotComparableError(
                    f"its record in {self._folder} is damaged or missing", _NEXT_TIME
                )
                return
            encoder = to_tensors(select(first, ("encoder",)))
            with disk.writing(self._folder):
                disk.replace(self._folder / _INITIAL, lambda path: save_file(encoder, path))
            digest = checksums.digest_of(self._folder / _INITIAL)
            start = AloneProgress(run=self._spec.run, round=0, initial=digest, state=None)
            checkpoint.save_alone(self._folder, start)
        with self._starting:
            if not self._stopping.is_set():
                self._thread = threading.Thread(
                    target=self._run, args=(self._participant,), name="alone"
                )
                self._thread.start()

    def pause(self, patience: float = _PATIENCE) -> None:
        """Stop between two batches, until `resume`; the one that is under way has ended,
        unless that takes longer.

        So that the memory of its batch and of the federation's first is not needed at once.
        """
        self._may_run.clear()
        if self._thread is not None:
            self._is_waiting.wait(patience)

    def resume(self) -> None:
        """Use the processor."""
        self._may_run.set()

    def result(self) -> TrainedAlone | None:
        """What it has learnt, once it has; None if the method is this baseline itself,
        or the images are too few.

        Raises:
            Stopped: it was closed before.
            DivergedError: its loss is no longer finite.
            NotComparableError: the record of what it started from is damaged.
            EdgeNodeError: the disk has failed; a new process goes on.
        """
        if self._thread is not None:
            self.resume()
            self._thread.join()
        if isinstance(self._trained, BaseException):
            raise self._trained
        return self._trained

    def close(self) -> None:
        """Stop between two batches and wait for it."""
        self._stopping.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, participant: Participant) -> None:
        with contextlib.suppress(OSError):  # a system without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._trained = self._train(participant)
        except BaseException as error:
            self._trained = error
        finally:
            self._is_waiting.set()

    def _train(self, participant: Participant) -> TrainedAlone:
        progress = checkpoint.load_alone(self._folder, self._spec.run)
        assert progress is not None
        try:
            initial = to_arrays(load_file(self._checked(_INITIAL, progress.initial)))
        except _DamagedError as error:
            raise NotComparableError(f"{error} is damaged", _NEXT_TIME) from error
        try:
            state = self._load(progress) if progress.state else participant.start(initial)
        except _DamagedError:
            progress = msgspec.structs.replace(progress, round=0, state=None)
            state = participant.start(initial)
        for round_ in range(progress.round + 1, self.rounds + 1):
            self.rounds_done = round_ - 1
            state, _, _ = participant.contribute(state, initial, round_, self._wait_for_turn)
            state, _ = participant.refine(state, initial, round_, self._wait_for_turn)
            progress = self._save(state, round_, progress)
        self.rounds_done = self.rounds
        return TrainedAlone(initial, select(state.tensors, WHOLE))

    def _wait_for_turn(self) -> bool:
        """Wait until it may run; whether it is to stop instead."""
        if not self._may_run.is_set():
            native_memory.trim_heap()
            self._is_waiting.set()
        while not self._stopping.is_set() and not self._may_run.wait(0.2):
            pass
        self._is_waiting.clear()
        return self._stopping.is_set()

    def _load(self, progress: AloneProgress) -> State:
        return State.load(self._checked(_state_file(progress.round), progress.state))

    def _checked(self, name: str, digest: str | None) -> Path:
        path = self._folder / name
        if not path.is_file() or checksums.digest_of(path) != digest:
            raise _DamagedError(path)
        return path

    def _save(self, state: State, round_: int, before: AloneProgress) -> AloneProgress:
        """The state's file first, then the progress that names it:
        a kill in between leaves the earlier pair.
        """
        path = self._folder / _state_file(round_)
        with disk.writing(self._folder):
            disk.replace(path, state.save)
        after = msgspec.structs.replace(before, round=round_, state=checksums.digest_of(path))
        checkpoint.save_alone(self._folder, after)
        (self._folder / _state_file(before.round)).unlink(missing_ok=True)
        return after


def _state_file(round_: int) -> str:
    return f"alone-{round_}.safetensors"


class _DamagedError(Exception):
    """A file that is missing, or not what was written."""
