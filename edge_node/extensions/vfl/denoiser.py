"""Denoising autoencoders at the head (paper IV-2, eq. 3): one for all sensors, or one for each.

The target of a noisy embedding is the embedding itself, or another noisy copy of it (Noise2Noise,
Lehtinen et al. 2018: independent noise of mean zero averages out, so that no clean data are
needed).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from edge_node.extensions.vfl.messages import Denoising
from trainer.seeding import key_to_seed

Embeddings = Sequence[Tensor]  # one [N, D_k] for each sensor
_ADAM = "adam."
_SCALES = "scales"


def sends_pairs(settings: Denoising, round_: int) -> bool:
    """Whether sensors send a second copy of their embeddings in round 1, 2, ..."""
    return round_ <= settings.rounds


class Denoiser:
    """Autoencoders that learn in the first rounds and are frozen afterwards."""

    def __init__(self, settings: Denoising, sizes: Sequence[int], seed: int):
        self.settings = settings
        self._sizes = tuple(sizes)
        self._models = nn.ModuleDict()
        self._trained = False
        if settings.rounds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key_to_seed(seed, "denoiser"))
                for sensor, size in enumerate(sizes):
                    if self._name(sensor) not in self._models:
                        self._models[self._name(sensor)] = _autoencoder(
                            size, settings.bottleneck or _bottleneck(size)
                        )
        # of each: mean and deviation of what comes, and of what is learnt
        self._scales = torch.zeros(len(sizes), 4)
        rate = settings.learning_rate
        self._optimiser = (
            torch.optim.Adam(self._models.parameters(), rate) if settings.rounds else None
        )

    def train(self, noisy: Embeddings, target: Embeddings) -> float:
        """Descend the mean squared error (eq. 3) over all pairs of a round; return it."""
        assert self._optimiser
        self._scales = torch.stack([_scale(*pair) for pair in zip(noisy, target, strict=True)])
        loss = torch.zeros(())
        for _ in range(self.settings.epochs):
            self._optimiser.zero_grad()
            made = [self._denoised(index, each) for index, each in enumerate(noisy)]
            loss = torch.stack(
                [self._error(*pair) for pair in zip(made, target, strict=True)]
            ).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimiser.step()
        self._trained = True
        return loss.item()

    @torch.no_grad()
    def __call__(self, received: Embeddings) -> list[Tensor]:
        """Denoised embeddings; as received until the first pairs have been learnt."""
        if not self._trained:
            return list(received)
        return [self._denoised(index, each) for index, each in enumerate(received)]

    @property
    def module(self) -> nn.ModuleDict:
        """The autoencoders by name; they take and give embeddings in units of their own."""
        return self._models

    @torch.no_grad()
    def plain_layers(self, sensor: int) -> nn.Module | None:
        """What the denoiser does to a sensor's embeddings, as plain layers;
        None before it has learnt.
        """
        if not self._trained:
            return None
        layers = deepcopy(self._model(sensor))
        first = layers[0]
        last = layers[-1]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        mean, deviation, target_mean, target_deviation = self._scales[sensor]
        first.weight /= deviation
        first.bias.sub_(mean * first.weight.sum(1))
        last.weight *= target_deviation
        last.bias.mul_(target_deviation).add_(target_mean)
        return layers

    def state(self) -> dict[str, Tensor]:
        """All that is learnt, with Adam's moments; the tensors are those in use."""
        moments = {}
        state_or_empty = self._optimiser.state_dict()["state"] if self._optimiser else {}
        for index, values in state_or_empty.items():
            for name, value in values.items():
                moments[f"{_ADAM}{index}.{name}"] = value
        return {**self._models.state_dict(), **moments, _SCALES: self._scales}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        moments: dict[int, dict[str, Tensor]] = {}
        models = dict(state)
        self._scales = models.pop(_SCALES).clone()
        for name in [name for name in models if name.startswith(_ADAM)]:
            index, _, moment = name.removeprefix(_ADAM).partition(".")
            moments.setdefault(int(index), {})[moment] = models.pop(name).clone()
        self._models.load_state_dict(models)
        if self._optimiser:
            groups = self._optimiser.state_dict()["param_groups"]
            self._optimiser.load_state_dict({"state": moments, "param_groups": groups})
        self._trained = bool(moments)

    def _error(self, made: Tensor, target: Tensor) -> Tensor:
        """Mean square.

        A second copy that was lost counts for nothing: its zeros would draw all embeddings to them.
        """
        squares = (made - target).square().mean(1)
        if self.settings.target == "noisy":
            squares = squares[target.any(1)]
        return squares.mean() if len(squares) else squares.sum()

    def _denoised(self, sensor: int, received: Tensor) -> Tensor:
        mean, deviation, target_mean, target_deviation = self._scales[sensor]
        made: Tensor = self._model(sensor)((received - mean) / deviation)
        scaled: Tensor = made * target_deviation + target_mean
        return scaled

    def _model(self, sensor: int) -> nn.Sequential:
        model = self._models[self._name(sensor)]
        assert isinstance(model, nn.Sequential)
        return model

    def _name(self, sensor: int) -> str:
        return f"all_{self._sizes[sensor]}" if self.settings.shared else str(sensor)


def _scale(noisy: Tensor, target: Tensor) -> Tensor:
    """Embeddings grow as the feature models learn:
    an autoencoder sees them in units of their own.
    """
    return torch.stack(
        list(chain.from_iterable((each.mean(), each.std() + 1e-6) for each in (noisy, target)))
    )


def _autoencoder(size: int, bottleneck: int) -> nn.Sequential:
    """Three fully connected layers each way (paper VII-C);
    the widths in between are a geometric sequence.

    The bottleneck is linear, as the output is: of three rectified numbers one or all may be dead.
    """
    ratio = (bottleneck / size) ** (1 / 3)
    inner = [round(size * ratio), round(size * ratio**2)]
    return nn.Sequential(
        *_layers(size, *inner, bottleneck), *_layers(bottleneck, *reversed(inner), size)
    )


def _layers(*widths: int) -> list[nn.Module]:
    """Fully connected, ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


def _bottleneck(size: int) -> int:
    return {28: 3}.get(size, max(2, size // 8))
