"""Panels of the help: commands by who needs them; of many options those that matter first, then the rest by subject."""

from typing import Any

from typer.core import TyperGroup

COMMANDS = {
    "First steps": "demo surfaces dataset simulate",
    "Whoever runs a federation": "provision broker coordinate rounds abort",
    "A plant that takes part": "check preview join refit report export",
    "On the line": "serve infer bundle install-service",
    "Setting up and looking after": "init doctor status",
    "The sensors of one line": "vfl",
}
OPTIONS = {
    "Images": "test alias group like partition classes-per-node alpha test-samples shared pool",
    "Rounds, and nodes that are away": "quorum start sample deadline min-wait linger absent patience commit",
    "Training": "option head size training evaluate-every aggregate liars engine device "
    "eta batches iterations policy window chunk cycles reading denoise denoise-with denoiser",
    "What leaves the plant": "telemetry demand noise clip protect labels-stay",
    "Broker, certificates and keys": "ca cert key kit chunk-size",
    "Which bundles are served": "trust memory accept-older",
    "Output and configuration": "quiet json config",
}
_FEW = 12  # options that stand in one panel


class PanelledGroup(TyperGroup):
    """Commands whose help is in panels."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        panels = {name: panel for panel, names in COMMANDS.items() for name in names.split()}
        for name, command in self.commands.items():
            command.rich_help_panel = panels[name]  # type: ignore[attr-defined]
            _arrange(command)


def _arrange(command: Any) -> None:
    """Put the options of a command, and of those below it, into their panels."""
    for below in getattr(command, "commands", {}).values():
        _arrange(below)
    for each in command.params:
        if getattr(each, "is_flag", False):
            each.metavar = ""  # typer would show <bool>, as if a value were wanted
    if len(command.params) > _FEW:
        for panel, names in OPTIONS.items():
            options = [each for each in command.params if each.opts[0].lstrip("-") in names.split()]
            for option in options if len(options) > 1 else ():
                option.rich_help_panel = panel
