"""torchvision, also where its compiled operators cannot be loaded."""

from typing import Any

import torch

_keep_alive: list[torch.library.Library] = []


def torchvision_models() -> Any:
    """torchvision.models, also where its compiled operators cannot be loaded
    (a CPU-only torch beside a CUDA build).

    Only detection needs those operators, but torchvision cannot be imported without their schemas.
    Declared beside operators that do load, they would abort the process: so only after an import
    that failed.
    """
    try:
        import torchvision.models  # noqa: PLC0415  (slow, and only torchvision's networks need it)
    except RuntimeError:  # operator torchvision::nms does not exist
        library: Any
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _keep_alive.append(library)
        import torchvision.models  # noqa: PLC0415

    return torchvision.models
