"""Options as people write them: what is wrong is named, with what would be right."""

from typing import Annotated, Literal

import msgspec
import pytest

from broker_config.protocol.errors import UsageError
from trainer.option_values import read_options


class Options(msgspec.Struct, frozen=True, kw_only=True):
    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    mode: Literal["mean", "median"] = "mean"


class NoOptions(msgspec.Struct, frozen=True):
    pass


def test_texts_are_read_as_the_type_of_their_field() -> None:
    assert read_options(Options, "method", {"rate": "0.25"}) == Options(rate=0.25)


@pytest.mark.parametrize(
    ("kind", "given", "message", "remedy"),
    [
        (Options, {"rte": 1}, "method has no option 'rte'", "did you mean 'rate'"),
        (NoOptions, {"rate": 1}, "method has no option 'rate'", "leave it out"),
        (Options, {"rate": -1}, "cannot have this value", "give rate a value above 0"),
        (Options, {"rate": "fast"}, "cannot have this value", "give rate a value of its type"),
        (Options, {"mode": "max"}, "cannot have this value", "mode is one of mean, median"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(
    kind: type[msgspec.Struct], given: dict[str, object], message: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_options(kind, "method", given)
    assert remedy in caught.value.remedy
