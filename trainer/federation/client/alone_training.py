"""Training thread for the comparison: the node trains without others while it waits for them."""

import contextlib
import os
import threading
from pathlib import Path

from safetensors.torch import load_file, save_file

from broker_config.protocol.messages import Spec
from broker_config.storage import disk
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import AloneProgress
from trainer.methods.base import WHOLE
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import to_arrays, to_tensors
from trainer.training.alone import TrainedAlone, trains_alone
from trainer.training.participant import Participant, State

_NICENESS = 10  # the federation's rounds come first, also those of other nodes on this machine


class AloneTraining:
    """A thread that trains between `resume` and `pause`, as many rounds as the federation has.

    Pauses change no byte of what it gives, nor do kills: each finished round is on disk.

    Args:
        spec: the federation.
        name: of the node.
        images: the plant's.
        folder: the node's state folder.
    """

    def __init__(self, spec: Spec, name: str, images: Images, folder: Path):
        self._spec, self._folder = spec, folder
        self._participant = None if trains_alone(spec) else Participant.alone(spec, name, images)
        self._thread: threading.Thread | None = None
        self._may_run, self._stopping = threading.Event(), threading.Event()
        self._trained: TrainedAlone | BaseException | None = None
        self.rounds_done = 0

    def begin(self, broadcast: Arrays) -> None:
        """Start from a broadcast's encoder, or go on where an earlier process was; only the first call counts."""
        if self._participant is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._participant, broadcast), name="alone")
            self._thread.start()

    def pause(self) -> None:
        """Stop between two batches, until `resume`."""
        self._may_run.clear()

    def resume(self) -> None:
        """Use the processor."""
        self._may_run.set()

    def result(self) -> TrainedAlone | None:
        """What it has learnt, once it has; None if the method is this baseline itself.

        Raises:
            Stopped: it was closed before.
            DivergedError: its loss is no longer finite.
            EdgeNodeError: the disk has failed; a new process goes on.
        """
        if self._thread is None:
            return None
        self.resume()
        self._thread.join()
        if isinstance(self._trained, BaseException):
            raise self._trained
        return self._trained

    def close(self) -> None:
        """Stop between two batches and wait for it."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, participant: Participant, broadcast: Arrays) -> None:
        with contextlib.suppress(OSError):  # a system without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._trained = self._train(participant, broadcast)
        except BaseException as error:
            self._trained = error

    def _train(self, participant: Participant, broadcast: Arrays) -> TrainedAlone:
        progress = checkpoint.load_alone(self._folder, self._spec.run)
        if progress is None:
            progress = AloneProgress(run=self._spec.run, round=0, initial="alone-initial.safetensors", state="")
            with disk.writing(self._folder):
                encoder = to_tensors(select(broadcast, ("encoder",)))
                disk.replace(self._folder / progress.initial, lambda path: save_file(encoder, path))
            checkpoint.save_alone(self._folder, progress)
        initial = to_arrays(load_file(self._folder / progress.initial))
        state = State.load(self._folder / progress.state) if progress.state else participant.start(initial)
        for round_ in range(progress.round + 1, self._spec.rounds + 1):
            self.rounds_done = round_ - 1
            state, _, _ = participant.contribute(state, initial, round_, self._wait_for_turn)
            state, _ = participant.refine(state, initial, round_, self._wait_for_turn)
            progress = self._save(state, progress)
        self.rounds_done = self._spec.rounds
        return TrainedAlone(initial, select(state.tensors, WHOLE))

    def _wait_for_turn(self) -> bool:
        """Wait until it may run; whether it is to stop instead."""
        while not self._stopping.is_set() and not self._may_run.wait(0.2):
            pass
        return self._stopping.is_set()

    def _save(self, state: State, before: AloneProgress) -> AloneProgress:
        """The state's file first, then the progress that names it."""
        round_ = before.round + 1
        after = AloneProgress(run=before.run, round=round_, initial=before.initial, state=f"alone-{round_}.safetensors")
        with disk.writing(self._folder):
            disk.replace(self._folder / after.state, state.save)
        checkpoint.save_alone(self._folder, after)
        if before.state:
            (self._folder / before.state).unlink(missing_ok=True)
        return after
