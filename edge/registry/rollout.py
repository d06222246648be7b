"""The life of a line's model: started, exchanged while the line runs, watched for a while, taken back when it fails."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from broker_config.protocol.errors import EdgeNodeError, UsageError, explain
from edge.bundle import bundle_format
from edge.bundle.expiry import UNCHECKED, ExpiryDates
from edge.inference import native_memory
from edge.inference.decision import check_no_defect_class
from edge.inference.pipeline import Inspection, Pipeline
from edge.inference.served_model import Model, load_model
from edge.inference.verdict import Notice, Verdict, current_time, new_id
from edge.registry.bundle_store import State, Store
from edge.registry.control_requests import Answer, Request, RequestQueue
from edge.registry.gate import Finding, Gate, Sample, examine
from edge.registry.probation import Doubts, Probation

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

STARTS = 3  # of a daemon with a model on probation; it should have been confirmed by then
_STREAK = 3  # errors of a proven model, with no answer in between
_TICK = 0.2  # seconds between two looks for requests
_SELF = "the line"

_log = logging.getLogger(__name__)


class RefusedError(UsageError):
    """A bundle that the line does not take; `findings` say what was looked at."""

    def __init__(self, what: str, remedy: str, findings: Sequence[str] = ()) -> None:
        super().__init__(what, remedy)
        self.findings = tuple(findings)


class Rollout:
    """Which model a line serves. A watcher of the line; its own thread does what takes time, the line never waits.

    What happens is written down in the store before the line does it, so that a restart serves what was served.
    """

    def __init__(self, store: Store, gate: Gate, verifier: "Verifier | None" = None, threads: int = 0) -> None:
        self.store = store
        self._gate, self._verifier, self._threads = gate, verifier, threads
        self._sample, self._doubts = Sample(), Doubts()
        self._probation: Probation | None = None
        self._before: Model | None = None  # the one to go back to, loaded while the new one is on probation
        self._errors = 0
        self._untidy = False  # a model has gone, or is about to
        self._failures: deque[tuple[Model, str]] = deque()  # models that failed, to be written down
        self._turn = threading.Lock()  # of whoever changes what is served, which takes seconds
        self._swap = threading.Lock()  # of the assignment itself
        self._stop = threading.Event()

    # ------------------------------------------------------------ start and end

    def begin(self, folder: Path | None) -> Model:
        """The model to serve first: the bundle in `folder`, which the store gets, or else the store's active one.

        Raises EdgeNodeError when it cannot be served, as `load_model` does.
        """
        if folder is None:
            return self._resumed()
        model = load_model(folder, self._verifier, self._threads)
        self.store.add(folder, "edge-node serve", model.digest)
        state = self.store.state()
        if state.active != model.digest:
            self.store.activated(model.digest, "edge-node serve", trial=False)
        elif state.trial:
            self._go_on_with_probation(state)
        return model

    def _resumed(self) -> Model:
        state = self.store.state()
        candidates = [(each, self._verifier) for each in (state.active, state.previous) if each]
        if died := state.trial >= STARTS and state.previous != "":
            candidates = [(state.previous, self._verifier and self._verifier._replace(accept_older=True))]
        if not candidates:
            raise UsageError(f"there is no bundle in {self.store.folder} to serve", "name one: edge-node serve BUNDLE")
        for digest, verifier in candidates:
            try:
                model = load_model(self.store.path(digest), verifier, self._threads)
            except EdgeNodeError as error:
                if digest == candidates[-1][0]:
                    raise
                _log.error("the bundle %s cannot be served, the one before it is tried: %s", digest, error)
            else:
                break
        if model.digest != state.active:
            why = f"the daemon died {STARTS} times while it was on probation" if died else "it could not be loaded"
            self.store.rolled_back(_SELF, why, failed=died)
        elif state.trial:
            self._go_on_with_probation(state)
        return model

    def _go_on_with_probation(self, state: State) -> None:
        self.store.started(state.trial + 1)
        self._probation = Probation(self._gate, state.doubts)

    @contextmanager
    def of(self, pipeline: Pipeline) -> Iterator[None]:
        """Look after the model of this line, which has us as its last watcher."""
        self._pipeline = pipeline
        pipeline.on_model_error, pipeline.on_model_success = self._broken, self._sound
        thread = threading.Thread(target=self._run, args=(RequestQueue(self.store.folder),), name="life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            if self._probation:
                self.store.started(1)  # it has not died

    # ------------------------------------------------------------ in the line's worker thread

    def __call__(self, inspection: Inspection) -> Verdict:
        """Watch the model."""
        if inspection.model is self._pipeline.model:
            self._sample.see(inspection)
            if self._probation is None:
                self._doubts.see(inspection)
            elif why := self._probation.see(inspection):
                self._fail(inspection.model, why)
        return inspection.verdict

    def _broken(self, model: Model, error: Exception) -> None:
        _log.error("the model %s (%s) cannot compute: %s", model.manifest.id, model.digest, error)
        if model is not self._pipeline.model:  # a question that was asked before it went
            return
        self._errors += 1
        if self._probation or self._errors == _STREAK:
            self._fail(model, f"it cannot compute: {error}")

    def _sound(self, model: Model) -> None:
        if model is self._pipeline.model:
            self._errors = 0

    def _fail(self, model: Model, why: str) -> None:
        """Serve the model before at once, if it is loaded; the rest is not for this thread."""
        with self._swap:
            if model is not self._pipeline.model or any(each is model for each, _ in self._failures):
                return
            if self._before:
                self._serve(self._before)
            self._failures.append((model, why))

    def _serve(self, model: Model, probation: Probation | None = None, before: Model | None = None) -> None:
        self._pipeline.model, self._probation, self._before, self._errors = model, probation, before, 0
        self._untidy = True
        if probation is None:
            self._doubts = Doubts()

    # ------------------------------------------------------------ changes

    def activate(self, digest: str, by: str, *, force: bool = False, accept_older: bool = False) -> list[str]:
        """Serve a bundle of the store from the next frame on; return what the gate has found.

        Raises:
            RefusedError: the gate is against it; `force` overrules that.
            EdgeNodeError: it must not or cannot be served; nothing overrules that.
        """
        with self._turn:
            if self._pipeline.model.digest == digest:
                return ["it is served already"]
            try:
                return self._activate(digest, by, force=force, accept_older=accept_older)
            except EdgeNodeError as error:
                self.store.refused(digest, by, error.what)
                self._tell(f"the bundle {digest} is not served: {error.what}", digest, by)
                raise

    def _activate(self, digest: str, by: str, *, force: bool, accept_older: bool) -> list[str]:
        self._settle()
        self.check_bad(digest, force=force)
        running = self._pipeline.model
        doubts = self._probation.before if self._probation else self._doubts.share
        with self._admitted(digest, accept_older=accept_older) as (found, ends):
            model = Model.from_bundle(found, self._threads, ends)
            findings = [_signed(ends), *examine(model, running, self._sample.of(running), self._gate)]
            check_no_defect_class(self._pipeline.view, model.manifest.classes)
            texts = [each.text for each in findings]
            if against := [each.text for each in findings if not each.good and not force]:
                raise RefusedError(
                    "; ".join(against), f"to serve it all the same: edge-node bundle activate {digest} --force", texts
                )
            why = "" if all(each.good for each in findings) else "on purpose"
            # What a restart finds in the store must pass verification: the store learns of a newer bundle before the
            # verifier does, of an older one after the verifier has admitted it.
            if newer := model.manifest.version >= running.manifest.version:
                self.store.activated(digest, by, why, doubts=doubts)
        if not newer:
            self.store.activated(digest, by, why, doubts=doubts)
        state = self.store.state()
        with self._swap:
            if not state.trial:
                self._serve(model)
            else:
                before = self._before or (running if state.previous == running.digest else None)
                self._serve(model, Probation(self._gate, doubts), before)
        self._tell(f"{model.manifest.id} ({digest}) is served from now on", digest, by)
        return texts

    def roll_back(self, by: str) -> list[str]:
        """Serve the bundle before again, on purpose.

        EdgeNodeError when there is none, when it cannot be served, or lacks a class that the view names.
        """
        with self._turn:
            self._settle()
            state = self.store.state()
            if not state.previous:
                raise UsageError("there is no bundle to go back to", "edge-node bundle list shows what there is")
            with self._admitted(state.previous, accept_older=True) as (found, ends):
                model = Model.from_bundle(found, self._threads, ends)
                check_no_defect_class(self._pipeline.view, model.manifest.classes)
            self.store.rolled_back(by, "on purpose", failed=False)
            with self._swap:
                self._serve(model)
            self._tell(f"{model.manifest.id} ({model.digest}) is served again", model.digest, by)
            return [_signed(ends).text]

    def check_bad(self, digest: str, *, force: bool = False) -> None:
        """RefusedError for a bundle that has failed in service."""
        if (how := self.store.state().bad.get(digest)) and not force:
            raise RefusedError(
                f"the bundle {digest} has failed in service: {how}",
                f"to serve it all the same: edge-node bundle activate {digest} --force",
            )

    @contextmanager
    def _admitted(self, digest: str, *, accept_older: bool) -> "Iterator[tuple[bundle_format.Bundle, ExpiryDates]]":
        """A bundle of the store; the verifier remembers it when the block ends without an error."""
        folder = self.store.path(digest)
        if self._verifier is None:
            yield bundle_format.read_bundle(folder), UNCHECKED
        else:
            with self._verifier._replace(accept_older=accept_older).admit(folder) as found:
                yield found

    # ------------------------------------------------------------ in the thread of its own

    def _run(self, desk: RequestQueue) -> None:
        while not self._stop.wait(_TICK):
            if self._untidy:
                self._untidy = False
                native_memory.trim_heap()
            try:
                with self._turn:
                    self._settle()
                    self._confirm()
                for path, request in desk.requests():
                    desk.answer(path, self._answer(request))
            except Exception:  # a full disk must not end it
                _log.exception("what is served cannot be changed at the moment")

    def _answer(self, request: Request) -> Answer:
        try:
            if request.action == "rollback":
                findings = self.roll_back(request.by)
            else:
                findings = self.activate(
                    self.store.find(request.bundle), request.by, force=request.force, accept_older=request.accept_older
                )
        except Exception as error:
            explained = explain(error)
            found = explained.findings if isinstance(explained, RefusedError) else ()
            return Answer(done=False, text=explained.what, remedy=explained.remedy, findings=found)
        return Answer(done=True, text=f"{self._pipeline.model.manifest.id} is served", findings=tuple(findings))

    def _confirm(self) -> None:
        with self._swap:
            probation = self._probation
            if probation is None or not probation.passed:
                return
            self._probation, self._before, self._doubts = None, None, probation.doubts
        self.store.confirmed(_SELF)
        self._untidy = True

    def _settle(self) -> None:
        """Go back from a model that has failed."""
        while self._failures:
            model, why = self._failures[0]
            state = self.store.state()
            if model.digest == state.active and state.previous:
                self._go_back(model.digest, state.previous, why)
            elif model.digest == state.active:
                self._tell(
                    f"{model.manifest.id} ({model.digest}) fails, there is no other to serve: {why}", model.digest
                )
            self._failures.popleft()

    def _go_back(self, failed: str, previous: str, why: str) -> None:
        try:
            with self._admitted(previous, accept_older=True) as (found, ends):
                model = (
                    None if self._pipeline.model.digest == previous else Model.from_bundle(found, self._threads, ends)
                )
        except EdgeNodeError as error:
            self._stay(failed, previous, why, error)
            return
        self.store.rolled_back(_SELF, why, failed=True)
        with self._swap:
            if model:
                self._serve(model)
        served = self._pipeline.model
        text = f"the bundle {failed} has failed ({why}): {served.manifest.id} ({served.digest}) is served again"
        try:
            check_no_defect_class(self._pipeline.view, served.manifest.classes)
        except UsageError as error:  # a model that can compute is still better
            text += f", though {error.what}"
        self._tell(text, failed)

    def _stay(self, failed: str, previous: str, why: str, error: EdgeNodeError) -> None:
        """There is no way back: say so once, and do not try again."""
        self.store.kept(_SELF, f"{why}; {previous} cannot be served: {error.what}")
        with self._swap:
            self._probation, self._before = None, None
        served = self._pipeline.model
        self._tell(
            f"the bundle {failed} has failed ({why}), and the one before, {previous}, cannot be served: {error.what}; "
            f"{served.manifest.id} ({served.digest}) goes on",
            failed,
        )

    def _tell(self, text: str, digest: str, by: str = _SELF) -> None:
        _log.warning("%s", text)
        details: dict[str, float | str] = {"bundle": digest, "by": by, "serving": self._pipeline.model.digest}
        self._pipeline.outbox.put(Notice(kind="model", text=text, time=current_time(), details=details, id=new_id()))


def _signed(ends: ExpiryDates) -> Finding:
    text = "no signature was looked at (no --trust)" if ends is UNCHECKED else "its signature is right"
    return Finding(True, f"{text}, and its golden image comes out as promised")
