"""Messages of a federation: frozen, typed, validated when decoded.

Fields may be added with a default, and none changes its meaning within v1; `retired_fields` has
those that are gone. Names are the wire's (JSON). Structs have no behaviour; `codec.py` turns them
into bytes and back.
"""

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from broker_config.protocol.names import CLASS_NAME, LONGEST_CLASS

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="SHA-256, hexadecimal")]
RunId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z", description="one run of a federation")]
SessionId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z", description="one node's session")]
Identity = Annotated[
    str, Meta(pattern=r"^([0-9a-f]{16})?\Z", description="one state folder of a node, or none told")
]
ServerId = Annotated[
    str, Meta(pattern=r"^([0-9a-f]{16})?\Z", description="one process of a server, or none told")
]
Round = Annotated[int, Meta(ge=0, le=1_000_000)]
Text = Annotated[str, Meta(max_length=2000)]
Finite = Annotated[float, Meta(gt=-1e30, lt=1e30)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0, lt=1e30)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Option = bool | int | float | str
ClassName = Annotated[str, Meta(min_length=1, max_length=LONGEST_CLASS, pattern=CLASS_NAME)]
Stage = Literal["gathering", "open", "finished", "aborted"]
Work = Literal[
    "waiting",
    "receiving",
    "training",
    "sending",
    "judging",
    "late",
    "finished",
    "absent",
    "refused",
]
Head = Literal["trained", "statistics"]
Rule = Literal["mean", "clipped_mean", "multi_krum"]
Codec = Literal["none", "int4"]
Encryption = Literal["none", "group"]
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="X25519, hexadecimal")]
Signature = Annotated[
    str, Meta(pattern=r"^([0-9a-f]{128})?\Z", description="Ed25519, hexadecimal, or none")
]
EncryptedShare = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{164}\Z", description="two shares and a tag, hexadecimal")
]
Share = Annotated[str, Meta(pattern=r"^[0-9a-f]{66}\Z", description="of a secret, hexadecimal")]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]


