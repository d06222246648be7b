"""Spec of a vertical federation: parsing and validation of what was asked for. Without torch."""

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.errors import UsageError, abbreviate, suggest
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.policies.selection import make_policy

_HEAD = "head"  # edge_node.extensions.vfl.networks.HEAD, which needs torch
_MOST = 1000  # classes
_LARGEST = 1e12  # number that a class may be
_NETWORKS = ("dense", "conv")  # those for rows of a file
_OPTIONS = {
    "labels": "--labels-stay",
    "window.size": "--window",
    "channel.levels": "--noise",
    "channel.dither": "--noise",
    "channel.sigma": "--noise",
    "channel.loss": "--noise",
    "denoising.rounds": "--denoise",
    "denoising.target": "--denoise-with",
    "denoising.shared": "--denoiser",
    "privacy.multiplier": "--protect",
}
"""Options of `vfl coordinate` that are called otherwise than the setting."""
_VALUES: dict[str, dict[Any, str]] = {
    "labels": {"shared": "not given", "server": "given"},
    "denoising.shared": {True: "shared", False: "each"},
}
"""What values are called there, if otherwise."""


def new_run_id() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


def parse_classes(text: str) -> tuple[str, ...]:
    """Labels as people write them: names with commas between, or whole numbers as 0..130."""
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        numbers = range(int(first), int(last) + 1)
    except ValueError:
        numbers = range(0)
    if not 2 <= len(numbers) <= _MOST:
        raise UsageError(
            f"the classes {text!r} are no range of 2 to {_MOST} numbers", "write for example 0..130"
        )
    return tuple(map(str, numbers))


def validate(spec: VflSpec) -> None:
    """Raise UsageError for what cannot be."""
    topics.check_federation(spec.federation)
    if not spec.sensors:
        raise UsageError("the names of the sensors are missing", "write them as --sensors a,b,c")
    for name in spec.sensors:
        topics.check_node(name)
        if name == _HEAD:
            raise UsageError(
                f"a sensor cannot be named {name!r}: the head's random numbers are drawn by that",
                "rename it",
            )
    for what, names in (("sensor", spec.sensors), ("class", spec.classes)):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"the {what} {twice[0]!r} is named twice", "name each once")
    if len(spec.classes) < 2:
        raise UsageError(
            "a vertical federation needs two classes or more",
            "write for example --classes good,bad",
        )
    if spec.network not in _NETWORKS:
        raise UsageError(
            f"the sensors cannot have the network {spec.network!r}",
            suggest(spec.network, _NETWORKS),
        )
    if spec.reading == "expectation":
        _check_numbers(spec.classes)
    check_combinations(spec)
    make_policy(spec.policy, spec.iterations, len(spec.sensors), lambda _: None)
    try:
        msgspec.json.decode(encode(spec), type=VflSpec)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"there can be no such vertical federation: {error}",
            "see edge-node vfl coordinate --help",
        ) from error


def describe_changes(old: VflSpec, new: VflSpec) -> str:
    """The settings that differ, by their options, with both values."""
    before = _flatten(msgspec.to_builtins(old))
    after = _flatten(msgspec.to_builtins(new))
    return ", ".join(
        (
            f"{_name_option(name)} (was {_name_value(name, before[name])}, now "
            f"{_name_value(name, after[name])})"
        )
        for name in after
        if after[name] != before[name]
    )


def _name_option(setting: str) -> str:
    return _OPTIONS.get(setting, f"--{setting.rpartition('.')[2].replace('_', '-')}")


def _name_value(setting: str, value: Any) -> str:
    if setting in _VALUES:
        return _VALUES[setting][value]
    text = ",".join(value) if isinstance(value, list | tuple) else str(value)
    return abbreviate(text, 60)


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All fields, those of nested structs with a dotted name."""
    found = dict[str, Any]()
    for name, value in fields.items():
        found |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return found


def _check_numbers(classes: tuple[str, ...]) -> None:
    try:
        if not all(abs(float(name)) <= _LARGEST for name in classes):  # NaN is no such number
            raise ValueError(f"one of them is beyond {_LARGEST:g}")
    except ValueError as error:
        raise UsageError(
            f"the classes are to be numbers, whose mean is the result: {error}",
            "leave out --reading expectation, or write for example --classes 0..130",
        ) from error


def check_combinations(spec: VflSpec) -> None:
    """Raise UsageError, with the reason, where protection and denoising contradict one another."""
    privacy = spec.privacy
    denoising = spec.denoising
    if bool(privacy.clip) != bool(privacy.multiplier):
        raise UsageError(
            "embeddings are protected by a clip and noise together, and one of them is 0",
            "give both --clip and --protect, or neither",
        )
    if privacy.clip and denoising.rounds and denoising.target == "clean":
        raise UsageError(
            "the embeddings are to be protected, but the denoiser asks for them as they are",
            "add --denoise-with noisy, or leave out --denoise",
        )
    if denoising.rounds and denoising.target == "noisy":
        _check_noisy_copies(spec)


def _check_noisy_copies(spec: VflSpec) -> None:
    """Raise UsageError unless the two copies that a denoiser learns from differ,
    with errors of mean zero.
    """
    channel = spec.channel
    if channel.levels and not channel.dither:
        raise UsageError(
            "the denoiser cannot learn from two copies of what a quantiser rounds: it rounds "
            "both alike",
            "have the quantiser dither (--noise levels=3,dither), or leave out "
            "--denoise-with noisy",
        )
    if not (channel.levels or channel.sigma or spec.privacy.clip):
        raise UsageError(
            "the denoiser cannot learn from two copies on this channel: both are the same",
            "leave out --denoise",
        )
