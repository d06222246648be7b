"""Drafting of a federation: the spec and the first broadcast, from what a user asks for."""

import importlib.metadata
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, encode
from broker_config.protocol.errors import UsageError, suggest
from broker_config.protocol.messages import (
    REVISION,
    Aggregation,
    Codec,
    Encryption,
    Head,
    Option,
    Preprocessing,
    Rule,
    Spec,
    TensorSpec,
    Training,
)
from broker_config.protocol.names import check_class_name
from trainer.data.class_names import find_fault
from trainer.federation import masking, update_codec
from trainer.federation.combinations import (
    CHOICES,
    EXCLUSIONS,
    WITHOUT_EFFECT,
    Wanted,
    check,
    sends_changes,
)
from trainer.federation.masking import grid
from trainer.federation.server.aggregation import scale_for
from trainer.federation.server.robust_rules import RULES
from trainer.methods import RECOMMENDED, complete_options, make
from trainer.methods.base import MODEL, Method, Phase, sent_tensors
from trainer.methods.statistics_head import add_candidates, list_encoders
from trainer.models.catalogue import DEFAULT_SIZE, FEATURES, ONLY_SIZE
from trainer.models.initial_weights import Shape, choose_weights, initial_encoder
from trainer.models.named_tensors import Arrays
from trainer.option_values import allowed
from trainer.seeding import generator
from trainer.training.privacy_plan import make_privacy


class Request(NamedTuple):
    """Settings that a user asks for, apart from participation. `draft` fills in empty values."""

    method: str = RECOMMENDED
    options: Mapping[str, Option | str] = {}  # of the method
    model: str = MODEL
    weights: str = ""  # none, surface, imagenet or a file; by default as `choose_weights` says
    size: int = 0  # pixels; by default what suits the model
    # fields of Training that differ from `suited_training`
    training: Mapping[str, Option | str] = {}
    # of training; by default as `trainer.methods` says, or none where nothing is trained
    rounds: int = 0
    seed: int = 0
    threads: int = 1
    head: Head = "trained"
    # by default clipped_mean, or mean where the method takes no other rule
    aggregate: Rule | None = None
    liars: int = 0  # lying nodes that multi_krum allows for; by default 1
    codec: Codec | None = "none"  # None: int4, or none where the method takes no other
    # whether contributions are masked, so that only their sum can be read
    secure_aggregation: bool = False
    # of each image: epsilon, or noise and sums, and clip; empty: none
    privacy: Mapping[str, str] = {}


class Participation(NamedTuple):
    """Numbers of nodes and waiting times with which rounds open and close.

    Zeros stand for the defaults.
    """

    # contributions that a round needs to close; by default those of all nodes that take part
    quorum: int = 0
    sample: int = 0  # nodes drawn for each round; by default all
    deadline: float = (
        # seconds after which a quorum closes a round; by default it waits for all nodes that are
        # present
        0.0
    )


def suited_training(weights: str, optimizer: str = "adam") -> Training:
    """Training settings for these initial weights, as trials on the tuning images suggest.

    Pretrained weights need a small step, and keep their BatchNorm statistics: a handful of images
    gives worse ones. SGD takes larger steps than Adam.
    """
    suited = Training() if weights == "none" else Training(learning_rate=3e-4, batch_norm="eval")
    return suited if optimizer != "sgd" else msgspec.structs.replace(suited, learning_rate=0.01)


def check_training(request: Request) -> None:
    """Check that each setting that a user has given has an effect.

    Raises:
        UsageError: a setting of Adam where SGD trains, or an unknown method or option.
    """
    method = _make(request.method, request.options)
    training = _training(request.weights or "none", request.training)
    wanted = Wanted(request.method, method, {}, training, given=request.training)
    check(wanted, WITHOUT_EFFECT)


def check_choice(request: Request, model: str) -> None:
    """Check that an encoder can be chosen for a request; `model` is what a user has named.

    Raises:
        UsageError: a model is wanted, only a method's own will do, or the choice would tell what
            shall be hidden.
    """
    wanted = Wanted(
        request.method,
        _make(request.method, request.options),
        {},
        Training(),
        masked=request.secure_aggregation,
        private=bool(request.privacy),
        auto=True,
        model=model,
    )
    check(wanted, CHOICES)


def trains(request: Request) -> bool:
    """Whether nodes train: then the federation has rounds of it.

    Raises UsageError for an unknown method or option.
    """
    return bool(_phases(request))


def suited_model(method: str, options: Mapping[str, Option | str]) -> str:
    """The model of a federation that names none.

    Raises UsageError for an unknown method or option.
    """
    return _make(method, options).model


def _phases(request: Request) -> tuple[Phase, ...]:
    method = _make(request.method, request.options)
    return method.train + method.refine


