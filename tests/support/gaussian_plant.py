"""A plant that has learnt with another one by a single message of sums, and its bundle."""

from pathlib import Path

from export.bundle_export import export
from tests.support.plants import CLASSES, draw, load_images
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.training import personal_model

REQUEST = Request("gaussian", model="small", weights="none", size=32, seed=7)


def gaussian_plant(folder: Path, plant: str) -> Path:
    """Return the node's folder with its `model`, and the `bundles` that were made of it.

    The plant has two of the three classes, and some images in the wrong folder.
    """
    images = draw(folder / "images", 9, 1, CLASSES[:2])
    for number in (2, 5):
        path = images / CLASSES[0] / f"1-{number}.png"
        path.rename(images / CLASSES[1] / f"moved-{number}.png")
    spec, broadcast = draft(REQUEST, federation="steel", classes=CLASSES, nodes=2)
    plants = {
        plant: load_images(spec, images),
        "plant-2": load_images(spec, draw(folder / "others", 4, 2)),
    }
    personal_model.save(simulate(spec, broadcast, plants).models[plant], folder / "model")
    export([folder / "model"], folder / "bundles", lambda event: None)
    return folder
