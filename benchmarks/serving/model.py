"""The model that is served: two MobileNetV2 encoders, fused,
with the weights that come with edge-node.
"""

from pathlib import Path

import numpy as np

from edge.bundle.bundle_format import MANIFEST
from export.bundle_export import export
from trainer import progress
from trainer.data.drawn_surfaces import CLASSES
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.models.network import Network, to_arrays, to_tensors
from trainer.seeding import generator
from trainer.training import personal_model
from trainer.training.personal_model import ModelMetadata, PersonalModel

SIZE = 224  # pixels
NODE = "press-3"


def fused(folder: Path) -> Path:
    """The bundle, which is exported into `folder` unless it is there; that takes half a minute."""
    bundle = folder / NODE
    if (bundle / MANIFEST).exists():
        return bundle
    request = Request(method="afedcl", model="mobilenet_v2", weights="surface", size=SIZE)
    spec, start = draft(request, federation="benchmark", classes=CLASSES, nodes=2)
    method = make("afedcl", spec.training, spec.options)
    network = Network(spec.model, len(CLASSES))
    tensors = to_tensors({**start, **method.init_node(start, network.shape, generator(0, NODE))})
    received = to_tensors(start)
    tensors = method.deploy(method.receive(tensors, received), received)
    # The own encoder has learnt a little: not the received one again.
    noise = np.random.default_rng(0)
    varied = {
        name: np.asarray(value * (1 + 0.01 * noise.standard_normal(value.shape)), np.float32)
        for name, value in to_arrays(tensors).items()
    }
    personal_model.save(
        PersonalModel(ModelMetadata.from_spec(spec, NODE, 1, {}, {}, ()), to_tensors(varied)),
        folder / "model",
    )
    with progress.reporter(as_json=False, quiet=False) as report:
        export([folder / "model"], folder, report)
    return bundle
