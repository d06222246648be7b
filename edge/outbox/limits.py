"""Limits of a line's outbox: table `[spool]` of its settings."""

from typing import Annotated

from msgspec import Meta, Struct


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much may wait for receivers that are away;
    beyond either limit the oldest outcomes are dropped.
    """

    outcomes: Annotated[int, Meta(ge=1)] = 1_000_000
    megabytes: Annotated[int, Meta(ge=1)] = 1024
