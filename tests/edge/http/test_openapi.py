"""/openapi.json is a valid document, and true: the paths are those that are served,
the answers are as it says.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from edge.http.app import App
from edge.http.login import Accounts, Logins
from edge.http.prometheus_metrics import Metrics
from edge.http.web_app import Route
from edge.inference.pipeline import NullConsumer, Pipeline
from edge.inference.served_model import load_model
from edge.labelling.label_queue import LabelQueue, Settings
from edge.page.label_page import LabelPage
from edge.page.line_page import LinePage
from edge.page.recent_inspections import RecentInspections
from tests.support.daemon_process import Daemon, daemon
from tests.support.tiny_bundle import RED, tiny_bundle

ONE = {"name": "image", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [0] * 768}
MODEL = "/v2/models/{name}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("openapi") / "bundle").folder


@pytest.fixture(scope="module")
def line(bundle: Path) -> Iterator[Daemon]:
    with daemon(bundle) as running:
        yield running


@pytest.fixture(scope="module")
def document(line: Daemon) -> dict[str, Any]:
    found = line.client.get("/openapi.json").json()
    assert isinstance(found, dict)
    return found


def test_it_is_a_valid_document(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"] == "3.1.0"


def test_its_paths_are_those_that_are_served(bundle: Path, tmp_path: Path) -> None:
    recent = RecentInspections(NullConsumer())
    line = Pipeline(load_model(bundle), recent)
    line.close()
    queue = LabelQueue(Settings(path=str(tmp_path)), "line-1", lambda: None)
    labels = LabelPage("line-1", line, recent, queue)
    pages = [*LinePage("line-1", line, recent, lambda: None).routes, *labels.routes]
    app = App(line, Metrics(), pages=pages, logins=Logins(Accounts(bundle.parent)))
    labels.close()

    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://line") as client:
            found: dict[str, Any] = (await client.get("/openapi.json")).json()
            return found

    document = asyncio.run(ask())
    validate(document)
    served = {
        (route.path, route.method.lower()) for route in app.routes if isinstance(route, Route)
    }
    assert {
        (path, method) for path, methods in document["paths"].items() for method in methods
    } == served


@pytest.mark.parametrize(
    ("path", "method", "status", "options"),
    [
        ("/", "get", 200, {}),
        ("/v2", "get", 200, {}),
        ("/v2/health/live", "get", 200, {}),
        ("/v2/health/ready", "get", 200, {}),
        (MODEL, "get", 200, {}),
        (f"{MODEL}/versions/{{version}}", "get", 200, {}),
        (f"{MODEL}/ready", "get", 200, {}),
        (f"{MODEL}/infer", "post", 200, {"json": {"inputs": [ONE], "id": "7"}}),
        (f"{MODEL}/infer", "post", 400, {"content": b"{"}),
        (f"{MODEL}/infer", "post", 415, {"content": b"{", "headers": {"content-encoding": "br"}}),
        ("/classify", "post", 200, {"content": RED, "params": {"name": "part 7"}}),
        ("/line/state", "get", 200, {}),
        ("/line/strings.json", "get", 200, {}),
        ("/line/pictures/{id}", "get", 404, {}),
        ("/line/rejects/{id}", "get", 404, {}),
        ("/login", "get", 200, {}),
        ("/login", "delete", 200, {}),
        ("/login", "post", 403, {"json": {"name": "nobody", "password": "a guess"}}),
        ("/login", "post", 400, {"json": {"name": "nobody"}}),
        ("/login", "post", 415, {"data": {"name": "nobody", "password": "a guess"}}),
        ("/classify", "post", 400, {"content": b"no image"}),
        ("/classify", "post", 415, {"files": {"image": RED}}),
    ],
)
def test_answers_are_as_it_says(
    line: Daemon,
    document: dict[str, Any],
    path: str,
    method: str,
    status: int,
    options: dict[str, Any],
) -> None:
    answer = line.client.request(method, path.format(name="tiny", version="1", id="0"), **options)
    assert answer.status_code == status
    said = document["paths"][path][method]["responses"][str(status)]
    schema = said["content"][answer.headers["content-type"]]["schema"]
    OAS31Validator(schema | {"components": document["components"]}).validate(answer.json())
    assert {name.lower() for name in said.get("headers", {})} - {
        "inference-header-content-length"
    } <= set(answer.headers)


def test_requests_that_are_made_here_are_as_it_says(document: dict[str, Any]) -> None:
    body = document["paths"][f"{MODEL}/infer"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"] | {"components": document["components"]}
    OAS31Validator(schema).validate(json.loads(json.dumps({"inputs": [ONE]})))
    assert not OAS31Validator(schema).is_valid({"inputs": [ONE, ONE]})


def test_an_answer_has_all_that_its_message_has_and_nothing_else(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("Verdict", "Failure", "LineState", "AboutLine", "ErrorMessage", "Proportion"):
        assert schemas[name]["additionalProperties"] is False
        assert schemas[name]["required"] == list(schemas[name]["properties"]), name
    assert "name" not in schemas["Ready"]["required"]
    assert "additionalProperties" not in schemas["InferenceQuestion"]  # clients may say more
