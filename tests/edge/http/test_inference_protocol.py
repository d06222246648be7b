"""Open Inference Protocol (v2), as a client speaks it that nobody here wrote: tritonclient,
over HTTP.
"""

import base64
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import getrandbits
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from PIL import Image as Picture

from edge.bundle.bundle_format import Bundle
from edge.http.inference_protocol import InvalidRequestError, parse
from edge.inference.image_decoding import MAX_BYTES, decode_image
from edge.inference.served_model import load_model
from tests.support.daemon_process import Daemon, daemon
from tests.support.tiny_bundle import BLUE, CLASSES, GREEN, RED, tiny_bundle, tiny_probabilities
from tests.support.triton_inputs import files, tensor

SIZE = 16
MODEL = "press-3"
INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("oip") / "bundle", size=SIZE, node=MODEL, round_=30)


@pytest.fixture(scope="module")
def line(bundle: Bundle) -> Iterator[Daemon]:
    with daemon(bundle.folder) as running:
        yield running


@pytest.fixture
def client(line: Daemon) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{line.url.port}") as found:
        yield found


def pictures(count: int) -> NDArray[np.uint8]:
    seed = getrandbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


# ---------------------------------------------------------------- what is served


def test_it_is_alive_and_ready_and_tells_what_it_serves(
    client: triton.InferenceServerClient,
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "30")
    server = client.get_server_metadata()
    assert (server["name"], server["extensions"]) == (
        "edge-node",
        ["binary_tensor_data", "classification"],
    )
    model = client.get_model_metadata(MODEL)
    assert model == client.get_model_metadata(MODEL, "30")
    assert (model["name"], model["versions"], model["platform"]) == (
        MODEL,
        ["30"],
        "onnxruntime_onnx",
    )
    assert model["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, SIZE, SIZE, 3]}]
    assert model["outputs"] == [{"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]}]


def test_another_model_or_version_is_not_there(client: triton.InferenceServerClient) -> None:
    assert not client.is_model_ready("press-4")
    assert not client.is_model_ready(MODEL, "29")
    for name, version in (("press-4", ""), (MODEL, "29")):
        with pytest.raises(triton.InferenceServerException) as caught:
            client.infer(name, [tensor(pictures(1))], version)
        assert caught.value.status() == "404"


# ---------------------------------------------------------------- what is asked, in every way


@pytest.mark.parametrize("count", [1, 3, 21])
@pytest.mark.parametrize("binary", [True, False])
def test_tensors_in_binary_and_in_json_give_what_the_network_computes(
    client: triton.InferenceServerClient, count: int, *, binary: bool
) -> None:
    images = pictures(count)
    wanted = [triton.InferRequestedOutput("probabilities", binary_data=binary)]
    answer = client.infer(MODEL, [tensor(images, binary=binary)], "30", wanted, request_id="part 7")
    assert answer.as_numpy("probabilities") == pytest.approx(tiny_probabilities(images), abs=1e-6)
    response = answer.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == (
        MODEL,
        "30",
        "part 7",
    )
    assert response["outputs"][0]["datatype"] == "FP32"
    assert ("data" in response["outputs"][0]) is not binary


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests_are_the_same(
    client: triton.InferenceServerClient, compression: str
) -> None:
    images = pictures(2)
    answer = client.infer(MODEL, [tensor(images)], request_compression_algorithm=compression)
    assert answer.as_numpy("probabilities") == pytest.approx(tiny_probabilities(images), abs=1e-6)


def test_image_files_are_decoded_as_the_line_decodes_them(
    client: triton.InferenceServerClient,
) -> None:
    large = io.BytesIO()
    Picture.fromarray(pictures(1)[0]).resize((70, 50)).save(large, "JPEG")
    contents = [RED, large.getvalue(), *[BLUE] * 8, GREEN]
    answer = client.infer(MODEL, [files(*contents)])
    expected = tiny_probabilities(np.stack([decode_image(content, SIZE) for content in contents]))
    assert answer.as_numpy("probabilities") == pytest.approx(expected, abs=1e-6)


def test_the_likeliest_classes_are_told_by_name(client: triton.InferenceServerClient) -> None:
    for binary in (True, False):
        wanted = [triton.InferRequestedOutput("probabilities", binary_data=binary, class_count=2)]
        found = client.infer(MODEL, [files(GREEN, BLUE)], outputs=wanted).as_numpy("probabilities")
        assert found.shape == (2, 2)
        words = [word.decode() if isinstance(word, bytes) else word for word in found[:, 0]]
        assert [word.split(":")[1:] for word in words] == [["1", "green"], ["2", "blue"]]


def test_json_alone_is_enough_nested_and_with_files_as_base64(line: Daemon) -> None:
    images = pictures(2)
    answer = line.client.post(INFER, json={"inputs": [about(images, data=images.tolist())]})
    assert (
        answer.headers["x-model"]
        == answer.json()["parameters"]["model"]
        == line.client.get("/").json()["digest"]
    )
    assert answer.json()["outputs"][0]["data"] == pytest.approx(
        tiny_probabilities(images).ravel(), abs=1e-6
    )
    file = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(RED).decode()],
    }
    answer = line.client.post(
        INFER, json={"inputs": [file], "outputs": [{"name": "probabilities"}]}
    )
    assert np.argmax(answer.json()["outputs"][0]["data"]) == CLASSES.index("red")


def test_nobody_else_hears_of_what_a_program_asks(line: Daemon) -> None:
    before = line.client.get("/metrics").text
    assert line.client.post(INFER, json={"inputs": [about(pictures(1))]}).status_code == 200
    verdicts = [
        row for row in line.client.get("/metrics").text.splitlines() if "verdicts_total" in row
    ]
    assert verdicts == [row for row in before.splitlines() if "verdicts_total" in row]


# ---------------------------------------------------------------- what is no request


def about(images: NDArray[np.uint8], **changes: Any) -> dict[str, Any]:
    """An input in JSON, as it should be but for the changes."""
    shape = list(images.shape)
    return {
        "name": "image",
        "datatype": "UINT8",
        "shape": shape,
        "data": images.ravel().tolist(),
    } | changes


ONE = np.zeros((1, SIZE, SIZE, 3), np.uint8)
BINARY = {"name": "image", "datatype": "UINT8", "shape": [1, SIZE, SIZE, 3]}
FILES = {"name": "image", "datatype": "BYTES", "shape": [1]}


def ragged() -> list[Any]:
    found = ONE.tolist()
    found[0][0][1].append(found[0][0][0].pop())
    return found


MISFITS = {
    "no JSON": b"{",
    "no object": b"[]",
    "no text": b"\xff\xfe",
    "deep": b"[" * 60_000,
    "no inputs": {},
    "none": {"inputs": []},
    "two": {"inputs": [about(ONE), about(ONE)]},
    "another name": {"inputs": [about(ONE, name="picture")]},
    "another type": {"inputs": [about(ONE, datatype="FP32")]},
    "another shape": {"inputs": [about(ONE, shape=[1, 3, SIZE, SIZE])]},
    "flat shape": {"inputs": [about(ONE, shape=[ONE.size])]},
    "no shape": {"inputs": [about(ONE, shape=[])]},
    "negative shape": {"inputs": [about(ONE, shape=[-1, SIZE, SIZE, 3])]},
    "huge shape": {"inputs": [about(ONE, shape=[10**30, SIZE, SIZE, 3])]},
    "empty": {"inputs": [about(ONE, shape=[0, SIZE, SIZE, 3], data=[])]},
    "too few": {"inputs": [about(ONE, data=[0] * 767)]},
    "too many": {"inputs": [about(ONE, data=[0] * 769)]},
    "too large": {"inputs": [about(ONE, data=[256, *[0] * 767])]},
    "below": {"inputs": [about(ONE, data=[-1, *[0] * 767])]},
    "fractions": {"inputs": [about(ONE, data=[0.5, *[0] * 767])]},
    "words": {"inputs": [about(ONE, data=["0", *[0] * 767])]},
    "ragged": {"inputs": [about(ONE, data=ragged())]},
    "turned": {"inputs": [about(ONE, data=ONE.reshape(3, 1, SIZE, SIZE).tolist())]},
    "no data": {"inputs": [BINARY]},
    "both": {"inputs": [about(ONE, parameters={"binary_data_size": 768})]},
    "no bytes": {"inputs": [BINARY | {"parameters": {"binary_data_size": 768}}]},
    "another output": {"inputs": [about(ONE)], "outputs": [{"name": "logits"}]},
    "twice": {"inputs": [about(ONE)], "outputs": [{"name": "probabilities"}] * 2},
    "no Base64": {"inputs": [FILES | {"data": ["?"]}]},
    "no strings": {"inputs": [FILES | {"data": [7]}]},
    "fewer files": {"inputs": [FILES | {"data": ["AAAA"], "shape": [2]}]},
    "more files": {"inputs": [FILES | {"data": ["AAAA"] * 2}]},
    "more images than are taken": {"inputs": [FILES | {"data": [""] * 1025, "shape": [1025]}]},
    "files of two axes": {"inputs": [FILES | {"data": ["AAAA"], "shape": [1, 1]}]},
    "no name": {"inputs": [about(ONE)], "id": 7},
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused_with_its_reason(line: Daemon, what: str) -> None:
    content = MISFITS[what]
    answer = line.client.post(
        INFER, content=content if isinstance(content, bytes) else json.dumps(content)
    )
    assert (answer.status_code, set(answer.json())) == (400, {"error", "remedy"})
    assert answer.json()["error"].startswith("the inference request does not fit: ")


@pytest.mark.parametrize(
    ("size", "header", "rest", "given"),
    [
        (768, 0, 767, {}),
        (767, 0, 767, {}),
        (768, 0, 769, {}),
        (768, 1, 768, {}),
        (768, -1, 768, {}),
        (768, 1000, 768, {}),
        (2**64, 0, 768, {}),
        (768, 0, 0, {}),
        (0, 0, 0, {}),
        (8, 0, 8, FILES),
        (3, 0, 3, FILES),
        (12, 0, 12, FILES),
    ],
)
def test_binary_tensors_whose_lengths_lie_are_refused(
    line: Daemon, size: int, header: int, rest: int, given: dict[str, Any]
) -> None:
    head = json.dumps(
        {"inputs": [BINARY | given | {"parameters": {"binary_data_size": size}}]}
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head) + header)}
    assert (
        line.client.post(INFER, content=head + b"\xff" * rest, headers=headers).status_code == 400
    )


