"""Denoising autoencoders at the head (paper IV-2, eq. 3): one for all sensors, or one for each.

What they learn to give for a noisy embedding is the embedding itself, or another noisy copy of it (Noise2Noise,
Lehtinen et al. 2018: independent noise of mean zero averages out, so that no clean data are needed).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from broker_config.vertical import Denoising
from trainer.seeding import key_to_seed

Embeddings = Sequence[Tensor]  # one [N, D_k] for each sensor


def pairs_in(settings: Denoising, round_: int) -> bool:
    """Whether sensors send a second copy of their embeddings in round 1, 2, ..."""
    return round_ <= settings.rounds


class Denoiser:
    """Autoencoders that learn in the first rounds and are frozen afterwards."""

    def __init__(self, settings: Denoising, sizes: Sequence[int], seed: int):
        self.settings, self._sizes = settings, tuple(sizes)
        self._models = nn.ModuleDict()
        self._trained = False
        if settings.rounds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key_to_seed(seed, "denoiser"))
                for name, size in dict(zip(map(self._name, range(len(sizes))), sizes, strict=True)).items():
                    self._models[name] = _autoencoder(size, settings.bottleneck or _bottleneck(size))
        rate = settings.learning_rate
        self._optimiser = torch.optim.Adam(self._models.parameters(), rate) if settings.rounds else None

    def learn(self, noisy: Embeddings, target: Embeddings) -> float:
        """Descend the mean squared error (eq. 3) over all pairs of a round; return it."""
        assert self._optimiser
        loss = torch.zeros(())
        for _ in range(self.settings.epochs):
            self._optimiser.zero_grad()
            made = [self._model(index)(each) for index, each in enumerate(noisy)]
            loss = torch.stack([nn.functional.mse_loss(*pair) for pair in zip(made, target, strict=True)]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimiser.step()
        self._trained = True
        return loss.item()

    @torch.no_grad()
    def __call__(self, received: Embeddings) -> list[Tensor]:
        """Denoised embeddings; as received until the first pairs have been learnt."""
        if not self._trained:
            return list(received)
        return [self._model(index)(each) for index, each in enumerate(received)]

    @property
    def module(self) -> nn.ModuleDict:
        """The autoencoders by name, for checkpoints and export."""
        return self._models

    def model(self, sensor: int) -> nn.Module | None:
        """The trained autoencoder of a sensor; None while there is none."""
        return self._model(sensor) if self._trained else None

    def state(self) -> dict[str, Tensor]:
        """All that is learnt, Adam's moments included; empty before."""
        if not (self._trained and self._optimiser):
            return {}
        moments = {
            f"adam.{index}.{name}": value
            for index, each in self._optimiser.state_dict()["state"].items()
            for name, value in each.items()
        }
        return dict(self._models.state_dict()) | moments

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, into a new denoiser."""
        self._trained = bool(state)
        if not (state and self._optimiser):
            return
        self._models.load_state_dict({name: value for name, value in state.items() if not name.startswith("adam.")})
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("adam."):
                _, index, moment = name.split(".")
                moments.setdefault(int(index), {})[moment] = value
        self._optimiser.load_state_dict({**self._optimiser.state_dict(), "state": moments})

    def _model(self, sensor: int) -> nn.Module:
        return self._models[self._name(sensor)]

    def _name(self, sensor: int) -> str:
        return f"all_{self._sizes[sensor]}" if self.settings.shared else str(sensor)


def _autoencoder(size: int, bottleneck: int) -> nn.Module:
    """Three fully connected layers each way (paper VII-C); the widths in between are a geometric sequence."""
    ratio = (bottleneck / size) ** (1 / 3)
    widths = [size, round(size * ratio), round(size * ratio**2), bottleneck]
    layers: list[nn.Module] = []
    for before, after in zip([*widths, *widths[-2::-1]], [*widths[1:], *widths[-2::-1], 0], strict=False):
        if after:
            layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _bottleneck(size: int) -> int:
    return {28: 3}.get(size, max(2, size // 8))
