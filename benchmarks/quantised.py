"""Gains and losses of int8: `python -m benchmarks.quantised RUN/*/model [--sizes 128,224]`.

All in one run, on the images that were held out of each model. Latencies are of one image at a
time, all variants in turns, as the line runs them; the tenth percentile is what they take where
nothing else disturbs them.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
import onnxruntime

from edge.inference.predictor import session_options
from export import held_out
from export.graph import Architecture, build_module, fill_values, trace
from export.model_images import ImageFinder
from export.quantisation import quantise
from trainer.data.class_folders import LabelledImages
from trainer.models.fusion import infer_fusion
from trainer.models.network import Tensors
from trainer.training import personal_model

_RUNS, _WARM_UP = 200, 20
_FP32, _INT8 = "fp32", "int8"


class Node(NamedTuple):
    """A model's graphs by variant, and what judges them."""

    name: str
    graphs: dict[str, bytes]
    held_out: LabelledImages


class Tracer:
    """Models -> graphs for images of a size that need not be the model's own."""

    def __init__(self, size: int):
        self._size = size
        self._traced: dict[Architecture, onnx.ModelProto] = {}

    def node(self, source: Path) -> Node:
        """All variants of a personal model."""
        metadata, tensors, *_ = personal_model.load(source)
        metadata = msgspec.structs.replace(
            metadata, preprocessing=msgspec.structs.replace(metadata.preprocessing, size=self._size)
        )
        finder = ImageFinder()
        judging, training = (
            held_out.load(source, metadata, finder),
            finder.training(source, metadata),
        )
        if isinstance(judging, str):
            raise SystemExit(f"{source}: {judging}")
        exact = self._graph(metadata, tensors, source)
        return Node(metadata.node, {_FP32: exact, _INT8: quantise(exact, training.images)}, judging)

    def _graph(
        self, metadata: personal_model.ModelMetadata, tensors: Tensors, source: Path
    ) -> bytes:
        architecture = Architecture(
            metadata.model, len(metadata.classes), infer_fusion(tensors), metadata.preprocessing
        )
        served = build_module(architecture, tensors, source)
        if architecture not in self._traced:
            self._traced[architecture] = trace(served, self._size)
        return fill_values(self._traced[architecture], served)


class Latency(NamedTuple):
    """Of a run of one image."""

    p50: float  # milliseconds
    p10: float
    cpu: float  # milliseconds of processor time a run, mean


def latencies(
    graphs: dict[str, bytes], images: np.ndarray, threads: int, *, spin: bool = False
) -> dict[str, Latency]:
    """Of each graph, in turns."""
    sessions = {}
    for name, graph in graphs.items():
        options = session_options(threads)
        if spin:
            options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        sessions[name] = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )
    wall: dict[str, list[float]] = {name: [] for name in graphs}
    cpu: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(_WARM_UP + _RUNS):
        image = images[turn % len(images)][None]
        for name, session in sessions.items():
            began, spent = time.perf_counter(), time.process_time()
            session.run(["probabilities"], {"image": image})
            wall[name].append((time.perf_counter() - began) * 1000)
            cpu[name].append((time.process_time() - spent) * 1000)
    return {
        name: Latency(
            float(np.median(wall[name][_WARM_UP:])),
            float(np.quantile(wall[name][_WARM_UP:], 0.1)),
            float(np.mean(cpu[name][_WARM_UP:])),
        )
        for name in graphs
    }


def convolutions(graph: bytes, images: np.ndarray) -> dict[str, float]:
    """Undisturbed milliseconds that an image's convolutions take on one thread, by their kind."""
    with tempfile.TemporaryDirectory() as folder:
        options, optimised = session_options(1), Path(folder) / "optimised.onnx"
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
        options.optimized_model_filepath = str(optimised)
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        for turn in range(_RUNS):
            session.run(["probabilities"], {"image": images[turn % len(images)][None]})
        events = json.loads(Path(session.end_profiling()).read_text())
        nodes = onnx.load(optimised).graph.node
    spent = defaultdict[str, list[float]](list)
    for event in events:
        spent[event["name"]].append(event["dur"] / 1000)
    found = dict.fromkeys(("depthwise", "pointwise", "others"), 0.0)
    for node in nodes:
        if node.op_type in ("Conv", "FusedConv", "QLinearConv"):
            settings = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            single = settings["kernel_shape"] == [1, 1]
            kind = "pointwise" if single else "depthwise" if settings["group"] > 1 else "others"
            found[kind] += float(np.quantile(spent[f"{node.name}_kernel_time"], 0.1))
    return found


def judged(nodes: Sequence[Node], variant: str) -> dict[str, object]:
    """Verdicts that are those of the exact graph, by node, and accuracy over all nodes."""

    def classes(graph: bytes, images: np.ndarray) -> np.ndarray:
        session = onnxruntime.InferenceSession(graph, session_options())
        found = [session.run(["probabilities"], {"image": image[None]})[0] for image in images]
        return np.asarray(np.concatenate(found).argmax(1))

    same, right, images = {}, 0, 0
    for node in nodes:
        exact, faster = (
            classes(node.graphs[name], node.held_out.images) for name in (_FP32, variant)
        )
        same[node.name] = round(float((exact == faster).mean()), 4)
        right += int((faster == node.held_out.labels).sum())
        images += len(faster)
    return {"same": same, "accuracy": round(right / images, 4), "images": images}


def main() -> None:
    """Print a JSON line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--sizes", default="128,224")
    arguments = parser.parse_args()
    for size in map(int, arguments.sizes.split(",")):
        tracer = Tracer(size)
        nodes = [tracer.node(source) for source in arguments.models]
        for variant, graph in nodes[0].graphs.items():
            print(
                json.dumps(
                    {
                        "size": size,
                        "variant": variant,
                        "bytes": len(graph),
                        **judged(nodes, variant),
                    }
                ),
                flush=True,
            )
        for variant, graph in nodes[0].graphs.items():
            spent = convolutions(graph, nodes[0].held_out.images)
            told = {kind: round(milliseconds, 2) for kind, milliseconds in spent.items()}
            print(json.dumps({"size": size, "variant": variant, "convolutions": told}), flush=True)
        for threads, spin in ((1, False), (2, False), (2, True)):
            for variant, latency in latencies(
                nodes[0].graphs, nodes[0].held_out.images, threads, spin=spin
            ).items():
                told = {name: round(value, 2) for name, value in latency._asdict().items()}
                print(
                    json.dumps(
                        {"size": size, "variant": variant, "threads": threads, "spin": spin, **told}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
