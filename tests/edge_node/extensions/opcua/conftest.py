"""What the tests of sources share."""

from tests.support.source_fixtures import impatient, instance, model

__all__ = ["impatient", "instance", "model"]
