"""The paper's own numbers: Table II of AFedCL (Cui et al., 2024),
and those of Fig. 4 in its text. All in percent.
"""

from typing import NamedTuple

TITLES = {
    "table2": "Table II: methods on three data sets",
    "fig4": "Fig. 4: with and without the adversarial update",
    "fig5": "Fig. 5: discrimination loss and fusion weight",
    "fig7": "Fig. 7: features",
    "fig8": "Fig. 8: lambda",
    "fig9": "Fig. 9: networks and numbers of nodes",
    "fig10": "Fig. 10: what each part is worth",
    "tune": "Tuning",
    "joining": "Joining a federation or training alone",
    "consensus": "Training or one message",
    "scarce": "The best learner for scarce images",
    "around": "Around one setting with scarce images",
    "trained": "Training after one message",
    "codecs": "Fewer bytes",
    "private": "Accuracy against epsilon: one message",
    "private_tune": "Steps of training with noise",
    "private_training": "Accuracy against epsilon: training",
    "factors": "What decides: one choice changed at a time",
}
PARTITIONS = ("disjoint", "dirichlet")
SAMPLES = (5, 10, 20)  # training images a node


class Printed(NamedTuple):
    """An entry of Table II."""

    accuracy: float
    f1: float


# Of each data set and method: accuracy and F1 with 5, 10 and 20 images; disjoint, then Dirichlet.
_TABLE_II = """
NEU-CLS
  local   22.93 19.13  43.07 42.19  47.33 45.98  |  14.78 12.57  21.39 20.82  20.17 19.85
  fedavg  51.40 62.83  58.60 70.89  72.47 80.86  |  44.70 51.50  57.39 64.04  60.01 67.68
  fedprox 51.53 61.42  61.93 73.96  73.80 82.22  |  42.78 47.03  52.69 60.76  64.87 71.51
  fedper  69.60 63.61  90.13 89.96  93.67 93.63  |  72.87 65.55  83.65 79.56  85.92 80.65
  fedrep  74.73 68.87  87.87 87.28  93.33 93.31  |  70.78 62.01  81.57 75.74  86.96 80.79
  ditto   69.93 61.47  91.33 91.17  95.73 95.73  |  71.13 62.59  83.65 79.65  88.70 84.74
  fedala  76.46 70.95  90.27 89.93  93.33 93.46  |  73.56 67.61  82.44 76.91  86.09 82.67
  afedcl  78.67 74.84  95.20 95.19  96.60 96.60  |  73.91 67.27  86.96 83.77  88.87 85.32
X-SDD
  local   31.03 28.16  35.49 33.32  39.15 35.82  |  23.56 20.69  25.32 24.50  26.01 25.03
  fedavg  33.25 35.79  40.82 49.73  48.49 57.84  |  52.03 55.91  54.59 59.84  64.61 69.62
  fedprox 37.02 39.97  42.36 52.24  50.80 61.32  |  52.22 55.96  55.32 61.67  61.84 68.32
  fedper  45.86 36.82  56.25 52.69  64.99 64.06  |  84.38 80.94  85.71 82.92  88.54 86.60
  fedrep  44.52 31.56  54.08 49.13  66.73 65.79  |  83.57 79.39  84.84 81.58  88.88 87.76
  ditto   48.69 39.18  56.66 50.02  71.01 69.58  |  84.78 83.04  85.40 81.32  88.28 86.50
  fedala  54.14 48.03  60.68 57.79  67.45 65.22  |  85.96 82.70  86.27 83.90  87.62 86.21
  afedcl  58.17 53.60  64.89 62.53  73.07 72.34  |  87.02 83.15  89.27 88.31  89.61 88.41
GC10-DET
  local   22.82 18.36  34.04 32.85  36.25 34.31  |  18.43 16.37  17.04 15.34  30.48 32.17
  fedavg  44.89 44.77  55.70 57.88  67.65 70.66  |  53.53 61.49  54.67 63.25  65.73 71.70
  fedprox 47.42 46.49  59.64 60.42  67.63 69.43  |  55.32 62.56  60.53 67.96  68.15 73.37
  fedper  46.13 35.31  63.53 60.32  73.10 71.03  |  74.86 68.40  78.86 78.24  82.98 82.78
  fedrep  45.90 35.48  59.96 55.75  73.15 70.77  |  71.54 64.53  79.54 76.44  84.28 82.26
  ditto   45.65 35.91  62.61 57.24  75.70 74.17  |  72.10 65.77  84.11 80.81  85.68 82.66
  fedala  50.99 44.16  64.56 60.80  71.70 70.73  |  78.19 72.27  80.44 77.24  82.56 81.30
  afedcl  56.67 48.52  70.18 68.47  77.10 75.84  |  80.46 75.74  84.63 81.70  87.07 85.35
"""


def _parse(text: str) -> dict[tuple[str, str, int, str], Printed]:
    found: dict[tuple[str, str, int, str], Printed] = {}
    dataset = ""
    for row in text.strip().splitlines():
        if not row.startswith(" "):
            dataset = row
            continue
        method, *numbers = row.replace("|", "").split()
        columns = [(partition, samples) for partition in PARTITIONS for samples in SAMPLES]
        pairs = zip(map(float, numbers[::2]), map(float, numbers[1::2]), strict=True)
        found |= {
            (dataset, *column, method): Printed(*pair)
            for column, pair in zip(columns, pairs, strict=True)
        }
    return found


TABLE_II = _parse(_TABLE_II)  # by data set, partition, images and method
DATASETS = tuple(dict.fromkeys(dataset for dataset, _, _, _ in TABLE_II))
METHODS = tuple(dict.fromkeys(method for _, _, _, method in TABLE_II))
UNAVAILABLE = "GC10-DET"  # data set whose images could not be had here

# Final accuracy without and with the encoder's adversarial update, in a setting that the paper does
# not state.
FIG_4 = {"AFedCL without adversarial update": 54.68, "AFedCL": 70.75}
