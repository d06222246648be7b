"""A field of a struct is an option of the command, and the command gets the struct."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main
from msgspec import Struct
from typer.testing import CliRunner

from edge.config import options_file
from edge_node.cli.help_panels import Panel
from edge_node.cli.option_structs import take_options


class Baking(Struct, frozen=True, kw_only=True):
    oven: Annotated[str | None, typer.Argument(help="Which oven.")] = None
    minutes: Annotated[
        int, typer.Option(min=1, help="How long.", show_default="the oven's"), Panel.TRAINING
    ] = 2
    toppings: Annotated[list[str], typer.Option("--topping", help="What is on it.")] = []


class Pizza(Baking, frozen=True, kw_only=True):
    size: Annotated[float, typer.Option(help="Diameter.", show_default=False)]
    minutes: Annotated[int, typer.Option(min=5, help="How long, at least five."), Panel.IMAGES] = 9
    box: Annotated[bool, typer.Option("--box/--bare", help="Whether it is wrapped.")] = True


class Bill(Struct, frozen=True, kw_only=True):
    pizza: Annotated[Path, typer.Option(help="A field called like a parameter of the command.")] = (
        Path("pizza")
    )


@pytest.fixture
def calls() -> list[Any]:
    """What the command was called with."""
    return []


@pytest.fixture
def app(calls: list[Any]) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    @take_options
    def bake(
        context: typer.Context,
        pizza: Pizza,
        bill: Bill,
        tip: Annotated[int, typer.Option(help="Tip.")] = 1,
    ) -> None:
        """Bake one."""
        calls.append((context.info_name, pizza, bill, tip))

    return app


def run(app: typer.Typer, *words: str) -> int:
    return CliRunner().invoke(app, words).exit_code


def test_what_is_typed_fills_the_fields_and_the_rest_has_its_default(
    app: typer.Typer, calls: list[Any]
) -> None:
    assert run(app, "--size", "26") == 0
    words = "left --size 1.5 --minutes 7 --topping basil --topping egg --bare --pizza to-go --tip 3"
    assert run(app, *words.split()) == 0
    plain = Pizza(oven=None, minutes=9, toppings=[], size=26.0, box=True)
    rich = Pizza(oven="left", minutes=7, toppings=["basil", "egg"], size=1.5, box=False)
    assert calls == [
        ("bake", plain, Bill(pizza=Path("pizza")), 1),
        ("bake", rich, Bill(pizza=Path("to-go")), 3),
    ]


@pytest.mark.parametrize("words", ["", "--size big", "--size 1 --minutes 4", "--size 1 --tipp 2"])
def test_a_missing_or_wrong_value_is_an_error_as_of_any_option(
    words: str, app: typer.Typer, calls: list[Any]
) -> None:
    assert (run(app, *words.split()), calls) == (2, [])


def test_help_panels_and_a_file_of_options_come_from_the_fields(app: typer.Typer) -> None:
    command: Any = typer.main.get_command(app)
    assert command.help == "Bake one."
    assert [(each.name, each.help, each.rich_help_panel) for each in command.params] == [
        ("oven", "Which oven.", None),
        ("minutes", "How long, at least five.", Panel.IMAGES),
        ("toppings", "What is on it.", None),
        ("size", "Diameter.", None),
        ("box", "Whether it is wrapped.", None),
        ("pizza", "A field called like a parameter of the command.", None),
        ("tip", "Tip.", None),
    ]
    kinds = {key: setting.kind for key, setting in options_file.settings(command).items()}
    assert kinds == {
        "oven": str,
        "minutes": int,
        "topping": list,
        "size": float,
        "box": bool,
        "pizza": Path,
        "tip": int,
    }
