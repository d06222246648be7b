"""From doubt to a better model: a live line's doubtful images are labelled in a browser,
learnt, and served anew.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import expect

from edge.http.login import Accounts
from tests.support.browser import browse
from tests.support.daemon_process import Daemon, serving_daemon
from tests.support.plants import load_images, run
from tests.support.waiting import wait_until
from trainer.data.drawn_surfaces import CLASSES, write_plant
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.training import personal_model

PLANT, OTHER = "plant-1", "plant-2"
TAUGHT = CLASSES[::2]  # classes of which the plant has images at first; the other plant has all
# numbers of each class's images
FIRST, ON_THE_LINE, APART = range(14), range(14, 20), range(20, 30)
PASSWORD = "correct horse"  # noqa: S105  (of a line that lives for this test)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plant's surfaces, `images`, and its model of a federation:
    a head of statistics.
    """
    folder = tmp_path_factory.mktemp("plant")
    for number, name in enumerate((PLANT, OTHER), 1):
        write_plant(folder / name, 30, 64, seed=5, plant=number)
    for path, label in drawn(folder, FIRST).items():
        if label in TAUGHT:
            target = folder / "images" / label / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    request = Request("gaussian", model="mobilenet_v2", weights="surface", size=64, seed=7)
    spec, broadcast = draft(request, federation="steel", classes=CLASSES, nodes=2)
    plants = {PLANT: load_images(spec, folder / "images"), OTHER: load_images(spec, folder / OTHER)}
    personal_model.save(simulate(spec, broadcast, plants).models[PLANT], folder / "model")
    return folder


@pytest.fixture(scope="module")
def line(plant: Path) -> Iterator[Daemon]:
    """A line that serves that model, and keeps what it doubts."""
    edge_node("export", plant / "model", "--out", plant / "bundles")
    (plant / "line.toml").write_text('[keep]\npath = "to-label"\n[labels]\npath = "images"\n')
    Accounts(plant / "state").set("anna", PASSWORD)
    with serving_daemon(
        plant / "state", plant / "bundles" / PLANT, "--config", plant / "line.toml"
    ) as running:
        yield running


def drawn(plant: Path, numbers: range) -> dict[Path, str]:
    """The plant's surfaces with these numbers, and their classes."""
    paths = sorted((plant / PLANT).glob("*/*.png"))
    return {
        path: path.parent.name for path in paths if int(path.stem.rpartition("-")[2]) in numbers
    }


def edge_node(*arguments: object) -> str:
    done = run(*arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def inspect(line: Daemon, surfaces: dict[Path, str]) -> float:
    """The share of which the line's verdict is right.

    An image that it doubts is kept before the next one comes.
    """
    right = 0
    for path, label in surfaces.items():
        verdict = line.classify(path.read_bytes(), str(path)).json()
        right += verdict["label"] == label
        if verdict["doubts"]:
            wait_until(lambda kept=verdict["kept"]: kept in waiting(line))
    return right / len(surfaces)


def waiting(line: Daemon) -> dict[str, Path]:
    """The images that wait for a label: the surface of each kept file."""
    return {row[0]: Path(row[6]) for row in line.client.get("/labels/queue").json()["images"]}


def label_all(line: Daemon, taught: dict[Path, str]) -> int:
    """Log in and go through the queue by keys: give these their class, lay all others aside;
    how many have one.
    """
    with browse() as page:
        page.open(f"{line.url}/labels/")
        expect(page.tab.locator("#login")).to_have_text("Log in")
        page.tab.locator("#login").click()
        page.tab.get_by_label("Name").fill("anna")
        page.tab.get_by_label("Password").fill(PASSWORD)
        page.tab.keyboard.press("Enter")
        expect(page.tab.locator("#login")).to_have_text("Log anna out")
        images = waiting(line)
        for left in reversed(range(len(images))):
            shown = Path(unquote(page.tab.locator("#picture").get_attribute("src") or "")).name
            label = taught.get(images[shown])
            page.tab.keyboard.press(str(CLASSES.index(label) + 1) if label else "x")
            expect(page.tab.locator("#waiting")).to_have_text(f"Waiting: {left}")
        wait_until(lambda: not waiting(line))  # until all are saved
        assert page.problems == []
    return sum(path in taught for path in images.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.needs("chromium")
def test_what_people_label_makes_the_line_s_next_model_better_without_training(
    line: Daemon, plant: Path
) -> None:
    on_the_line, apart = drawn(plant, ON_THE_LINE), drawn(plant, APART)
    before = inspect(line, apart)
    inspect(line, on_the_line)
    labelled = label_all(line, on_the_line)  # those apart are laid aside, to teach nothing
    assert 5 < labelled < len(on_the_line) / 2  # what the line is sure of, nobody looks at
    # it has seen classes that are new here
    assert {path.parent.name for path in plant.glob("images/*/*")} - {*TAUGHT}
    told = edge_node("refit", plant / "model", plant / "images", "--out", plant / "refitted")
    assert f"{labelled} image(s) are new" in told
    edge_node("export", plant / "refitted", "--out", plant / "refitted-bundles")
    added = edge_node(
        "bundle", "add", plant / "refitted-bundles" / PLANT, "--state", plant / "state"
    )
    edge_node("bundle", "activate", added.split()[0], "--state", plant / "state")
    assert line.client.get("/").json()["digest"].startswith(added.split()[0])
    assert inspect(line, apart) > before + 0.05