def _make(method: str, options: Mapping[str, Option | str]) -> Method:
    return make(method, Training(), complete_options(method, options))


def draft(
    request: Request,
    *,
    federation: str,
    classes: Sequence[str],
    nodes: int,
    participation: Participation = Participation(),  # noqa: B008  (immutable)
    encoder: Arrays | None = None,
    aliases: Mapping[str, str] = {},
    encryption: Encryption = "none",
    chooses: bool = False,
) -> tuple[Spec, Arrays]:
    """Return the spec and the tensors of the first broadcast; an `encoder`, if given,
    replaces the initial weights.

    With a codec the encoder's are rounded, as `round_start` does.

    `aliases` are other names of the classes, which plants' folders may have. With `encryption`
    members need kits. A run that `chooses` only compares encoders.

    Raises:
        UsageError: the settings are invalid or do not combine.
    """
    _check(federation, classes, nodes, participation)
    if fault := find_fault(aliases, classes):
        raise UsageError(
            fault, "write --alias NAME=CLASS: NAME is a plant's, CLASS one of --classes"
        )
    if request.model not in FEATURES:
        raise UsageError(f"there is no model {request.model!r}", suggest(request.model, FEATURES))
    weights = request.weights or choose_weights(request.model)
    training = _training(weights, request.training)
    options = complete_options(request.method, request.options)
    method = make(request.method, training, options, request.head)
    shape = Shape(FEATURES[request.model], len(classes))
    quorum = participation.quorum or participation.sample or nodes
    encoder = encoder or initial_encoder(request.model, weights, request.seed)
    encoder = {**encoder, **add_candidates(method.others)}
    broadcast = {**encoder, **method.init_server(encoder, shape, generator(request.seed, "server"))}
    wanted = Wanted(
        request.method,
        method,
        broadcast,
        training,
        rule=request.aggregate,
        liars=request.liars,
        codec=request.codec,
        masked=request.secure_aggregation,
        private=bool(request.privacy),
        sample=participation.sample,
        head=request.head,
    )
    check(wanted, EXCLUSIONS)
    aggregation = _aggregation(request, method, quorum)
    rounds = _count_rounds(request, method)
    privacy = None
    if request.privacy:
        privacy = make_privacy(request.privacy, method, rounds)
        method = make(request.method, training, options, request.head, privacy)
    _check_encoders(request.model, broadcast)
    threshold = _mask_threshold(request, participation, nodes)
    scale = grid.scale_for if threshold else scale_for
    statistics = dict(method.statistics.shapes(broadcast, shape)) if method.statistics else {}
    mask_neighbours = masking.least_neighbours(nodes) if threshold else 0
    spec = Spec(
        federation=federation,
        run=secrets.token_hex(8),
        software=importlib.metadata.version("edge-node"),
        method=request.method,
        options=options,
        model=request.model,
        classes=tuple(classes),
        preprocessing=Preprocessing(size=_size(request)),
        training=training,
        rounds=rounds,
        nodes=nodes,
        quorum=quorum,
        seed=request.seed,
        threads=request.threads,
        tensors={
            name: TensorSpec(array.shape, scale(array, nodes)) for name, array in broadcast.items()
        },
        sends=sent_tensors(method, broadcast),
        sample=participation.sample,
        deadline=participation.deadline,
        aggregation=aggregation,
        relays=_relays(method, broadcast),
        aliases=dict(aliases),
        head=request.head,
        statistics=statistics,
        statistics_first=_begins_with_statistics(method),
        first_totals=_begins_with_statistics(method),
        codec=_codec(request, method, broadcast),
        encryption=encryption,
        mask_threshold=threshold,
        mask_neighbours=mask_neighbours,
        privacy=privacy,
        revision=REVISION,
        chooses=chooses,
    )
    try:
        # as the nodes do: a spec that they would refuse must not be published
        decode(encode(spec), Spec)
    except DecodeError as error:
        raise UsageError(
            f"there can be no such federation: {error}", allowed(str(error), {})
        ) from error
    return spec, {
        **broadcast,
        **update_codec.round_start({name: broadcast[name] for name in encoder}, spec.codec),
    }


def flat_settings(spec: Spec) -> dict[str, Option]:
    """A federation's settings in one mapping: those of training and of the method as
    `training.learning_rate`.
    """
    own: dict[str, Option] = {
        name: getattr(spec, name)
        for name in (
            "software", "method", "model", "head", "rounds", "nodes", "quorum", "sample",
            "deadline", "seed", "threads", "codec", "encryption", "mask_threshold",
            "mask_neighbours", "chooses",
        )
    }  # fmt: skip
    parts = {
        "options": spec.options,
        "training": asdict(spec.training),
        "aggregation": asdict(spec.aggregation),
    }
    parts |= {"privacy": asdict(spec.privacy)} if spec.privacy else {}
    nested = {}
    for part, values in parts.items():
        for name, value in values.items():
            nested[f"{part}.{name}"] = value
    return {**own, "classes": ", ".join(spec.classes), "size": spec.preprocessing.size, **nested}


