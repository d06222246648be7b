"""X-SDD (Feng et al., 2021): hot-rolled steel strip, seven classes."""

from trainer.data.datasets.dataset import Dataset, Images

X_SDD = Dataset(
    name="x-sdd",
    title="Xsteel surface defect dataset (hot-rolled steel strip)",
    licence="Apache-2.0 (the LICENSE file beside the copy that the checksums are of)",
    citation=(
        "X. Feng, X. Gao, L. Luo, X-SDD: A New Benchmark for Hot Rolled Steel Strip Surface "
        "Defects Detection, Symmetry 13 (2021) 706, https://doi.org/10.3390/sym13040706"
    ),
    home="https://github.com/Fighter20092392/X-SDD-A-New-benchmark",
    by_hand="https://github.com/Fighter20092392/X-SDD-A-New-benchmark",
    archive=(
        "https://github.com/Fighter20092392/X-SDD-A-New-benchmark/"
        "archive/029895ed915859dec11e79a70230bf85cfaf91cf.zip"
    ),
    md5="",  # GitHub packs archives anew
    classes={
        "finishing_roll_printing": Images(
            203, "9e897c1bf00190a1c8dcaecce9009e6cb8d668bcd4fa5f86e6aaefb64b763852"
        ),
        "iron_sheet_ash": Images(
            122, "783f410b1754607e273f2dd59dabc0e566f7035a86c1a9a3b488fbd4b0ffe641"
        ),
        "oxide_scale_of_plate_system": Images(
            63, "f3f8c771dffe3977709711ae94b765f7e6db1b41589a9c10260104bc83bbb7fd"
        ),
        "oxide_scale_of_temperature_system": Images(
            203, "a44c0c882b103012eec66d4ba2dd2c3d9f0756e9818366a25ccebb30bd073c80"
        ),
        "red_iron": Images(388, "241ef1aa343e23039535ca14f88d5cc1b3516d6bd794763d2e822b9b67b0b030"),
        "slag_inclusion": Images(
            238, "806ae4ade9a9f09990e733435967f312d036777d49c7a26ab829ca045c74a6a8"
        ),
        "surface_scratch": Images(
            134, "8bdee7e0420743c94439b06a96d6eb235660d4f3aae03e8f3381fce7a512c48a"
        ),
    },
    aliases={},
)
