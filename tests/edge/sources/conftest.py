"""What the tests of sources share."""

from tests.support.source_fixtures import camera, impatient, instance, model

__all__ = ["camera", "impatient", "instance", "model"]
