"""NEU-CLS (Song and Yan, 2013): hot-rolled steel strip, six classes."""

from trainer.data.datasets.dataset import Dataset, Images

NEU_CLS = Dataset(
    name="neu-cls",
    title="NEU surface defect database for classification (hot-rolled steel strip)",
    licence="for research, citing the paper (its authors); CC BY 4.0 (the copy on Figshare)",
    citation=(
        "K. Song, Y. Yan, A noise robust method based on completed local binary patterns for "
        "hot-rolled steel strip surface defects, Applied Surface Science 285 (2013) 858-864"
    ),
    home="http://faculty.neu.edu.cn/songkechen/zh_CN/zdylm/263270/list/",
    by_hand="https://figshare.com/articles/dataset/NEU-CLS/28903550",
    archive="https://ndownloader.figshare.com/files/54094775",
    md5="19af5a1250d8ab0cb0828d31ee2b349d",
    classes={
        "crazing": Images(300, "189ae12ccb8b814dc10fcc2eaf90f2386ab61f88c3eb3e28837639d096ca8372"),
        "inclusion": Images(
            300, "d21a68970c3d153ef42ea0dfff29108034a1e228d64c7d1aa69865dc13aaa63e"
        ),
        "patches": Images(299, "414f639fcdc6b009f810b2566ae7c0094d6045048f8a9986ab64c86feb186be8"),
        "pitted_surface": Images(
            300, "d1432b415cc77cd527eb6d45b94e062c6afcb93eb4e29050f0e596a1aa192ad2"
        ),
        "rolled-in_scale": Images(
            300, "14c26d6565dde73e69bfa8e8cce1f7acad8f2762e3047ef09f3daea1a4557fb1"
        ),
        "scratches": Images(
            300, "d4eaca6e21c19703452badb13c68f86dd60728bf7a16a3b90c54a10cd7ea13e8"
        ),
    },
    aliases={
        "cr": "crazing",
        "in": "inclusion",
        "pa": "patches",
        "ps": "pitted_surface",
        "rs": "rolled-in_scale",
        "sc": "scratches",
    },
)