def _check(
    federation: str,
    classes: Sequence[str],
    nodes: int,
    participation: Participation,
) -> None:
    topics.check_federation(federation)
    if len(classes) < 2 or len(set(classes)) != len(classes):
        raise UsageError(
            f"a federation needs two or more different classes, not {', '.join(classes)}",
            "name each class once",
        )
    for name in classes:
        check_class_name(name)
    for what, number, most in (
        ("a sample of", participation.sample or nodes, nodes),
        ("a quorum of", participation.quorum or 1, participation.sample or nodes),
    ):
        if not 1 <= number <= most:
            raise UsageError(
                f"{what} {number} cannot be had from {most} nodes", f"take 1 to {most}"
            )


def _check_encoders(model: str, broadcast: Arrays) -> None:
    if [each for each, _ in list_encoders(model, broadcast)].count(model) > 1:
        raise UsageError(
            f"--option others names {model}, which is the --model", "name other models there"
        )


def _begins_with_statistics(method: Method) -> bool:
    return bool(method.statistics and method.statistics.begin)


def _count_rounds(request: Request, method: Method) -> int:
    """All rounds: those of training, and those for statistics."""
    if method.train:
        return (
            (request.rounds or method.rounds)
            + bool(method.statistics)
            + _begins_with_statistics(method)
        )
    if request.rounds > 1:
        raise UsageError(
            f"{request.method} trains nothing: it takes one round, not {request.rounds}",
            "leave out --rounds",
        )
    return 1


def _size(request: Request) -> int:
    only = ONLY_SIZE.get(request.model)
    if only and request.size not in (0, only):
        raise UsageError(
            f"{request.model} takes images of {only} pixels, not {request.size}",
            f"leave out --size, or take {only}",
        )
    return request.size or DEFAULT_SIZE[request.model]


def _aggregation(request: Request, method: Method, quorum: int) -> Aggregation:
    is_sum = method.only_mean or request.secure_aggregation
    sum_: Rule = "mean" if is_sum else "clipped_mean"
    name = request.aggregate or sum_
    rule = RULES.get(name)
    if rule is None:
        return Aggregation(name)
    liars = request.liars or 1
    if quorum < rule.least(liars):
        raise UsageError(
            f"{name} needs {rule.least(liars)} contributions against {liars} of them, and a "
            f"round here may close with {quorum}",
            "take a larger --quorum (or --sample, or more --nodes), fewer --liars, or clipped_mean",
        )
    return Aggregation(name, liars)


def _codec(request: Request, method: Method, broadcast: Arrays) -> Codec:
    is_possible = sends_changes(method, broadcast) or not method.sends(broadcast)
    if request.codec is None:
        return (
            update_codec.RECOMMENDED if is_possible and not request.secure_aggregation else "none"
        )
    return request.codec


def _mask_threshold(request: Request, participation: Participation, nodes: int) -> int:
    """How many nodes must be there to unmask a sum; 0 where contributions are not masked."""
    if not request.secure_aggregation:
        return 0
    if not masking.LEAST_NODES <= nodes <= masking.MOST_NODES:
        raise UsageError(
            f"secure aggregation takes {masking.LEAST_NODES} to {masking.MOST_NODES} nodes, not "
            f"{nodes}: a sum of fewer hides nobody, and of more each would be told the keys in "
            "every round",
            "take other --nodes, or leave out --secure-aggregation",
        )
    threshold = masking.least_threshold(nodes)
    if participation.quorum and participation.quorum < threshold:
        raise UsageError(
            f"secure aggregation of {nodes} nodes needs a quorum of {threshold} or more, not "
            f"{participation.quorum}: with fewer a coordinator could have two sums of one round, "
            "and take one from the other",
            f"take a --quorum of {threshold} to {nodes}",
        )
    return threshold


def _relays(method: Method, broadcast: Arrays) -> dict[str, TensorSpec]:
    shapes = method.relay.shapes(broadcast) if method.relay else {}
    return {name: TensorSpec(tuple(shape), scale=0) for name, shape in shapes.items()}


def _training(weights: str, given: Mapping[str, Option | str]) -> Training:
    suited = msgspec.to_builtins(suited_training(weights, str(given.get("optimizer", "adam"))))
    for name in given:
        if name not in suited:
            raise UsageError(f"training has no setting {name!r}", suggest(name, suited))
    try:
        return msgspec.convert({**suited, **given}, Training, strict=False)
    except msgspec.ValidationError as error:
        types = {field.name: field.type for field in msgspec.structs.fields(Training)}
        raise UsageError(
            f"a training setting cannot have this value: {error}", allowed(str(error), types)
        ) from error
