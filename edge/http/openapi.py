"""OpenAPI document of a server, made of what its routes declare: messages are types."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"


class ErrorMessage(TypedDict):
    """What was wrong."""

    error: Annotated[str, Meta(description="What is wrong")]
    remedy: Annotated[str, Meta(description="What to do")]


class Parameter(NamedTuple):
    """What a request says outside its body; in the path unless it says otherwise."""

    name: str
    text: str
    kind: Any = str
    place: Literal["path", "query", "header"] = "path"


class Answer(NamedTuple):
    """A response, by its content type: a type of messages, several, or None if it is not JSON."""

    text: str
    content: Mapping[str, Any] = {}
    headers: Mapping[str, tuple[str, Any]] = {}  # what each says, and its type


class Operation(NamedTuple):
    """What a route does, for who writes a client."""

    summary: str
    answers: Mapping[int, Answer]
    parameters: Sequence[Parameter] = ()
    body: Mapping[str, Any] = {}  # as an answer's content


class Described(NamedTuple):
    """A route's path, method and operation."""

    path: str
    method: str
    operation: Operation


def told(kind: Any, text: str) -> Answer:
    """Return an answer that is a message."""
    return Answer(text, {JSON: kind})


def refused(reasons: Mapping[int, str]) -> dict[int, Answer]:
    """Return answers that say what was wrong, by status."""
    return {status: told(ErrorMessage, text) for status, text in reasons.items()}


def document(info: Mapping[str, str], routes: Iterable[Described]) -> bytes:
    """Return the document as JSON."""
    described = list(routes)
    schemas = _Schemas([route.operation for route in described])
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation in described:
        paths.setdefault(path, {})[method.lower()] = _describe(operation, path, schemas)
    components = {"schemas": schemas.components}
    return msgspec.json.encode(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    )


class _Schemas:
    """JSON Schema of all types that some operations name."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._kinds: list[Any] = []  # compared by value: some cannot be hashed
        taken: list[Any] = []
        for operation in operations:
            taken += [kind for kind in operation.body.values() if kind]
            for parameter in operation.parameters:
                self._add([parameter.kind])
            for answer in operation.answers.values():
                self._add(answer.content.values())
                self._add(kind for _, kind in answer.headers.values())
        self._add(taken)
        self._schemas, self.components = msgspec.json.schema_components(
            self._kinds, ref_template=_REFERENCE
        )
        _, of_requests = msgspec.json.schema_components(taken, ref_template=_REFERENCE)
        for name, schema in self.components.items():
            # An answer has what its message has, and nothing else; a request may have more.
            if "properties" in schema and name not in of_requests:
                schema["additionalProperties"] = False
                needed = set(schema.get("required", ()))
                fields = schema["properties"].items()
                # what has a default is written all the same
                schema["required"] = [
                    name for name, field in fields if name in needed or "default" in field
                ]

    def _add(self, kinds: Iterable[Any]) -> None:
        for kind in kinds:
            if isinstance(kind, tuple):
                self._add(kind)
            elif kind is not None and kind not in self._kinds:
                self._kinds.append(kind)

    def of(self, kind: Any) -> dict[str, Any]:
        """Return a type's schema, which may refer to components."""
        if isinstance(kind, tuple):
            return {"anyOf": [self.of(each) for each in kind]}
        return self._schemas[self._kinds.index(kind)]

    def of_content(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schemas of a body, by content type."""
        found: dict[str, Any] = {}
        for name, kind in content.items():
            found[name] = {} if kind is None else {"schema": self.of(kind)}
        return found


def _describe(operation: Operation, path: str, schemas: _Schemas) -> dict[str, Any]:
    parameters = [
        _describe_parameter(each, schemas)
        for each in operation.parameters
        if each.place != "path" or f"{{{each.name}}}" in path
    ]
    found: dict[str, Any] = {"summary": operation.summary}
    if parameters:
        found["parameters"] = parameters
    if operation.body:
        found["requestBody"] = {"required": True, "content": schemas.of_content(operation.body)}
    found["responses"] = {
        str(status): _describe_answer(answer, schemas)
        for status, answer in sorted(operation.answers.items())
    }
    return found


def _describe_parameter(parameter: Parameter, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.text,
        "schema": schemas.of(parameter.kind),
    }
    if parameter.place == "path":
        found["required"] = True
    return found


def _describe_answer(answer: Answer, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {"description": answer.text}
    if answer.content:
        found["content"] = schemas.of_content(answer.content)
    if answer.headers:
        found["headers"] = {
            name: {"description": text, "schema": schemas.of(kind)}
            for name, (text, kind) in answer.headers.items()
        }
    return found