class Message(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; `type` on the wire is the class name."""


class RecordHead(Struct, frozen=True, kw_only=True):
    """The newest entry of a hash-chained record:
    who knows it notices a change of any entry up to it.

    Signed, where its owner has a kit, for its federation.
    """

    entries: Annotated[int, Meta(ge=1, le=1 << 53)]
    digest: Digest  # of that entry
    signature: Annotated[str, Meta(pattern=r"^([0-9a-f]{128})?\Z")] = ""


class Manifest(Struct, frozen=True, kw_only=True):
    """A blob that its producer offers: what it is, not its bytes.

    `federation`, `run`, `round`, `node` and `digest` are covered by the coordinator's signature of
    a broadcast, whose `record` is that of what the coordinator had settled when it opened the
    round.
    """

    federation: Name
    run: RunId
    round: Round
    node: Name
    digest: Digest
    size: Annotated[int, Meta(ge=1, le=1 << 40)]  # bytes
    chunk_size: Annotated[int, Meta(ge=1024, le=1 << 24)]  # bytes
    signature: str = ""
    record: RecordHead | None = None


class Delta(Struct, frozen=True, kw_only=True):
    """A blob that holds only what another blob's tensors differ by from those of `base`,
    coded by the spec's codec.

    `NO_BASE` stands for a base without tensors, which everyone has.
    """

    base: Digest
    blob: Manifest


class TensorSpec(Struct, frozen=True, omit_defaults=True):
    """Shape of a shared tensor, and the fixed-point scale (binary exponent) in which it is summed.

    An int64 or uint32 tensor holds multiples of 2**-scale, which are summed as they are; uint32
    modulo 2**32.
    """

    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    scale: Annotated[int, Meta(ge=-64, le=62)]
    dtype: Literal["float32", "int64", "uint32"] = "float32"


class Preprocessing(Struct, frozen=True):
    """How an image becomes the network's input: resize to size x size, RGB, x/255,
    minus mean, over std.
    """

    size: Annotated[int, Meta(ge=16, le=1024)]  # pixels
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


class Training(Struct, frozen=True):
    """The local training that all methods share,
    so that a comparison gives each the same chances.
    """

    learning_rate: Annotated[float, Meta(gt=0, lt=10)] = 1e-3
    local_epochs: Annotated[int, Meta(ge=1, le=1000)] = 3  # a stage
    batch_size: Annotated[int, Meta(ge=2, le=4096)] = 32  # at most; a batch of one is never formed
    augment: bool = True  # flips, quarter turns, brightness and contrast
    # statistics of the trained encoder while it trains
    batch_norm: Literal["train", "eval"] = "train"
    moments: Literal["keep", "reset"] = "keep"  # Adam's moments from one round to the next
    # Adam with betas (0.9, 0.999); SGD with momentum 0.9, at rest when a stage begins, and weight
    # decay 1e-4.
    optimizer: Literal["adam", "sgd"] = "adam"


class Aggregation(Struct, frozen=True):
    """How contributions become the next broadcast.

    `liars`: contributions that may be false without spoiling it.
    """

    rule: Rule = "mean"
    liars: Annotated[int, Meta(ge=0, le=100_000)] = 0  # multi_krum


class ImagePrivacy(Struct, frozen=True):
    """Differential privacy of each image: nodes bound what one can change of what they send,
    and add noise.

    `noise` and `sums` are standard deviations, in units of such a bound; 0 where nothing of that
    kind is sent.
    """

    clip: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # length to which an image's gradient is cut
    # of each step's sum of gradients, in lengths of `clip`
    noise: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    # Of a message of sums, in the length to which an image's features are cut.
    sums: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


REVISION = 2
"""The newest revision of this protocol. Nodes and runs of earlier ones work wherever they can.

1: nodes know totals in broadcasts (`Spec.first_totals`). 2: masks and noise are bound to the spec;
there are choosing runs.
"""


class CommonSpec(Message, frozen=True, kw_only=True):
    """Fields with which every spec begins, whatever its kind of federation."""

    federation: Name
    run: RunId
    software: str  # version of the coordinator's edge-node


class Spec(CommonSpec, frozen=True, kw_only=True):
    """A federation, retained: all that a node must know besides its own images."""

    method: str
    options: dict[str, Option]  # of the method, complete
    model: str
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=2, max_length=1000)]
    preprocessing: Preprocessing
    training: Training
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)]
    nodes: Annotated[int, Meta(ge=1, le=100_000)]  # expected
    # nodes that open the first round, contributions that close one
    quorum: Annotated[int, Meta(ge=1, le=100_000)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    # of each training process: part of what is deterministic
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    tensors: dict[str, TensorSpec]  # what is broadcast
    sends: tuple[str, ...]  # prefixes of the tensors that a node contributes
    # nodes drawn for each round; 0: all take part
    sample: Annotated[int, Meta(ge=0, le=100_000)] = 0
    deadline: Seconds = 0.0  # of a round, after which a quorum suffices; 0: none
    aggregation: Aggregation = Aggregation()
    # what a node contributes beside, by name; it is not averaged
    relays: dict[str, TensorSpec] = {}
    # other names of classes -> class
    aliases: Annotated[dict[ClassName, ClassName], Meta(max_length=10_000)] = {}
    # the classifier that is deployed: as trained, or made of statistics after training
    head: Head = "trained"
    # int64 sums: a node's part of the last round, their totals in the result
    statistics: dict[str, TensorSpec] = {}
    # whether they are a node's part of the first round too, before anybody trains
    statistics_first: bool = False
    # Whether all later broadcasts hold the totals of the first round: with its encoder, which
    # nobody has trained so far, they are a model.
    first_totals: bool = False
    codec: Codec = "none"  # how what has changed since the broadcast is coded, both ways
    encryption: Encryption = "none"  # whether the broker can read what is learnt
    # Nodes without which no sum of masked contributions can be read; 0: contributions are not
    # masked.
    mask_threshold: Annotated[int, Meta(ge=0, le=1000)] = 0
    # Others that a node lets hold shares of its secrets, half of which are needed; 0: all, of which
    # the threshold is.
    mask_neighbours: Annotated[int, Meta(ge=0, le=1000)] = 0
    # of each image; None: what nodes send is as their images make it
    privacy: ImagePrivacy | None = None
    # of this protocol, with which the run began; see `REVISION`
    revision: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    # Whether nodes only tell what leaving out their images costs with each encoder, and wait for
    # the federation's next run.
    chooses: bool = False


class RoundState(Message, frozen=True, kw_only=True):
    """Where the federation stands, retained.

    `broadcast` is what `round` starts from; once finished, its result.

    `delta` makes the same blob of the broadcast before it.
    """

    run: RunId
    round: Round
    status: Stage
    broadcast: Manifest | None = None
    reason: Text = ""  # why it was aborted, or what it waits for
    # nodes that were drawn for the open round; empty: all take part
    participants: tuple[Name, ...] = ()
    server: ServerId = ""  # that says it
    delta: Delta | None = None


class Presence(Message, frozen=True, kw_only=True):
    """Whether a node is connected; `online: false` is also its last will.

    Retained, unless it is a question.
    """

    session: SessionId
    online: bool
    identity: Identity = ""  # of a node, as in its Hello
    asking: bool = False  # from a process that wants this name: who has it and is there says so


class Hello(Message, frozen=True, kw_only=True):
    """Node -> coordinator: let me take part.

    `identity` is drawn once for a node's state folder, `incarnation` counts the processes that used
    it: so a restarted node is told from another one of its name, and its newest message from a
    delayed one. `round` is the last one that it has contributed to, by its state folder.
    """

    session: SessionId
    run: RunId
    software: str
    identity: Identity = ""
    incarnation: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    round: Round = 0
    # this process's
    key: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", description="X25519, hexadecimal")] = ""
    masks: bool = False  # whether it knows how to mask what it contributes
    # of this protocol, that it knows; see `REVISION`
    revision: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class Contribution(Message, frozen=True, kw_only=True):
    """Node -> coordinator: stage 1 is done.

    `weight` is what the method measures (AFedCL: L_D; FedAvg: images).
    """

    session: SessionId
    run: RunId
    round: Round
    weight: Finite
    blob: Manifest | None  # None when the method sends nothing
    # of statistics: see `round_contents.basis`
    basis: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    # the one that has welcomed the node last: a later one may be of an older copy
    server: ServerId = ""


class Telemetry(Message, frozen=True, kw_only=True):
    """Node -> coordinator, only when the node opted in: losses,
    A_k and accuracy of a finished round.
    """

    session: SessionId
    run: RunId
    round: Round
    metrics: dict[Annotated[str, Meta(max_length=64)], Finite]


class Finished(Message, frozen=True, kw_only=True):
    """Node -> coordinator: the personal model is on the node's disk; nothing more is needed."""

    session: SessionId
    run: RunId


class Welcome(Message, frozen=True, kw_only=True):
    """Coordinator -> node: you take part.

    The round states of this `server` hold from now on, also if they are behind those of an earlier
    one, which happens when its state folder was restored from a copy. `contributed`: the newest
    round that it has a contribution to. `key` are the group's and the node's keys, encrypted for
    the key of the Hello.
    """

    session: SessionId
    server: ServerId = ""
    contributed: Round = 0
    key: Annotated[str, Meta(pattern=r"^([0-9a-f]{224})?\Z", description="HPKE, hexadecimal")] = ""


class Accepted(Message, frozen=True, kw_only=True):
    """Coordinator -> node: the contribution to `round` may be forgotten:
    it is summed and on disk, or came too late.
    """

    session: SessionId
    run: RunId
    round: Round
    counted: bool = True
    reason: Text = ""  # why it was not counted


class Refusal(Message, frozen=True, kw_only=True):
    """Coordinator -> node: no, why, and what to do."""

    session: SessionId
    reason: Text
    remedy: Text


class PublicKeys(Struct, frozen=True, kw_only=True):
    """A node's keys for one round of masked contributions, under its signature."""

    agreement: Key  # from which masks of pairs follow
    cipher: Key  # for which shares are encrypted
    commitment: Digest  # to the secret of its own mask
    # where there are statistics: of its images
    classes: tuple[Annotated[int, Meta(ge=0, le=999)], ...] = ()
    signature: Signature = ""


class MaskingStep(Message, frozen=True, kw_only=True):
    """Coordinator -> node: how far the masks of the open round are;
    what is empty it has said before, or says later.

    What is too long for a message comes in `parts`, one after the other, each with some of the
    entries.
    """

    run: RunId
    round: Round
    part: Annotated[int, Meta(ge=0, le=99)] = 0  # from 0
    parts: Annotated[int, Meta(ge=1, le=100)] = 1
    members: dict[Name, PublicKeys] = {}  # the round's cohort
    counted: tuple[Name, ...] = ()  # whose masks count
    # for this node, of each other one of these that shares with it
    shares: dict[Name, EncryptedShare] = {}
    survivors: tuple[Name, ...] = ()  # whose contributions are in the sum
    signatures: dict[Name, Signature] = {}  # of members, under that


class MaskingAnswer(Message, frozen=True, kw_only=True):
    """Node -> coordinator: what a round's masks need of it;
    each of the four parts is said by itself.
    """

    session: SessionId
    run: RunId
    round: Round
    keys: PublicKeys | None = None
    shares: dict[Name, EncryptedShare] = {}  # of its secrets, for other members
    signature: Signature = ""  # under the survivors
    # of each that shares with it: of the own mask of survivors, else of agreement
    revealed: dict[Name, Share] = {}


class Want(Message, frozen=True, kw_only=True):
    """Asker -> holder: send these chunks of a blob."""

    digest: Digest
    chunk_size: Annotated[int, Meta(ge=1024, le=1 << 24)]
    chunks: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1 << 30)], ...], Meta(min_length=1, max_length=1024)
    ]
    newest: Annotated[
        int, Meta(ge=-1, le=1 << 30)
    ] = -1  # the chunk that came last; -1: asks for the first time or anew


