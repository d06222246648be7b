"""The encoders, by the names that `--model` takes.

To add one: write its file, and register it in a `pyproject.toml`.
"""

from broker_config.registry import Registry
from trainer.models.encoders.encoder import Encoder

ENCODERS: Registry[Encoder] = Registry("encoders")
