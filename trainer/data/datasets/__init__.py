"""The public data sets, as `edge-node dataset` lists them.

To add one: write its file, add its line here.
"""

from trainer.data.datasets.gc10_det import GC10_DET
from trainer.data.datasets.neu_cls import NEU_CLS
from trainer.data.datasets.x_sdd import X_SDD

_ALL = (
    NEU_CLS,
    X_SDD,
    GC10_DET,
)
DATASETS = {each.name: each for each in _ALL}
