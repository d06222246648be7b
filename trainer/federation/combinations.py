"""Table of what does not combine in a federation.

A row names two features and why they exclude each other. A request is checked by the rows before a
run begins, and each node checks the spec that it is sent. `tests/test_combinations.py` tries every
row, and makes the table in docs/combinations.md of them.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec, Training
from trainer.federation.server.robust_rules import RULES
from trainer.methods.base import MODEL, Method, Phase, weigh_by_images
from trainer.models.named_tensors import Arrays


class Wanted(NamedTuple):
    """A federation that a user asks for, or that a spec describes."""

    name: str  # of the method
    method: Method
    first: Arrays  # the first broadcast; names alone count
    training: Training
    rule: str | None = None  # None: what suits the method
    liars: int = 0
    codec: str | None = "none"  # None: what suits the method
    masked: bool = False
    private: bool = False
    sample: int = 0
    head: str = "trained"
    auto: bool = False  # the run only compares encoders
    model: str = ""  # that a user has named
    given: Collection[str] = ()  # settings of training that a user has named
    telemetry: bool = False  # a plant's own, as is the next
    preview: bool = False


class Feature(NamedTuple):
    """Something that can be wanted.

    `find` returns it as it was written, and an empty text where it is not wanted.
    """

    title: str
    find: Callable[[Wanted], str]


class Exclusion(NamedTuple):
    """Two features that do not combine.

    A method can know the reason better than the table: then `detail` returns it.
    """

    one: Feature
    other: Feature
    because: str
    remedy: str
    detail: Callable[[Wanted], str] = lambda _: ""


def check(wanted: Wanted, rows: tuple[Exclusion, ...]) -> None:
    """Check that all that is wanted combines, by these rows of the table.

    Raises:
        UsageError: two features do not.
    """
    for row in rows:
        one = row.one.find(wanted)
        other = row.other.find(wanted)
        if one and other:
            because = row.detail(wanted) or row.because
            raise UsageError(f"{one} does not combine with {other}: {because}", row.remedy)


def of_spec(spec: Spec, method: Method, first: Arrays) -> Wanted:
    """Return what a spec describes; `method` is its, and `first` its first broadcast."""
    return Wanted(
        spec.method,
        method,
        first,
        spec.training,
        rule=spec.aggregation.rule,
        liars=spec.aggregation.liars * (spec.aggregation.rule in RULES),
        codec=spec.codec,
        masked=bool(spec.mask_threshold),
        private=spec.privacy is not None,
        sample=spec.sample,
        head=spec.head,
        auto=spec.chooses,
    )


def sends_changes(method: Method, first: Arrays) -> bool:
    """Whether nodes send what differs little from the broadcast."""
    return bool(method.sends(first)) and not method.only_mean


# Features


def _method_that(holds: Callable[[Wanted], object]) -> Callable[[Wanted], str]:
    return lambda wanted: wanted.name * bool(holds(wanted))


def _phases_that(holds: Callable[[Phase], object]) -> Callable[[Wanted], str]:
    return _method_that(lambda wanted: any(map(holds, wanted.method.train)))


def _looks_twice(phase: Phase) -> bool:
    return (
        len(phase.steps) > 1
        or phase.uses_reference
        or phase.draws
        or phase.share != 1
        or phase.is_settled is not None
    )


def _keeps_own_encoder(wanted: Wanted) -> bool:
    return "encoder" not in wanted.method.sends(wanted.first)


def _weighs_by_loss(wanted: Wanted) -> bool:
    return bool(wanted.method.train) and wanted.method.weigh is not weigh_by_images


def _learns_batch_statistics(wanted: Wanted) -> bool:
    if not wanted.method.train or wanted.training.batch_norm != "train":
        return False
    return any(name.endswith("running_var") for name in wanted.first)


MASKS = Feature("`--secure-aggregation`", lambda wanted: "--secure-aggregation" * wanted.masked)
PRIVACY = Feature("`--privacy`", lambda wanted: "--privacy" * wanted.private)
SAMPLE = Feature("`--sample`", lambda wanted: "--sample" * bool(wanted.sample))
CODEC = Feature(
    "`--codec` other than `none`",
    lambda wanted: f"--codec {wanted.codec}" * (wanted.codec not in (None, "none")),
)
RULE = Feature(
    "`--aggregate` other than `mean`",
    lambda wanted: f"--aggregate {wanted.rule}" * (wanted.rule not in (None, "mean")),
)
ROBUST_RULE = Feature(
    "`--aggregate multi_krum`",
    lambda wanted: f"--aggregate {wanted.rule}" * (wanted.rule in RULES),
)
LIARS = Feature("`--liars`", lambda wanted: "--liars" * bool(wanted.liars))
NO_ROBUST_RULE = Feature(
    "`--aggregate` other than `multi_krum`",
    lambda wanted: f"--aggregate {wanted.rule or 'clipped_mean'}" * (wanted.rule not in RULES),
)
STATISTICS_HEAD = Feature(
    "`--head statistics`", lambda wanted: "--head statistics" * (wanted.head == "statistics")
)
BATCH_STATISTICS = Feature(
    "`--training batch_norm=train`",
    lambda wanted: "--training batch_norm=train" * _learns_batch_statistics(wanted),
)

AUTO = Feature("`--weights auto`", lambda wanted: "--weights auto" * wanted.auto)
NAMED_MODEL = Feature("`--model`", lambda wanted: f"--model {wanted.model}" * bool(wanted.model))
TELEMETRY = Feature("`--telemetry`", lambda wanted: "--telemetry" * wanted.telemetry)
PREVIEW = Feature("`edge-node preview`", lambda wanted: "edge-node preview" * wanted.preview)
SGD = Feature(
    "`--training optimizer=sgd`",
    lambda wanted: "--training optimizer=sgd" * (wanted.training.optimizer == "sgd"),
)
MOMENTS = Feature(
    "`--training moments`", lambda wanted: "--training moments" * ("moments" in wanted.given)
)
OPTIMISER = Feature(
    "`--training` `learning_rate`, `moments` or `optimizer`",
    lambda wanted: "".join(
        f"--training {name}"
        for name in ("learning_rate", "moments", "optimizer")
        if name in wanted.given
    ),
)

SUMS = Feature("sums of statistics", _method_that(lambda wanted: wanted.method.statistics))
RELAY = Feature("a method whose nodes relay", _method_that(lambda wanted: wanted.method.relay))
NO_SMALL_CHANGES = Feature(
    "a method that trains, and sends no small changes of the broadcast",
    _method_that(
        lambda wanted: wanted.method.train and not sends_changes(wanted.method, wanted.first)
    ),
)
NO_CODED_CHANGES = Feature(
    "a method that sends something else than small changes of the broadcast",
    _method_that(
        lambda wanted: (
            wanted.method.sends(wanted.first) and not sends_changes(wanted.method, wanted.first)
        )
    ),
)
ONLY_MEAN = Feature(
    "a method that takes the mean alone", _method_that(lambda wanted: wanted.method.only_mean)
)
UNMASKABLE = Feature(
    "a method that weighs by what a node has measured",
    _method_that(lambda wanted: wanted.method.unmaskable),
)
OWN_ENCODER = Feature(
    "a method whose nodes share no whole encoder", _method_that(_keeps_own_encoder)
)
SENDS_NOTHING = Feature(
    "a method that sends nothing",
    _method_that(
        lambda wanted: not wanted.method.sends(wanted.first) and not wanted.method.statistics
    ),
)
ADAPTS = Feature(
    "a method that sends what nodes make of features",
    _method_that(lambda wanted: wanted.method.adapt),
)
SENDS_MORE = Feature(
    "a method that sends more than its model",
    _method_that(lambda wanted: wanted.method.train and wanted.method.only_mean),
)
WEIGHS_BY_LOSS = Feature("a method that weighs nodes by a loss", _method_that(_weighs_by_loss))
REFINES = Feature(
    "a method that trains on after it has contributed",
    _method_that(lambda wanted: wanted.method.train and wanted.method.refine),
)
LOOKS_TWICE = Feature(
    "a method that sees images in more than one gradient a step", _phases_that(_looks_twice)
)

OWN_MODEL = Feature(
    "a method with models of its own",
    _method_that(lambda wanted: wanted.method.model != MODEL),
)
OWN_SGD = Feature(
    "a method that trains with SGD of its own",
    _method_that(
        lambda wanted: (
            (phases := wanted.method.train + wanted.method.refine)
            and all(phase.sgd for phase in phases)
        )
    ),
)

_WITHOUT_PRIVACY = (
    "leave out --privacy, or take another --method: docs/security.md tells which can be private"
)
_WITHOUT_MASKS = "leave out --secure-aggregation, or take another --method"
_LEAVE_OUT_ONE = "leave out one of them"

_LET_SIMULATE_CHOOSE = (
    "let edge-node simulate --weights auto choose with images of your own, and name --model, "
    "--weights and --size here"
)

CHOICES = (
    Exclusion(AUTO, MASKS, "the coordinator reads each plant's loss", _LET_SIMULATE_CHOOSE),
    Exclusion(
        AUTO,
        PRIVACY,
        "losses are told without noise, and what each encoder tells of an image would have to be "
        "accounted for",
        _LET_SIMULATE_CHOOSE,
    ),
    Exclusion(AUTO, NAMED_MODEL, "it chooses the model", _LEAVE_OUT_ONE),
    Exclusion(
        AUTO, OWN_MODEL, "it chooses among models that this method does not take", _LEAVE_OUT_ONE
    ),
)
"""Of a run that compares encoders."""

WITHOUT_EFFECT = (
    Exclusion(
        OWN_SGD,
        OPTIMISER,
        "there is nothing for it to act on",
        "leave out --training; SGD's step is --option rate=NUMBER",
    ),
    Exclusion(
        SGD,
        MOMENTS,
        "SGD keeps nothing from round to round",
        "leave out --training moments, or take optimizer=adam",
    ),
)
"""Of settings that a user has named: a program may pass them to any method."""

FIGURES = (
    Exclusion(
        PRIVACY, TELEMETRY, "no noise hides images in these figures", "leave out --telemetry"
    ),
    Exclusion(
        PRIVACY,
        PREVIEW,
        "no noise hides images in what it tells",
        "join instead: edge-node join",
    ),
)
"""Of what a plant wants to be told."""

EXCLUSIONS = (
    Exclusion(
        MASKS, RULE, "of masked contributions nothing but their sum can be read", _LEAVE_OUT_ONE
    ),
    Exclusion(MASKS, CODEC, "behind masks all numbers are as random ones", _LEAVE_OUT_ONE),
    Exclusion(
        MASKS,
        SAMPLE,
        "two sums that differ by few nodes would tell what these have sent",
        _LEAVE_OUT_ONE,
    ),
    Exclusion(
        MASKS,
        PRIVACY,
        "masked statistics tell which classes a plant has, which privacy hides",
        _LEAVE_OUT_ONE,
    ),
    Exclusion(MASKS, RELAY, "what nodes relay has no sum", _WITHOUT_MASKS),
    Exclusion(
        MASKS,
        NO_SMALL_CHANGES,
        "masked sums are of small changes of the broadcast",
        _WITHOUT_MASKS,
    ),
    Exclusion(
        MASKS,
        UNMASKABLE,
        "the coordinator has to read each node's weight",
        _WITHOUT_MASKS,
        lambda wanted: wanted.method.unmaskable,
    ),
    Exclusion(
        LIARS,
        NO_ROBUST_RULE,
        "it counts no liars",
        "leave out --liars, or take --aggregate multi_krum",
    ),
    Exclusion(
        ROBUST_RULE,
        SUMS,
        "nodes have different classes, so their sums are not alike",
        "leave out --aggregate: each node's sums are checked and bounded by themselves",
    ),
    Exclusion(
        RULE,
        ONLY_MEAN,
        "what it sends must be averaged as it is",
        "leave out --aggregate, or take another --method",
        lambda wanted: wanted.method.only_mean,
    ),
    Exclusion(
        CODEC,
        NO_CODED_CHANGES,
        "a codec codes small changes of the broadcast",
        "leave out --codec, or take another --method",
    ),
    Exclusion(
        STATISTICS_HEAD,
        OWN_ENCODER,
        "features of different encoders cannot be summed",
        "leave out --head, or take another --method",
    ),
    Exclusion(PRIVACY, SENDS_NOTHING, "nothing leaves its nodes", _WITHOUT_PRIVACY),
    Exclusion(
        PRIVACY, RELAY, "nodes pass pieces of what they see on to one another", _WITHOUT_PRIVACY
    ),
    Exclusion(
        PRIVACY, ADAPTS, "no noise hides an image in what is made of features", _WITHOUT_PRIVACY
    ),
    Exclusion(
        PRIVACY,
        SENDS_MORE,
        "noise is only in the model that gradients have trained",
        _WITHOUT_PRIVACY,
    ),
    Exclusion(PRIVACY, WEIGHS_BY_LOSS, "a loss tells of images, without noise", _WITHOUT_PRIVACY),
    Exclusion(
        PRIVACY,
        REFINES,
        "the account counts the steps before a contribution alone",
        _WITHOUT_PRIVACY,
    ),
    Exclusion(
        PRIVACY,
        LOOKS_TWICE,
        "the account counts one noisy gradient a step",
        _WITHOUT_PRIVACY,
    ),
    Exclusion(
        PRIVACY,
        BATCH_STATISTICS,
        "in BatchNorm what one image does depends on the others, and the statistics of a batch "
        "leave the node without noise",
        "take --training batch_norm=eval, with weights that are pretrained",
    ),
)
"""Of a federation."""

OF_RUNS = (*EXCLUSIONS, *CHOICES)
ROWS = (*OF_RUNS, *WITHOUT_EFFECT, *FIGURES)
