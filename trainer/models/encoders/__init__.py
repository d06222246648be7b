"""The encoders, by the names that `--model` takes.

To add one: write its file, add its line here.
"""

from trainer.models.encoders.efficientnet_lite0 import EFFICIENTNET_LITE0, EFFICIENTNET_LITE0_MID
from trainer.models.encoders.encoder import Encoder
from trainer.models.encoders.mobilenet_v2 import MOBILENET_V2, MOBILENET_V2_MID
from trainer.models.encoders.resnet import RESNET18, RESNET18_MID, RESNET50, RESNET50_MID
from trainer.models.encoders.small import SMALL

ENCODERS: dict[str, Encoder] = {
    "efficientnet_lite0_mid": EFFICIENTNET_LITE0_MID,
    "efficientnet_lite0": EFFICIENTNET_LITE0,
    "mobilenet_v2_mid": MOBILENET_V2_MID,
    "mobilenet_v2": MOBILENET_V2,
    "resnet18_mid": RESNET18_MID,
    "resnet18": RESNET18,
    "resnet50_mid": RESNET50_MID,
    "resnet50": RESNET50,
    "small": SMALL,
}