class NodeState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node, as the coordinator knows it."""

    node: Name
    doing: Work
    awaited: bool = False  # the open round waits for it
    done: Bytes = 0  # of its contribution that is on its way
    total: Bytes = 0
    round: Round = 0  # of its last contribution; 0 when there is none
    weight: Finite | None = None  # of that contribution
    bytes: Bytes = 0  # of all its contributions
    heard: Seconds | None = None  # since when nothing has come from it, at `time`
    error: Annotated[str, Meta(max_length=200)] = ""  # the last one: why it was lost or refused
    # its certificate, where there is a member list
    expires: Annotated[datetime, Meta(tz=True)] | None = None


class Overview(Message, frozen=True, kw_only=True):
    """How a federation is doing, retained. Those that the round waits for come first in `nodes`."""

    run: RunId
    time: Annotated[datetime, Meta(tz=True)]  # by the coordinator's clock, for display
    round: Round
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)]
    status: Stage
    paused: bool = False  # fewer nodes are there than the round needs
    contributions: Annotated[int, Meta(ge=0, le=100_000)] = 0  # to the open round
    quorum: Annotated[int, Meta(ge=1, le=100_000)]
    left: Seconds | None = None  # until the round's deadline, at `time`
    nodes: tuple[NodeState, ...] = ()
    more: Annotated[int, Meta(ge=0)] = 0  # nodes that did not fit into the message


class Validation(Struct, frozen=True, kw_only=True):
    """How well the newest products were judged before anybody learnt from them: `rmse`,
    or `accuracy` and `recall`.
    """

    products: Annotated[int, Meta(ge=1, le=1_000_000)]
    accuracy: Ratio | None = None  # of them that were judged right
    recall: Ratio | None = None  # the mean over their classes
    rmse: NonNegative | None = None  # where classes are numbers
    # accuracy of always their most frequent class, or RMSE of always their mean
    baseline: NonNegative


AnyMessage = (
    Spec
    | RoundState
    | Presence
    | Hello
    | Contribution
    | Telemetry
    | Finished
    | Welcome
    | Accepted
    | Refusal
    | Want
    | Overview
    | MaskingStep
    | MaskingAnswer
)
