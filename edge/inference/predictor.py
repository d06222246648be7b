"""The predictor: a bundle's classifier in onnxruntime, on the CPU."""

import itertools
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from broker_config.protocol.errors import explain_scarcity
from edge.bundle import reference
from edge.bundle.bundle_format import CLASSIFIER, Bundle, BundleError, copied_to_memory
from edge.inference.image_decoding import decode_image


class Progress:
    """Counter of this process's steps, tiles classified and frames decoded:
    tells a slow process from a hung one.
    """

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self.steps = 0

    def step(self) -> None:
        """Count one more; from any thread."""
        self.steps = next(self._count)


PROGRESS = Progress()


class Outputs(NamedTuple):
    """The graph's outputs for N images; None where it has no such output, or none was requested."""

    probabilities: NDArray[np.float32]  # [N, classes]
    # [N, encoders, classes]: each encoder's own probabilities
    opinions: NDArray[np.float32] | None = None
    # [N, features]: the input of the classification layer
    features: NDArray[np.float32] | None = None
    maps: NDArray[np.float32] | None = None  # [N, encoders, classes, h, w]: class activation maps


def session_options(threads: int = 0) -> onnxruntime.SessionOptions:
    """Options with which onnxruntime runs a graph on the line; `threads` 0 means two,
    or one on a single core.

    Threads do not spin while they wait: a line waits most of the time. Where an x86 processor has
    no instruction for int8 products (VNNI), the sums of onnxruntime's usual kernels would overflow;
    slower kernels are chosen there.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or min(2, os.cpu_count() or 1)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    disabled = "0" if _has_vnni() else "1"
    options.add_session_config_entry("session.x64quantprecision", disabled)
    return options


@cache
def _has_vnni() -> bool:
    """Whether the processor is known to add up int8 products exactly."""
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class Predictor:
    """A bundle's classifier, loaded with `session_options`. For one thread at a time."""

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        # statistics of the held-out images, if the bundle has them
        self.reference = reference.load_reference(bundle)
        graph = self.manifest.roles[CLASSIFIER]
        with copied_to_memory(bundle.folder, graph) as path:
            try:
                self._session = onnxruntime.InferenceSession(
                    path, session_options(threads), providers=["CPUExecutionProvider"]
                )
            # onnxruntime has a dozen exceptions of its own, with no common base
            except Exception as error:
                raise explain_scarcity(error) or BundleError(
                    f"{bundle.folder / graph.file} cannot be loaded: {error}",
                    "export the model again",
                ) from error

    def run(self, images: NDArray[np.uint8], extras: Sequence[str] = ()) -> Outputs:
        """uint8 [N, size, size, 3] RGB -> probabilities, and those of `extras`
        (opinions, features, maps) that exist.

        ValueError for any other shape or type.
        """
        size = self.manifest.input.size
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, 3):
            raise ValueError(
                f"expected uint8 [N, {size}, {size}, 3], got {images.dtype} {list(images.shape)}"
            )
        wanted = [name for name in extras if name in self.manifest.extras]
        probabilities, *others = self._session.run(
            [self.manifest.output, *wanted], {self.manifest.input.name: images}
        )
        return Outputs(probabilities, **dict(zip(wanted, others, strict=True)))

    def run_one_by_one(self, images: NDArray[np.uint8], extras: Sequence[str] = ()) -> Outputs:
        """As `run`, one image after another.

        On a CPU a batch computes no faster (two MobileNetV2 at 224 pixels: 12 to 17 ms an image in
        batches of 1 to 32), and takes 40 MB more for each of its images.
        """
        found = []
        for index in range(len(images)):
            found.append(self.run(images[index : index + 1], extras))
            PROGRESS.step()
        first, *others = found
        if not others:
            return first
        parts = {}
        for name in Outputs._fields:
            parts[name] = [getattr(each, name) for each in found]
        return Outputs(
            **{name: np.concatenate(each) for name, each in parts.items() if each[0] is not None}
        )

    def labels(self, images: NDArray[np.uint8]) -> list[str]:
        """uint8 [N, size, size, 3] RGB -> the likeliest class of each;
        ValueError for any other shape or type.
        """
        return [self.manifest.classes[best] for best in self.run(images).probabilities.argmax(1)]

    def self_test(self) -> None:
        """Raise BundleError unless the golden image gives the manifest's probabilities within
        its tolerance.

        The graph's other outputs must have the shapes that follow from the manifest and the
        reference.
        """
        golden = self.manifest.golden
        with copied_to_memory(self.bundle.folder, golden) as path:
            image = decode_image(path, self.manifest.input.size, golden.file)
        try:
            outputs = self.run(image[None], self.manifest.extras)
        # onnxruntime's own: other names or shapes than the manifest promises
        except Exception as error:
            raise BundleError(
                f"{self.bundle.folder} does not compute: {error}", "export the model again"
            ) from error
        found = outputs.probabilities
        expected = np.array([golden.probabilities], np.float32)
        if found.shape != expected.shape or not np.all(
            np.abs(found - expected) <= golden.tolerance
        ):
            raise BundleError(
                f"{self.bundle.folder} fails its self-test: {golden.file} gives {found.tolist()}, "
                f"expected {expected.tolist()}",
                "export the model again, or install the onnxruntime version it was exported with",
            )
        self._test_extras(outputs)

    def _test_extras(self, outputs: Outputs) -> None:
        classes = len(self.manifest.classes)
        encoders = len(self.manifest.encoders)
        dimensions = self.reference.features.shape[1] if self.reference else None
        shapes: dict[str, tuple[int | None, ...]] = {  # None: any
            "opinions": (1, encoders, classes),
            "features": (1, dimensions),
            "maps": (1, encoders, classes, None, None),
        }
        for name in self.manifest.extras:
            found = getattr(outputs, name).shape
            expected = shapes[name]
            matches = (b in (a, None) for a, b in zip(found, expected, strict=False))
            if len(found) != len(expected) or not all(matches):
                shape = []
                for each in expected:
                    shown = "any" if each is None else each
                    shape.append(shown)
                raise BundleError(
                    f"{self.bundle.folder} contradicts itself: its graph gives {name} "
                    f"{list(found)}, expected {shape}",
                    "export the model again",
                )
