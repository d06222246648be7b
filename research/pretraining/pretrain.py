"""Our own starting weights: MobileNetV2 learns to tell drawn defects and textures apart.

No photograph is used.

    python -m research.pretraining.pretrain runs/pretrain

goes on where an earlier call stopped, and leaves `surface_mobilenet_v2.safetensors` there: the
package ships this file. Batch number t is a function of (seed, t), so an interrupted training ends
with the bytes of an uninterrupted one.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from broker_config.protocol.messages import Preprocessing
from research.pretraining.texture_patterns import texture
from trainer.data import drawn_surfaces
from trainer.data.class_folders import LabelledImages
from trainer.data.drawn_surfaces import CLASSES
from trainer.data.training_set import TrainingSet
from trainer.models.backbones import build
from trainer.models.catalogue import FEATURES
from trainer.seeding import generator, key_to_seed


class Plan(NamedTuple):
    """What is trained, and for how long."""

    model: str = "mobilenet_v2"
    steps: int = 10_000
    batch: int = 64  # images; each is another plant's
    textures: int = 200  # kinds, beside the defects of `surfaces`
    defects: float = 0.3  # share of the images that show one of these
    size: int = 64  # pixels
    late_size: int = 96  # at the end
    learning_rate: float = 2e-3  # the highest, of a one-cycle schedule
    weight_decay: float = 0.03
    checkpoint: int = 100  # steps between two
    seed: int = 0

    def size_at(self, step: int) -> int:
        """Width and height of the images of a step."""
        return self.size if step < 0.85 * self.steps else self.late_size

    def contrast_at(self, step: int) -> float:
        """The least contrast of a step: clear images come first,
        since faint ones teach a new network little.
        """
        return max(0.0, 1 - 1.6 * step / self.steps)


class Drawn(Dataset[tuple[np.ndarray, np.ndarray]]):
    """The batches: item t is (images uint8 [n, S, S, 3], labels int64 [n]) of step t."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._kinds = [
            *drawn_surfaces.DEFECTS.values(),
            *(texture(plan.seed, kind) for kind in range(plan.textures)),
        ]

    def __len__(self) -> int:
        return self._plan.steps

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        plan, random = self._plan, generator(self._plan.seed, "batch", step)
        textures = len(CLASSES) + random.integers(0, max(1, plan.textures), plan.batch)
        shows_defect = random.random(plan.batch) < plan.defects
        kinds = np.where(shows_defect, random.integers(0, len(CLASSES), plan.batch), textures)
        images = [
            drawn_surfaces.draw_photographs(
                random, self._look(random, step), 1, plan.size_at(step), self._kinds[kind]
            )
            for kind in kinds
        ]
        return _vary(random, np.concatenate(images)), kinds

    def _look(self, random: np.random.Generator, step: int) -> drawn_surfaces.Style:
        look = drawn_surfaces.draw_style(self._plan.seed, int(random.integers(2**40)))
        return look._replace(contrast=max(look.contrast, self._plan.contrast_at(step)))


def _vary(random: np.random.Generator, gray: np.ndarray) -> np.ndarray:
    """Gray images [n, S, S] as [n, S, S, 3]: half of them mirrored,
    a third slightly coloured, as by some cameras.
    """
    gains = 1 - np.where(
        random.random((len(gray), 1)) < 0.33, random.uniform(0, 0.25, (len(gray), 3)), 0
    )
    mirrored = np.where((random.random(len(gray)) < 0.5)[:, None, None], gray[..., ::-1], gray)
    return np.asarray(
        (mirrored[..., None] * gains[:, None, None].astype(np.float32)).astype(np.uint8)
    )


class Classifier(nn.Module):
    """The encoder and a linear layer over all kinds."""

    def __init__(self, model: str, kinds: int):
        super().__init__()
        self.encoder = build(model)
        self.head = nn.Linear(FEATURES[model], kinds)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 3, S, S] -> [n, kinds]."""
        logits: Tensor = self.head(self.encoder(images))
        return logits


def pretrain(plan: Plan, folder: Path) -> Classifier:
    """Train, or go on training, with checkpoints and the encoder's weights in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(key_to_seed(plan.seed, "pretrain"))
    model = Classifier(plan.model, len(CLASSES) + plan.textures)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(
        model.parameters(), plan.learning_rate, weight_decay=plan.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, plan.learning_rate, total_steps=plan.steps, pct_start=0.1, cycle_momentum=False
    )
    parts: dict[str, Any] = {"model": model, "optimiser": optimiser, "schedule": schedule}
    checkpoint = folder / "checkpoint.pt"
    first = _restore(parts, checkpoint, plan)
    steps = range(first, plan.steps)
    loader = DataLoader(
        Drawn(plan), batch_size=None, sampler=steps, num_workers=1, prefetch_factor=8
    )
    started, losses = time.monotonic(), []
    for step, (images, labels) in zip(steps, loader, strict=True):
        losses.append(_learn(model, optimiser, images.numpy(), labels.numpy()))
        schedule.step()
        if (step + 1) % plan.checkpoint == 0 or step + 1 == plan.steps:
            _keep(parts, checkpoint, plan, step + 1)
            left = (time.monotonic() - started) / (step + 1 - first) * (plan.steps - step - 1)
            print(
                f"step {step + 1}/{plan.steps}: loss {np.mean(losses):.3f}, {left / 60:.0f} min "
                "left",
                flush=True,
            )
            losses.clear()
            export(model, folder / f"surface_{plan.model}.safetensors")
    return model


def _learn(
    model: Classifier, optimiser: torch.optim.Optimizer, images: np.ndarray, labels: np.ndarray
) -> float:
    batch = TrainingSet.of(
        LabelledImages(images, labels, (), ()), Preprocessing(size=images.shape[1])
    )
    loss = functional.cross_entropy(model(batch.network_input(slice(None))), batch.labels)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return float(loss.detach())


def export(model: Classifier, path: Path) -> None:
    """Write the encoder: convolutions in half precision, BatchNorm,
    whose variances span decades, in full.
    """
    arrays = {
        name: value.detach().contiguous().numpy()
        for name, value in model.encoder.state_dict().items()
    }
    save_file(
        {
            name: array.astype(np.float16) if array.ndim == 4 else array
            for name, array in arrays.items()
        },
        path,
    )


def _keep(parts: dict[str, Any], path: Path, plan: Plan, step: int) -> None:
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "plan": list(plan), "step": step}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _restore(parts: dict[str, Any], path: Path, plan: Plan) -> int:
    """Load the checkpoint, if there is one of the same plan; returns the steps that are done."""
    if not path.exists():
        return 0
    kept = torch.load(path, weights_only=True)
    if kept["plan"] != list(plan):
        raise SystemExit(f"{path} is of another plan: {kept['plan']}; take another folder")
    for name, part in parts.items():
        part.load_state_dict(kept[name])
    return int(kept["step"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in Plan()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    out = given.pop("folder")
    torch.set_num_threads(1)
    pretrain(Plan(**given), out)
