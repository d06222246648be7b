"""The documentation's site (`make docs`) as a reader without internet sees it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import browse
from tests.support.paths import REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.needs("chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["architecture", "protocol"])
def test_a_diagram_is_drawn_without_another_host(site: Path, name: str, theme: Any) -> None:
    with browse(color_scheme=theme) as page:
        page.open((site / f"{name}.html").as_uri())
        # the theme's, with the picture in a closed shadow tree
        page.tab.wait_for_selector("div.mermaid")
        assert page.tab.locator("div.mermaid").bounding_box()["height"] > 100
        assert [url for url in page.requests if not url.startswith("file:")] == []
        assert page.problems == []
