"""Panels of the help: commands by who needs them; of many options those that matter first,
then the rest by subject.
"""

from enum import StrEnum
from typing import Any

from typer.core import TyperGroup

from edge.config.retired import refuse_retired
from edge_node.cli.environment import name_variables, named_in_errors

COMMANDS = {
    "First steps": "demo surfaces dataset simulate",
    "Whoever runs a federation": (
        "provision broker coordinate console rounds pause resume drop abort"
    ),
    "A plant that takes part": "request check preview join refit report export",
    "On the line": "serve infer bundle install-service",
    "Setting up and looking after": "user doctor status",
}
OTHERS = "From other packages"
FEW = 10  # options that stand in one panel


class Panel(StrEnum):
    """The panels of options (`rich_help_panel`), in their order; options without one come first."""

    IMAGES = "Images"
    ROUNDS = "Rounds, and nodes that are away"
    TRAINING = "Training"
    LEAVES = "What leaves the plant"
    BROKER = "Broker, certificates and keys"
    BUNDLES = "Which bundles are served"
    OUTPUT = "Output and configuration"


class PanelledGroup(TyperGroup):
    """Commands whose help is in panels."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        panels = {}
        for panel, names in COMMANDS.items():
            for each_command in names.split():
                panels[each_command] = panel
        order = [*panels, *sorted(self.commands)]
        self.commands = dict(sorted(self.commands.items(), key=lambda each: order.index(each[0])))
        for name, command in self.commands.items():
            own = getattr(command, "rich_help_panel", None)  # a command of another package
            command.rich_help_panel = panels.get(name) or own or OTHERS  # type: ignore[attr-defined]
            _arrange(command)
            name_variables(command, name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the words name; UsageError if they have what is retired."""
        refuse_retired(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the words name; UsageError names a variable whose value it cannot
        take.
        """
        with named_in_errors():
            return super().invoke(ctx)


def _arrange(command: Any) -> None:
    """Order the options of a command, and of those below it, by their panels;
    few options need none.
    """
    for below in getattr(command, "commands", {}).values():
        _arrange(below)
    panels = [None, *Panel]
    command.params.sort(key=lambda each: panels.index(each.rich_help_panel))
    options = [each for each in command.params if each.param_type_name == "option"]
    for each in options:
        if each.is_flag:
            each.metavar = ""  # typer would show <bool>, as if a value were wanted
        if len(options) <= FEW:
            each.rich_help_panel = None
