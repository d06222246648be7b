"""Commands whose options are the fields of structs, which say all that there is to say of each."""

import inspect
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Annotated, Any, get_args

from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields


def take_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer wants it: with a parameter for each field of the structs that `command`
    takes.

    A field is written as a parameter would be, and may name its panel of the help:
    `Annotated[int, typer.Option(min=1, help="..."), Panel.TRAINING] = 2`. Other parameters stay as
    they are.
    """
    structs: dict[str, type[Struct]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Struct):
            structs[parameter.name] = parameter.annotation
            parameters += map(_parameter, fields(parameter.annotation))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {}
        for name, struct in structs.items():
            made[name] = struct(**{field: given.pop(field) for field in struct.__struct_fields__})
        command(**given, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(field: FieldInfo) -> inspect.Parameter:
    kind, option, *panel = get_args(field.type)
    if panel:
        option = copy(option)
        (option.rich_help_panel,) = panel
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    chosen_default = inspect.Parameter.empty if default is NODEFAULT else default
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=chosen_default,
        annotation=Annotated[kind, option],
    )
