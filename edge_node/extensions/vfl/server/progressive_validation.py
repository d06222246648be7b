"""Progressive validation (test-then-train):
how well new products are judged before anybody learns from them.
"""

from collections import deque
from math import inf, isfinite, log, sqrt
from statistics import median

import torch
from torch import Tensor

from broker_config.protocol.messages import Validation
from edge.terminal.formatting import format_validation
from edge_node.extensions.vfl.messages import VflSpec

_NEWEST = 1000  # products that the score is of
_PATIENCE = 3000  # products after which a run can be said to have learnt nothing
_AT_THE_END = 500  # likewise, of a run that ends
# products of other classes than the most frequent one, without which nothing can be said
_LEAST_OTHERS = 20
_LATELY = 10  # rounds whose median loss says that steps are too large
_HIGH_LOSS = 1.5  # times that of guessing
_POOR_RECALL = 1.1  # times that of guessing


class ProgressiveValidation:
    """The score of a run's newest products (Blum, Kalai and Langford 1999),
    and whether the run is of any use.
    """

    def __init__(self, spec: VflSpec):
        self._guessing = log(len(spec.classes))  # loss
        self._values = (
            torch.tensor([float(name) for name in spec.classes])
            if spec.reading == "expectation"
            else None
        )
        self._labels = torch.empty(0, dtype=torch.int64)
        self._answers = torch.empty(0)
        self._losses: deque[float] = deque(maxlen=_LATELY)
        self._count = 0  # products that were ever added
        self._reported = set[str]()

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take products [N] that the model has not learnt from: its logits [N, classes],
        and their classes.
        """
        answers = (
            logits.argmax(1).float() if self._values is None else logits.softmax(1) @ self._values
        )
        self._labels = torch.cat([self._labels, labels])[-_NEWEST:]
        self._answers = torch.cat([self._answers, answers])[-_NEWEST:]
        self._count += len(labels)

    def score(self) -> Validation | None:
        """That of the newest products; None if there are none."""
        labels = self._labels
        answers = self._answers
        count = len(self._labels)
        if not count:
            return None
        if self._values is not None:
            truth = self._values[labels]
            error = (answers - truth).square().mean().sqrt().item()
            spread = truth.std(correction=0).item()
            return Validation(products=count, rmse=error, baseline=spread)
        right = (answers == labels).double()
        counts = torch.bincount(labels)
        recalls = (torch.bincount(labels, right) / counts)[counts > 0]
        return Validation(
            products=count,
            accuracy=right.mean().item(),
            recall=recalls.mean().item(),
            baseline=counts.max().item() / count,
        )

    def find_trouble(self, loss: float, score: Validation | None, *, ended: bool) -> str:
        """What is wrong with a run whose newest round had this `loss` and `score`,
        when it is first seen; else ''.
        """
        finite_loss = loss if isfinite(loss) else inf
        self._losses.append(finite_loss)
        if len(self._losses) == _LATELY and median(self._losses) > _HIGH_LOSS * self._guessing:
            return self._report_once(
                "loss",
                f"the loss, {loss:.3g}, is far above {self._guessing:.3g}, that of guessing: "
                "steps are too large. Begin another run (--new) with a smaller --eta or fewer "
                "--iterations",
            )
        patience = _AT_THE_END if ended else _PATIENCE
        if score and self._count >= patience and self._is_useless(score):
            return self._report_once(
                "score",
                f"nothing of use is learnt yet: {format_validation(score)}. If the loss still "
                "falls a smaller --chunk gives more rounds, else a smaller --eta may help; and "
                "the readings must tell the classes apart",
            )
        return ""

    def _is_useless(self, score: Validation) -> bool:
        """Whether always saying the same would be as good, as far as so many products can tell."""
        counts = torch.bincount(self._labels)
        if len(self._labels) - counts.max() < _LEAST_OTHERS:
            return False
        if score.rmse is not None:
            return score.rmse >= score.baseline
        chance = sqrt(score.baseline * (1 - score.baseline) / score.products)
        accuracy = score.accuracy or 0.0
        recall = score.recall or 0.0
        classes = int(counts.count_nonzero())
        return accuracy <= score.baseline + chance and recall < _POOR_RECALL / classes

    def _report_once(self, what: str, text: str) -> str:
        if what in self._reported:
            return ""
        self._reported.add(what)
        return text
