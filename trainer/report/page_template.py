"""Templates of pages that are one file, and need nothing but a browser."""

from importlib import resources

import jinja2


def page_environment(package: str) -> jinja2.Environment:
    """The environment of templates in a package: all that they are given is escaped,
    and none may be missing.
    """
    folder = resources.files(package)
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
