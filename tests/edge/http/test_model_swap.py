"""While models are exchanged under load, each answer is of one model, and says of which."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random, getrandbits

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from edge.inference.served_model import load_model
from tests.support import tiny_bundle
from tests.support.daemon_process import Daemon, daemon
from tests.support.triton_inputs import files, tensor

CLIENTS, REQUESTS = 3, 60
SHARPNESS = {1: 10.0, 2: 5.0}  # by round

SWAPPING = """
import threading, time
from random import Random
import edge.daemon.daemon
from edge.inference.served_model import load_model

class Swapped(edge.daemon.daemon.App):
    def __init__(self, line, *arguments):
        super().__init__(line, *arguments)
        for seed in (1, 2):
            threading.Thread(target=self.swap, args=(line, Random(seed)), daemon=True).start()

    def swap(self, line, random):
        models = [load_model(folder) for folder in {folders}]
        while True:
            line.model = random.choice(models)
            time.sleep(random.random() / 500)

edge.daemon.daemon.App = Swapped
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two rounds of one node's model, which are not equally sure of what they see."""
    folder = tmp_path_factory.mktemp("swap")
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        for round_, sharpness in SHARPNESS.items():
            patch.setattr(tiny_bundle, "SHARPNESS", sharpness)
            found[round_] = tiny_bundle.tiny_bundle(folder / str(round_), round_=round_).folder
    return found


def expected(images: np.ndarray, round_: int) -> np.ndarray:
    powers = np.exp(SHARPNESS[round_] * images.mean((1, 2)) / 255)
    return powers / powers.sum(1, keepdims=True)


def test_no_answer_mixes_two_models(bundles: dict[int, Path]) -> None:
    seed = getrandbits(32)
    print(f"seed {seed}")
    digests = {load_model(folder).digest: round_ for round_, folder in bundles.items()}
    folders = ", ".join(f"Path({str(folder)!r})" for folder in bundles.values())
    before = "from pathlib import Path\n" + SWAPPING.replace("{folders}", f"[{folders}]")
    with daemon(bundles[1], before=before) as line, ThreadPoolExecutor(CLIENTS) as pool:
        found = list(
            pool.map(lambda number: ask(line, Random(seed + number), digests), range(CLIENTS))
        )
    answered = sum(found, Counter())
    assert answered.total() == CLIENTS * REQUESTS
    assert (
        min(answered[kind, round_] for kind in (tensors, jpegs, verdicts) for round_ in SHARPNESS)
        > 3
    ), answered


def ask(line: Daemon, random: Random, digests: dict[str, int]) -> Counter:
    """Ask in several ways; how many answers each round's model gave to each."""
    found: Counter = Counter()
    with (
        httpx.Client(base_url=line.url) as client,
        triton.InferenceServerClient(f"127.0.0.1:{line.url.port}") as other,
    ):
        for _ in range(REQUESTS):
            way = random.choice((tensors, jpegs, verdicts))
            digest, bundle, images, probabilities = way(
                client, other, np.random.default_rng(random.getrandbits(32))
            )
            round_ = digests[digest]
            assert bundle == f"tiny@{round_}"
            assert probabilities == pytest.approx(expected(images, round_), abs=1e-5)
            found[way, round_] += 1
    return found


def tensors(_client, other, random):
    """So many images that they are computed in three goes."""
    images = random.integers(0, 256, (20, 16, 16, 3), np.uint8)
    return told(other.infer("tiny", [tensor(images)]), images)


def jpegs(_client, other, random):
    colours = random.integers(0, 256, (10, 3))
    images = np.broadcast_to(colours[:, None, None], (10, 16, 16, 3)).astype(np.uint8)
    return told(
        other.infer("tiny", [files(*(tiny_bundle.png(tuple(each)) for each in colours.tolist()))]),
        images,
    )


def told(answer, images):
    response = answer.get_response()
    about = response["parameters"]
    assert about["bundle"] == f"{response['model_name']}@{response['model_version']}"
    return about["model"], about["bundle"], images, answer.as_numpy("probabilities")


def verdicts(client, _other, random):
    colour = random.integers(0, 256, 3)
    answer = client.post("/classify", content=tiny_bundle.png(tuple(colour.tolist())))
    verdict = answer.json()
    assert answer.headers["x-model"] == verdict["model"]
    images = np.broadcast_to(colour, (1, 16, 16, 3)).astype(np.uint8)
    return (
        verdict["model"],
        verdict["bundle"],
        images,
        np.array([list(verdict["probabilities"].values())]),
    )
