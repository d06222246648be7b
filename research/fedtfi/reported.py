"""The paper's own numbers: Tables 2 and 4 of FedTFI (Peng et al., 2022), accuracy in percent,
on its private cloth.
"""

from research.fedtfi.presets import BOTH_1, BOTH_2, FEATURE, LABEL

# Framework and head: label skew, feature skew, both with #C = 1, both with #C = 2; with ResNet-18 /
# ResNet-50 as trunk.
# In the copy at hand the first row is damaged: its leading digits are inferred, one cannot be.
_TABLE_2 = """
Data Sharing, Deep-TEN  64.8 81.7 62.8 7?.0 / 67.1 83.0 63.5 78.8
Data Sharing, DEPNet    64.4 82.5 63.2 76.9 / 66.1 85.6 64.9 77.5
Data Sharing, CLASSNet  63.9 81.8 62.7 73.1 / 66.3 85.1 64.7 79.6
Data Sharing, CU-NET    66.2 84.7 62.4 78.7
FedProx, Deep-TEN       64.7 81.2 62.0 78.8 / 66.8 83.9 64.5 81.4
FedProx, DEPNet         65.4 81.5 61.1 77.6 / 67.9 84.1 64.7 80.0
FedProx, CLASSNet       65.9 82.4 62.7 74.9 / 66.7 86.3 64.7 80.5
FedProx, CU-NET         67.0 83.7 62.0 80.1
FedNova, Deep-TEN       63.5 80.2 61.3 76.8 / 66.5 83.6 63.7 80.7
FedNova, DEPNet         63.9 81.8 61.5 77.4 / 66.0 84.4 63.5 80.3
FedNova, CLASSNet       64.2 81.1 60.2 75.4 / 67.4 86.7 65.5 80.8
FedNova, CU-NET         66.3 84.2 61.2 79.2
FedAvg, Deep-TEN        58.6 80.5 55.4 73.7 / 61.1 83.2 56.2 75.5
FedAvg, DEPNet          58.4 80.7 55.3 73.3 / 62.3 83.6 57.6 75.6
FedAvg, CLASSNet        61.7 79.1 57.1 74.1 / 63.0 83.7 57.9 75.8
FedAvg, CU-NET          60.8 83.4 57.2 72.5
FedTFI                  75.5 92.4 72.7 86.3
"""
_COLUMNS = (LABEL, FEATURE, BOTH_1, BOTH_2)
_TRUNKS = ("ResNet-18", "ResNet-50")


def _parse(text: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for row in text.strip().splitlines():
        name, _, numbers = row.partition("  ")
        trunks = [trunk.split() for trunk in numbers.split("/")]
        found |= {
            (name, scenario): " / ".join(each)
            for scenario, *each in zip(_COLUMNS, *trunks, strict=True)
        }
        for trunk, values in zip(
            _TRUNKS if len(trunks) > 1 else ("DenseNet",), trunks, strict=True
        ):
            found |= {
                (f"{name}, {trunk}", scenario): each
                for scenario, each in zip(_COLUMNS, values, strict=True)
            }
    return found


PRINTED: dict[str, dict[tuple[str, str], str]] = {
    "table2": _parse(_TABLE_2),
    "table4": {
        (name, scenario): value
        for name, values in {
            "none": ("80.5", "57.6", "75.0"),
            "PFI": ("79.9", "61.0", "70.3"),
            "PFI, TEL": ("89.8", "70.6", "85.8"),
            "PFI, TEL, MusTEN": ("92.4", "72.7", "86.3"),
        }.items()
        for scenario, value in zip((FEATURE, BOTH_1, BOTH_2), values, strict=True)
    },
}
"""By experiment: by variant and scenario."""

TITLES = {
    "tune": "Tuning: trials of every variant",
    "table2": "Table 2: frameworks and texture networks",
    "table4": "Table 4: what PFI, TEL and MusTEN are worth",
    "fig6": "Fig. 6: accuracy and training loss in the feature skew",
    "fig7": "Fig. 7: F1, AUC and training loss in the label skew",
    "fig8": "Fig. 8: what is taken for what in the feature skew",
    "fig9": "Fig. 9: features with and without TEL",
    "fig10": "Fig. 10: without MusTEN, and with other heads in its place",
    "fuse": "Models of nodes' own on FedTFI's network",
    "leak": "Protected patches",
    "negatives": "What a triplet's negative is",
    "consensus": "The consensus head on what has been trained",
}
