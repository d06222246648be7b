"""The topics of bundle delivery are those that its page names."""

import inspect
from collections.abc import Callable

import pytest

from edge_node.extensions.bundle_delivery import topics
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "bundle-delivery.md").read_text()


@pytest.mark.parametrize("topic", [topics.offers, topics.answers], ids=lambda each: each.__name__)
def test_every_topic_is_on_the_page(topic: Callable[..., str]) -> None:
    names = (f"{{{name}}}" for name in inspect.signature(topic).parameters)
    assert f"`{topic(*names)}`" in PAGE
