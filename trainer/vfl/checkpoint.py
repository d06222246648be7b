"""Checkpoints of a sensor or head, as files: the two newest are kept."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage import disk

_KEPT = 2
State = Mapping[str, Tensor]


class Checkpoints:
    """Checkpoints of one run, each named by the round at whose end it was made. EdgeNodeError if the disk fails.

    An empty one stands for round 0, before the first. It is dropped as the others are: who has forgotten the first
    products cannot begin with them again.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._rounds = sorted(int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal())
        if not self._rounds:
            self.save(0, {})

    @property
    def rounds(self) -> tuple[int, ...]:
        """Those that can be gone back to: one at least."""
        return tuple(self._rounds)

    def save(self, round_: int, state: State) -> None:
        """Make one, safe on the disk when this returns; those of later rounds are void from now on."""
        with disk.writing(self._folder):
            self.drop(round_)
            disk.replace(self._path(round_), lambda scratch: save_file(dict(state), scratch))
            self._rounds.append(round_)
            for old in self._rounds[:-_KEPT]:
                self._path(old).unlink()
        self._rounds = self._rounds[-_KEPT:]

    def drop(self, since: int) -> None:
        """Remove those of this round and later ones."""
        for round_ in [each for each in self._rounds if each >= since]:
            self._path(round_).unlink()
            self._rounds.remove(round_)

    def load(self, round_: int) -> dict[str, Tensor]:
        """The tensors that were saved at the end of a round."""
        path = self._path(round_)
        try:
            state: dict[str, Tensor] = load_file(path)
        except Exception as error:  # safetensors has no common base for what it raises
            raise EdgeNodeError(
                f"the checkpoint {path} is damaged: {error}",
                "remove this file: the run then continues from the one before it",
            ) from error
        return state

    def _path(self, round_: int) -> Path:
        return self._folder / f"{round_:012}.safetensors"


def strip_prefix(prefix: str, state: State) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