MANY = {
    "inputs": b'{"inputs":[%s{}]}' % (b'{"name":"image","datatype":"UINT8","shape":[]},' * 200_000),
    "outputs": b'{"inputs":[%s],"outputs":[%s{}]}'
    % (json.dumps(about(ONE)).encode(), b'{"name":"probabilities"},' * 200_000),
}


@pytest.mark.parametrize("what", MANY)
def test_of_a_list_of_thousands_nothing_is_built(what: str, bundle: Bundle) -> None:
    """Objects of a whole request would take a gigabyte, and keep everybody waiting for seconds."""
    with pytest.raises(InvalidRequestError) as refused:
        parse(MANY[what], None, bundle.manifest)
    assert "[200000]" not in str(refused.value), "who builds them all finds the last one wrong"


@pytest.mark.parametrize("length", ["-1", "x", "", "1e3", "9" * 5000])
def test_a_length_of_the_header_that_is_no_number_is_refused(line: Daemon, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    assert (
        line.client.post(INFER, json={"inputs": [about(ONE)]}, headers=headers).status_code == 400
    )


def test_faults_of_http_have_their_own_status(line: Daemon) -> None:
    post, body = line.client.post, json.dumps({"inputs": [about(ONE)]}).encode()
    bomb = gzip.compress(bytes(MAX_BYTES + 1))
    zipped = {"Content-Encoding": "gzip"}
    assert line.client.get("/v3").status_code == 404
    answer = line.client.get(INFER)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert line.client.head("/v2").status_code == 200
    assert post(INFER, content=body, headers={"Content-Encoding": "br"}).status_code == 415
    assert post("/classify", files={"image": RED}).status_code == 415
    assert post(INFER, content=bomb, headers=zipped).status_code == 413
    assert post(INFER, content=bytes(MAX_BYTES + 1)).status_code == 413
    for broken in (
        body,
        gzip.compress(body)[:-9],
        gzip.compress(body) + b"more",
        zlib.compress(body, wbits=-15),
    ):
        assert post(INFER, content=broken, headers=zipped).status_code == 400
    no_image = {"inputs": [FILES | {"data": ["AAAA"]}]}
    assert post(INFER, json=no_image).status_code == 422
    assert "image 0" in post(INFER, json=no_image).json()["error"]
    assert post(f"/classify?name={'x' * 201}", content=RED).status_code == 400
    assert post(INFER, content=body).status_code == 200


# ---------------------------------------------------------------- what else the model says


def test_every_output_of_the_model_can_be_had(tmp_path: Path) -> None:
    folder = tiny_bundle(tmp_path / "bundle", size=SIZE, extras=True).folder
    images = pictures(11)
    expected = load_model(folder).predictor.run(images, ("opinions", "features", "maps"))
    with (
        daemon(folder) as line,
        triton.InferenceServerClient(f"127.0.0.1:{line.url.port}") as client,
    ):
        model = client.get_model_metadata("tiny")
        answer = client.infer("tiny", [tensor(images)])
        in_json = client.infer(
            "tiny",
            [tensor(images)],
            outputs=[
                triton.InferRequestedOutput(name, binary_data=False)
                for name in ("maps", "opinions")
            ],
        )
    assert [each["name"] for each in model["outputs"]] == [
        "probabilities",
        "opinions",
        "features",
        "maps",
    ]
    assert [each["name"] for each in in_json.get_response()["outputs"]] == ["maps", "opinions"]
    for each in model["outputs"]:
        values = getattr(expected, each["name"])
        assert all(
            said in (-1, there) for said, there in zip(each["shape"], values.shape, strict=True)
        )
        assert np.array_equal(answer.as_numpy(each["name"]), values)
    for name in ("maps", "opinions"):
        assert in_json.as_numpy(name) == pytest.approx(getattr(expected, name))
