"""The encoders, by the names that `--model` takes.

To add one: write its file, add its line here.
"""

from trainer.models.encoders.efficientnet_lite0 import EFFICIENTNET_LITE0
from trainer.models.encoders.encoder import Encoder
from trainer.models.encoders.mobilenet_v2 import MOBILENET_V2
from trainer.models.encoders.resnet import RESNET18, RESNET50
from trainer.models.encoders.small import SMALL

ENCODERS: dict[str, Encoder] = {
    "mobilenet_v2": MOBILENET_V2,
    "efficientnet_lite0": EFFICIENTNET_LITE0,
    "resnet18": RESNET18,
    "resnet50": RESNET50,
    "small": SMALL,
}
