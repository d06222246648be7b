"""Rollout of models on a line: admission tests, activation between two frames,
probation, rollback of a failing one.
"""

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
from edge.inference.model_trial import ModelTrial
from edge.inference.outcomes import Notice, Verdict, current_time, new_id
from edge.inference.pipeline import Inspection, Pipeline, check_class_names
from edge.inference.served_model import Model, load_model
from edge.registry.bundle_store import DIGITS, BundleStore, State
from edge.registry.control_requests import Answer, Request, RequestQueue
from edge.registry.pre_rollout_checks import (
    Finding,
    Gate,
    Sample,
    assess_candidate,
    inputs_for,
)
from edge.registry.probation import DoubtfulShare, Probation
from edge.uncertainty.model_warnings import log_model_warnings

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

STARTS = 3  # of a daemon with a model on probation, after which the model counts as failed
_STREAK = 3  # errors in a row of a model that has passed its probation
_TICK = 0.2  # seconds between two checks for requests
_SELF = "the line"

_log = logging.getLogger(__name__)


class RefusedError(UsageError):
    """A bundle that the line does not accept; `findings` are the results of the tests so far."""

    def __init__(self, what: str, remedy: str, findings: Sequence[str] = ()) -> None:
        super().__init__(what, remedy)
        self.findings = tuple(findings)


