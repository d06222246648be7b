"""Presets: networks, amounts of training, and the choices that the paper leaves open."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from broker_config.protocol.messages import Training


class Models(NamedTuple):
    """Networks of one scale."""

    # texture networks that FedTFI is compared with, by the name of their head
    heads: Mapping[str, str]
    whole: str  # FedTFI's: TEL and MusTEN
    tel: str  # without MusTEN
    musten: str  # without TEL
    maps: str  # without both
    exchanged: Mapping[str, str]  # TEL with another head in place of MusTEN


class Study(NamedTuple):
    """How a data set is shared."""

    nodes: int
    samples: int  # training images of each node
    test_samples: int  # held-out images of each node at most
    shared: int  # images of each class that Data Sharing gives every node besides
    scenarios: tuple[str, ...]  # that it has, of `grids.SCENARIOS`


class Preset(NamedTuple):
    """How much is trained."""

    models: Models
    heads: tuple[str, ...]  # of `models.heads`, in tables
    training: Training
    rounds: int
    seeds: int
    scenarios: tuple[str, ...]  # of tables
    studies: Mapping[str, Study]  # by data set
    tuned_on: str  # data set


LABEL, FEATURE = "label skew, #C = 1", "feature skew"
BOTH_1, BOTH_2 = "label and feature skew, #C = 1", "label and feature skew, #C = 2"

SMALL = Models(
    heads={
        "Deep-TEN": "deepten_small",
        "DEPNet": "dep_small",
        "CLASSNet": "class_small",
        "CU-NET": "cunet_small",
        "ResNet": "resnet_small",
    },
    whole="fedtfi_small",
    tel="tel_small",
    musten="musten_small",
    maps="maps_small",
    exchanged={
        "Deep-TEN": "tel_deepten_small",
        "DEPNet": "tel_dep_small",
        "CLASSNet": "tel_class_small",
    },
)
_PAPER = SMALL._replace(  # of what TEL and MusTEN are worth only the small scale has networks
    heads={
        "Deep-TEN, ResNet-18": "deepten_resnet18",
        "Deep-TEN, ResNet-50": "deepten_resnet50",
        "DEPNet, ResNet-18": "dep_resnet18",
        "DEPNet, ResNet-50": "dep_resnet50",
        "CLASSNet, ResNet-18": "class_resnet18",
        "CLASSNet, ResNet-50": "class_resnet50",
        "CU-NET, DenseNet": "cunet",
    },
    whole="fedtfi",
)

_KTH = Study(
    nodes=8, samples=24, test_samples=30, shared=2, scenarios=(LABEL, FEATURE, BOTH_1, BOTH_2)
)  # 2 sources with 4 classes
# 2 sources with 3
_STEEL = Study(nodes=6, samples=24, test_samples=40, shared=2, scenarios=(LABEL, FEATURE, BOTH_1))
_CPU = Preset(
    models=SMALL,
    heads=tuple(SMALL.heads),
    training=Training(learning_rate=1e-3, local_epochs=2, batch_size=8, augment=False),
    rounds=12,
    seeds=3,
    scenarios=(LABEL, FEATURE, BOTH_1, BOTH_2),
    studies={"kth": _KTH, "steel": _STEEL},
    tuned_on="kth",
)
_SHORT = _CPU._replace(heads=("Deep-TEN",), scenarios=(FEATURE, BOTH_1))

PRESETS: dict[str, Preset] = {
    "quick": _SHORT,
    "cpu": _CPU,
    # the paper's optimiser
    "sgd": _SHORT._replace(training=msgspec.structs.replace(_CPU.training, optimizer="sgd")),
    # whole pieces of cloth held out
    "pieces": _SHORT._replace(studies={"pieces": _KTH}, tuned_on="pieces"),
    # local epochs and batch of the paper, which states no rounds, nodes or images of a node
    "full": _CPU._replace(
        models=_PAPER,
        heads=tuple(_PAPER.heads),
        training=Training(learning_rate=1e-3, local_epochs=10, batch_size=128, augment=False),
        rounds=50,
        seeds=5,
        # as many images as the tuning pool of KTH-TIPS2 and the report pool of X-SDD can give every
        # node
        studies={
            "kth": _KTH._replace(samples=36, test_samples=20),
            "steel": _STEEL._replace(samples=48, test_samples=30),
        },
    ),
}
