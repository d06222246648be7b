"""Checkpoints of a sensor or head: the newest are kept,
as files whose names hold their checksums.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage import checksums, disk

KEPT = 4  # enough to go back by two from a copy of the state folder that is as old
_NAME = re.compile(r"(\d{12})-([0-9a-f]{64})\.safetensors")
State = Mapping[str, Tensor]


class Checkpoints:
    """Checkpoints of one run, each named by the round at whose end it was made.

    EdgeNodeError if the disk fails.

    An empty one stands for round 0, before the first. It is dropped as the others are: who has
    forgotten the first products cannot begin with them again.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object], *, begun: bool = False):
        """Raise EdgeNodeError if all are damaged, or gone though the run has `begun`;
        `warn` is told of one.
        """
        self._folder = folder
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        found = {
            path: match
            for path in sorted(folder.iterdir())
            if (match := _NAME.fullmatch(path.name))
        }
        self._files = {
            int(m[1]): path for path, m in found.items() if checksums.digest_of(path) == m[2]
        }
        if not self._files and (found or begun):
            raise EdgeNodeError(
                f"no checkpoint in {folder} is left undamaged",
                f"restore the folder {folder.parent} from a copy, or remove {folder} and let the "
                "head begin another run: edge-node vfl coordinate --new",
            )
        for path in found.keys() - self._files.values():
            warn(
                f"the checkpoint {path} is damaged and removed: the newest left is that of round "
                f"{max(self._files)}"
            )
            with disk.writing(folder):
                path.unlink()
        if not self._files:
            self.save(0, {})

    @property
    def rounds(self) -> tuple[int, ...]:
        """Those that can be gone back to: one at least."""
        return tuple(self._files)

    def save(self, round_: int, state: State) -> None:
        """Make one, safe on the disk when this returns;
        those of later rounds are void from now on.
        """
        data = save(dict(state))
        path = self._folder / f"{round_:012}-{checksums.digest(data)}.safetensors"
        with disk.writing(self._folder):
            self.drop(round_)
            disk.replace_bytes(path, data)
            self._files[round_] = path
            for old in self.rounds[:-KEPT]:
                self._files.pop(old).unlink()

    def drop(self, since: int) -> None:
        """Remove those of this round and later ones."""
        for round_ in [each for each in self._files if each >= since]:
            self._files.pop(round_).unlink(missing_ok=True)

    def load(self, round_: int) -> dict[str, Tensor]:
        """The tensors that were saved at the end of a round."""
        state: dict[str, Tensor] = load(self._files[round_].read_bytes())
        return state


def strip_prefix(prefix: str, state: State) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, under their names without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