class Rollout:
    """Decides which model a line serves.

    A monitor of the pipeline; slow work is done in its own thread.

    Each change is recorded in the store before the pipeline makes it, so that a restart serves the
    same model.
    """

    def __init__(
        self,
        store: BundleStore,
        gate: Gate,
        verifier: "Verifier | None" = None,
        threads: int = 0,
        trial: ModelTrial | None = None,
    ) -> None:
        self.store = store
        self.gate = gate  # assign another one to test the next bundle by it
        self._verifier = verifier
        self._threads = threads
        self._sample = Sample()
        self._doubtful = DoubtfulShare()
        self._probation: Probation | None = None
        # the predecessor, kept loaded while the new one is on probation
        self._before: Model | None = None
        self._errors = 0
        self._should_trim = False  # a model was, or is about to be, released
        self._failures: deque[tuple[Model, str]] = deque()  # models that failed, not recorded yet
        self._change_lock = threading.Lock()  # held for a whole change, which takes seconds
        self._swap_lock = threading.Lock()  # held for the assignment itself
        self._stop = threading.Event()
        self._trial = trial or ModelTrial()

    # ------------------------------------------------------------ start and end

    def load_first(self, folder: Path | None) -> Model:
        """The model to serve first: of the bundle in `folder`, which the store gets,
        or else of the active bundle.

        The same command as before goes on with the active bundle, which may have been activated
        since. Raises EdgeNodeError when it cannot be served, as `load_model` does.
        """
        if folder is None or self._goes_on(folder):
            return self._load_active()
        model = load_model(folder, self._verifier, self._threads, self._try_once)
        self.store.add(folder, "edge-node serve", model.digest)
        state = self.store.state()
        if state.active != model.digest:
            self.store.record_activation(model.digest, "edge-node serve", trial=False)
        elif state.trial:
            self._resume_probation(state)
        if state.named != model.digest:
            self.store.record_named(model.digest)
        return model

    def _try_once(self, bundle: bundle_format.Bundle) -> None:
        """Try a bundle with which the line begins, unless it was tried here before."""
        if bundle.digest not in self.store.state().tried:
            self._trial.check(bundle)
            self.store.record_trial(bundle.digest)

    def _goes_on(self, folder: Path) -> bool:
        """Whether the bundle in `folder` was served before,
        and another one took its place since.
        """
        if self._verifier and self._verifier.accept_older:
            return False
        state = self.store.state()
        digest = bundle_format.read_digest(folder)
        if not state.active:
            state = self._find_newest(digest)
        if not (state.named and digest.startswith(state.named)) or state.active in (
            "",
            state.named,
        ):
            return False
        _log.warning(
            "%s was served before: the line goes on with %s, which was activated since; "
            "to go back: edge-node bundle activate %s",
            folder,
            state.active,
            state.named,
        )
        return True

    def _find_newest(self, named: str) -> State:
        """The state, where its file was lost: the newest bundle that the verifier has accepted
        is the active one.
        """
        newest = self._verifier.newest[:DIGITS] if self._verifier else ""
        if (
            not newest
            or newest not in self.store.digests()
            or named[:DIGITS] not in self.store.digests()
        ):
            return State()
        self.store.record_named(named[:DIGITS])
        return self.store.record_activation(
            newest, _SELF, "which one was active was lost", trial=False
        )

    def _load_active(self) -> Model:
        state = self.store.state()
        candidates = [(each, self._verifier) for each in (state.active, state.previous) if each]
        if died := state.trial >= STARTS and state.previous != "":
            candidates = [
                (state.previous, self._verifier and self._verifier._replace(accept_older=True))
            ]
        if not candidates:
            raise UsageError(
                f"there is no bundle in {self.store.folder} to serve",
                "name one: edge-node serve BUNDLE",
            )
        for digest, verifier in candidates:
            try:
                folder = self.store.path(digest)
                model = load_model(folder, verifier, self._threads, self._try_once)
            except EdgeNodeError as error:
                if digest == candidates[-1][0]:
                    raise
                _log.error(
                    "the bundle %s cannot be served, the one before it is tried: %s", digest, error
                )
            else:
                break
        if model.digest != state.active:
            why = (
                f"the daemon died {STARTS} times while it was on probation"
                if died
                else "it could not be loaded"
            )
            self.store.record_rollback(_SELF, why, failed=died)
        elif state.trial:
            self._resume_probation(state)
        return model

    def _resume_probation(self, state: State) -> None:
        self.store.record_start(state.trial + 1)
        self._probation = Probation(self.gate, state.doubts)

    @contextmanager
    def manage(self, pipeline: Pipeline) -> Iterator[None]:
        """Manage the model of this pipeline, which has us as its last monitor."""
        self._pipeline = pipeline
        pipeline.on_model_error = self._count_error
        pipeline.on_model_success = self._reset_errors
        thread = threading.Thread(
            target=self._run, args=(RequestQueue(self.store.folder),), name="rollout", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._trial.stop()
            thread.join()
            if self._probation:
                self.store.record_start(1)  # this start did not end in a crash

    # ------------------------------------------------------------ in the pipeline's worker thread

    def __call__(self, inspection: Inspection) -> Verdict:
        """Observe the model."""
        if inspection.model is self._pipeline.model:
            self._sample.add(inspection)
            if self._probation is None:
                self._doubtful.count(inspection)
            elif why := self._probation.count(inspection):
                self._fail(inspection.model, why)
        return inspection.verdict

    def _count_error(self, model: Model, error: Exception) -> None:
        _log.error("the model %s (%s) cannot compute: %s", model.manifest.id, model.digest, error)
        if model is not self._pipeline.model:  # a request from before it was replaced
            return
        self._errors += 1
        if self._probation or self._errors == _STREAK:
            self._fail(model, f"it cannot compute: {error}")

    def _reset_errors(self, model: Model) -> None:
        if model is self._pipeline.model:
            self._errors = 0

    def _fail(self, model: Model, why: str) -> None:
        """Serve the predecessor at once, if it is loaded; our own thread does the rest."""
        with self._swap_lock:
            if model is not self._pipeline.model or any(
                each is model for each, _ in self._failures
            ):
                return
            if self._before:
                self._serve(self._before)
            self._failures.append((model, why))

    def _serve(
        self, model: Model, probation: Probation | None = None, before: Model | None = None
    ) -> None:
        self._pipeline.model = model
        self._probation = probation
        self._before = before
        self._errors = 0
        self._should_trim = True
        if probation is None:
            self._doubtful = DoubtfulShare()

    # ------------------------------------------------------------ changes

    def activate(
        self, digest: str, by: str, *, force: bool = False, accept_older: bool = False
    ) -> list[str]:
        """Serve a bundle of the store from the next frame on;
        returns the results of the admission tests.

        Raises:
            RefusedError: it fails an admission test; `force` overrules that.
            EdgeNodeError: it must not or cannot be served; nothing overrules that.
        """
        with self._change_lock:
            if self._pipeline.model.digest == digest:
                return ["it is served already"]
            try:
                return self._activate(digest, by, force=force, accept_older=accept_older)
            except EdgeNodeError as error:
                self.store.record_refusal(digest, by, error.what)
                self._notify(f"the bundle {digest} is not served: {error.what}", digest, by)
                raise

    def _activate(self, digest: str, by: str, *, force: bool, accept_older: bool) -> list[str]:
        self._handle_failures()
        self.check_bad(digest, force=force)
        running = self._pipeline.model
        doubts = self._probation.before if self._probation else self._doubtful.value
        with self._verified(digest, accept_older=accept_older) as (found, expiry_dates):
            sample = self._sample.inputs_of(running)
            tried = self._trial.check(found, inputs_for(found.manifest, sample))
            self.store.record_trial(found.digest)
            model = Model.from_bundle(found, self._threads, expiry_dates)
            findings = [
                _signature_finding(expiry_dates),
                # what it has not computed in its trial it shall not compute here either
                *assess_candidate(model, running, sample[:tried], self.gate, self._stop),
            ]
            self._check_class_names(model)
            texts = [each.text for each in findings]
            if against := [each.text for each in findings if not each.good and not force]:
                raise RefusedError(
                    "; ".join(against),
                    self.store.force_command(digest),
                    texts,
                )
            why = "" if all(each.good for each in findings) else "on purpose"
            # What a restart finds in the store must pass verification: the store learns of a newer
            # bundle before the verifier does, of an older one after the verifier has admitted it.
            if newer := model.manifest.version >= running.manifest.version:
                self.store.record_activation(digest, by, why, doubts=doubts)
        if not newer:
            self.store.record_activation(digest, by, why, doubts=doubts)
        state = self.store.state()
        with self._swap_lock:
            if not state.trial:
                self._serve(model)
            else:
                before = self._before
                if before is None and state.previous == running.digest:
                    before = running
                self._serve(model, Probation(self.gate, doubts), before)
        self._notify(f"{model.manifest.id} ({digest}) is served from now on", digest, by)
        self._log_model_warnings()
        return texts

    def roll_back(self, by: str) -> list[str]:
        """Serve the previous bundle again, on purpose.

        EdgeNodeError when there is none, or it cannot be served, or lacks a class that the settings
        name.
        """
        with self._change_lock:
            self._handle_failures()
            state = self.store.state()
            if not state.previous:
                raise UsageError(
                    "there is no bundle to go back to", "edge-node bundle list shows what there is"
                )
            with self._verified(state.previous, accept_older=True) as (found, expiry_dates):
                model = Model.from_bundle(found, self._threads, expiry_dates)
                self._check_class_names(model)
            self.store.record_rollback(by, "on purpose", failed=False)
            with self._swap_lock:
                self._serve(model)
            self._notify(f"{model.manifest.id} ({model.digest}) is served again", model.digest, by)
            self._log_model_warnings()
            return [_signature_finding(expiry_dates).text]

    def _check_class_names(self, model: Model) -> None:
        check_class_names(self._pipeline.view, self._pipeline.prior, model.manifest.classes)

    def check_bad(self, digest: str, *, force: bool = False) -> None:
        """RefusedError for a bundle that has failed in service."""
        if (how := self.store.state().bad.get(digest)) and not force:
            raise RefusedError(
                f"the bundle {digest} has failed in service: {how}",
                self.store.force_command(digest),
            )

    @contextmanager
    def _verified(
        self, digest: str, *, accept_older: bool
    ) -> "Iterator[tuple[bundle_format.Bundle, ExpiryDates]]":
        """A verified bundle of the store; the verifier remembers it when the block ends without
        an error.
        """
        folder = self.store.path(digest)
        if self._verifier is None:
            yield bundle_format.read_bundle(folder), UNCHECKED
        else:
            with self._verifier._replace(accept_older=accept_older).admit(folder) as found:
                yield found

    # ------------------------------------------------------------ in its own thread

    def _run(self, queue: RequestQueue) -> None:
        while not self._stop.wait(_TICK):
            if self._should_trim:
                self._should_trim = False
                native_memory.trim_heap()
            try:
                with self._change_lock:
                    self._handle_failures()
                    self._confirm()
                for path, request in queue.pending():
                    queue.respond(path, self._answer(request))
            except Exception:  # a full disk must not end the thread
                _log.exception("what is served cannot be changed at the moment")

    def _answer(self, request: Request) -> Answer:
        try:
            if request.action == "rollback":
                findings = self.roll_back(request.by)
            else:
                findings = self.activate(
                    self.store.resolve(request.bundle),
                    request.by,
                    force=request.force,
                    accept_older=request.accept_older,
                )
        except Exception as error:
            explained = explain(error)
            found = explained.findings if isinstance(explained, RefusedError) else ()
            return Answer(done=False, text=explained.what, remedy=explained.remedy, findings=found)
        return Answer(
            done=True,
            text=f"{self._pipeline.model.manifest.id} is served",
            findings=tuple(findings),
        )

    def _confirm(self) -> None:
        with self._swap_lock:
            probation = self._probation
            if probation is None or not probation.is_passed:
                return
            self._probation = None
            self._before = None
            self._doubtful = probation.doubtful
        self.store.record_confirmation(_SELF)
        self._should_trim = True

    def _handle_failures(self) -> None:
        """Roll back models that have failed."""
        while self._failures:
            model, why = self._failures[0]
            state = self.store.state()
            if model.digest == state.active and state.previous:
                self._go_back(model.digest, state.previous, why)
            elif model.digest == state.active:
                self._notify(
                    f"{model.manifest.id} ({model.digest}) fails, there is no other to serve: "
                    f"{why}",
                    model.digest,
                )
            self._failures.popleft()

    def _go_back(self, failed: str, previous: str, why: str) -> None:
        try:
            with self._verified(previous, accept_older=True) as (found, expiry_dates):
                model = (
                    None
                    if self._pipeline.model.digest == previous
                    else Model.from_bundle(found, self._threads, expiry_dates)
                )
        except EdgeNodeError as error:
            self._keep_failed(failed, previous, why, error)
            return
        self.store.record_rollback(_SELF, why, failed=True)
        with self._swap_lock:
            if model:
                self._serve(model)
        served = self._pipeline.model
        text = (
            f"the bundle {failed} has failed ({why}): {served.manifest.id} ({served.digest}) is "
            "served again"
        )
        try:
            self._check_class_names(served)
        except UsageError as error:  # a model that can compute is still better
            text += f", though {error.what}"
        self._notify(text, failed)
        self._log_model_warnings()

    def _keep_failed(self, failed: str, previous: str, why: str, error: EdgeNodeError) -> None:
        """Keep a failed model, since the previous one cannot be served: report it once,
        and do not try again.
        """
        self.store.record_kept(_SELF, f"{why}; {previous} cannot be served: {error.what}")
        with self._swap_lock:
            self._probation = None
            self._before = None
        served = self._pipeline.model
        self._notify(
            f"the bundle {failed} has failed ({why}), and the one before, {previous}, cannot be "
            f"served: {error.what}; {served.manifest.id} ({served.digest}) goes on",
            failed,
        )

    def _log_model_warnings(self) -> None:
        """Log what there is to warn of in the model that is served now, where another was."""
        pipeline = self._pipeline
        log_model_warnings(pipeline.model.manifest, pipeline.view, pipeline.prior)

    def _notify(self, text: str, digest: str, by: str = _SELF) -> None:
        _log.warning("%s", text)
        head = self.store.head
        record = head.digest if head else ""
        details: dict[str, float | str] = {
            "bundle": digest,
            "by": by,
            "serving": self._pipeline.model.digest,
            "record": record,
        }
        self._pipeline.outcomes.put(
            Notice(kind="model", text=text, time=current_time(), details=details, id=new_id())
        )


def _signature_finding(expiry_dates: ExpiryDates) -> Finding:
    text = (
        "no signature was looked at (no --trust)"
        if expiry_dates is UNCHECKED
        else "its signature is right"
    )
    return Finding(True, f"{text}, and its golden image comes out as promised")
