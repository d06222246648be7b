"""GC10-DET (Lv et al., 2020): metal surfaces, ten classes."""

from trainer.data.datasets.dataset import Dataset

_CLASSES = (
    "punching_hole",
    "welding_line",
    "crescent_gap",
    "water_spot",
    "oil_spot",
    "silk_spot",
    "inclusion",
    "rolled_pit",
    "crease",
    "waist_folding",
)  # in the order of its folders 1 to 10

GC10_DET = Dataset(
    name="gc10-det",
    title="GC10-DET (metal surfaces)",
    licence="none stated; its authors welcome use and ask to be cited",
    citation=(
        "X. Lv, F. Duan, J. Jiang, X. Fu, L. Gan, Deep Metallic Surface Defect Detection: The "
        "New Benchmark and Detection Network, Sensors 20 (2020) 1562, "
        "https://doi.org/10.3390/s20061562"
    ),
    home="https://github.com/lvxiaoming2019/GC10-DET-Metallic-Surface-Defect-Datasets",
    by_hand="https://www.kaggle.com/datasets/alex000kim/gc10det",
    archive="",
    md5="",
    classes=dict.fromkeys(_CLASSES),
    aliases={str(number): name for number, name in enumerate(_CLASSES, 1)},
)
