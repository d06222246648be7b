"""The report: one file about a run, complete in itself, whoever named the classes,
and good in a real browser.
"""

import hashlib
import re
import shutil
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

from broker_config.broker.embedded import start_broker
from broker_config.protocol.errors import UsageError
from broker_config.storage.checksums import SUMS
from tests.support.browser import Page
from tests.support.plants import draw, federate, here, run
from trainer import progress
from trainer.federation.run_summary import RunReport
from trainer.progress import timeline
from trainer.progress.timeline import Span
from trainer.report import charts, report_page
from trainer.report.model_examination import Examination, Example
from trainer.report.run_files import load_run
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a simulation of three nodes leaves."""
    folder = tmp_path_factory.mktemp("simulation")
    draw(folder / "images", 24, 0)
    result = here(
        "simulate",
        "--data",
        folder / "images",
        "--method",
        "afedcl",
        "--model",
        "small",
        "--size",
        32,
        "--rounds",
        2,
        "--nodes",
        3,
        "--samples",
        6,
        "--out",
        folder / "run",
    )
    assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def simulated_page(simulation: Path) -> Path:
    """The report about it, where it lies by default."""
    result = here("report", simulation)
    assert result.returncode == 0, result.stderr
    return simulation / "report.html"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State folders of a coordinator and two nodes; plant-b has too few images to hold any out."""
    folder = tmp_path_factory.mktemp("federation")
    plants = {"plant-a": draw(folder / "a", 10, 0), "plant-b": draw(folder / "b", 4, 1)}
    with start_broker(folder / "broker") as broker:
        federate(broker.url, plants, folder / "run")
    return folder / "run"


def page_of(folder: Path, tmp_path: Path) -> str:
    """The page about a run."""
    return report_page.write(folder, tmp_path / "page.html", progress.ignore).read_text()


def matrices(page: str) -> dict[str, list[list[int]]]:
    """The numbers of each confusion matrix, by its caption."""
    found = re.findall(
        r'<caption class="hidden">Confusion matrix of (.*?)</caption>(.*?)</table>', page, re.DOTALL
    )
    rows = {
        name: re.findall(r"<tr><th.*?</tr>", table.partition("<tbody>")[2], re.DOTALL)
        for name, table in found
    }
    return {
        name: [
            [
                0 if cell == "·" else int(cell)
                for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)
            ]
            for row in each
        ]
        for name, each in rows.items()
    }


def images_in(page: str) -> int:
    return page.count("<img ")


# What is told of which run


def test_a_simulations_report_tells_of_every_node_what_its_node_reportsay(
    simulation: Path, simulated_page: Path
) -> None:
    page = simulated_page.read_text()
    report = msgspec.json.decode((simulation / "report.json").read_bytes(), type=RunReport)
    counted = matrices(page)
    assert list(counted) == ["all nodes together", "plant-1", "plant-2", "plant-3"]
    for node in report.nodes:
        counts = np.array(counted[node.name])
        assert counts.sum() == node.test_images
        assert np.trace(counts) / counts.sum() == pytest.approx(node.accuracy)
        assert f"{100 * node.accuracy:.1f}" in page
        assert f"t-SNE of {node.test_images} held-out images of {node.name}" in page
    together = np.array(counted["all nodes together"])
    assert together.sum() == sum(node.test_images for node in report.nodes)
    for told in ("ln 2", "fusion weight", "lambda=0.1", "torch", "starting weights", "seed 0"):
        assert told in page
    assert images_in(page) >= 2 * 3 * 4
    assert f"This file contains {images_in(page) // 2} images" in page
    assert len(page) < 1_000_000
    assert "When each node did what" not in page


def test_a_report_says_of_every_node_what_joining_was_worth(
    simulation: Path, simulated_page: Path
) -> None:
    page = simulated_page.read_text()
    table = page.partition("Was it worth joining?")[2].partition("</table>")[0]
    nodes = load_run(simulation).report.nodes
    assert len(re.findall(r"<tr><th scope=\"row\"", table)) == len(nodes) == 3
    for node in nodes:
        assert node.comparison is not None
        row = table.partition(node.name)[2].partition("</tr>")[0]
        for name in ("alone", "together", "mixed"):
            share = f"{100 * getattr(node.comparison, name).accuracy:.1f}"
            assert (
                f"<strong>{share}</strong>" if name == node.comparison.deployed else f">{share}<"
            ) in row
        assert f"<td>{node.comparison.deployed}</td>" in row
        assert f"{100 * node.comparison.chosen.gain:+.1f}" in row
        for warning in node.comparison.warnings():
            assert f"<strong>{node.name}</strong>: {warning}." in page


@pytest.mark.slow
def test_the_command_says_where_the_page_is(federation: Path, tmp_path: Path) -> None:
    result = run("report", federation / "coordinator", "--out", tmp_path / "new" / "page.html")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"report: {(tmp_path / 'new' / 'page.html').as_uri()}\n"


@pytest.mark.slow
def test_a_nodes_report_is_its_own_and_shows_when_it_did_what(
    federation: Path, tmp_path: Path
) -> None:
    page = page_of(federation / "plant-a", tmp_path)
    assert "What plant-a learnt" in page
    assert "plant-b" not in page
    assert np.array(matrices(page)["plant-a"]).sum() == 6
    assert "When each node did what" in page
    spans = load_run(federation / "plant-a").nodes[0].spans
    for activity in ("receiving", "training", "sending", "refining"):
        assert {span.round for span in spans if span.activity == activity} == {1, 2}
    for round_ in (1, 2):
        of = {
            span.activity: span
            for span in spans
            if span.round == round_ and span.activity != "waiting"
        }
        assert of["receiving"].end <= of["training"].begin
        assert of["training"].end <= of["sending"].begin + 0.05
        # the contribution travels while stage 2 trains
        assert of["sending"].begin < of["refining"].end


@pytest.mark.slow
def test_a_nodes_report_says_of_which_run_it_is_and_of_a_later_one_that_left_no_model(
    federation: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(federation / "plant-b", tmp_path / "plant-b")
    metadata = load_run(folder).nodes[0].metadata
    assert load_run(folder).unfinished is None
    (folder / timeline.FILE).write_bytes(
        msgspec.json.encode(Span("fe" * 8, 1, "receiving", 1.0, 2.0))
    )
    said: list[progress.AnyEvent] = []
    page = report_page.write(folder, tmp_path / "page.html", said.append).read_text()
    first, second = [event.text for event in said if isinstance(event, progress.Note)]
    assert f"about run {metadata.run} of federation {metadata.federation}, finished" in first
    assert f"Federation {metadata.federation}, run {metadata.run}." in page
    for told in (second, page):
        assert f"he node took part in run {'fe' * 8} later; it left no model" in told


def test_a_node_that_was_cross_validated_shows_its_verdicts_and_says_why_it_shows_no_image(
    federation: Path, tmp_path: Path
) -> None:
    page = page_of(federation / "plant-b", tmp_path)
    assert np.array(matrices(page)["plant-b"]).sum() == 12
    assert images_in(page) == 0
    assert "too few to hold any out" in page
    assert "This file contains" not in page


def test_a_class_whose_folders_are_called_otherwise_is_shown_with_them(
    federation: Path, tmp_path: Path
) -> None:
    state = shutil.copytree(federation / "plant-a", tmp_path / "state")
    listed = personal_model.load_training_images(state / "model")
    moved = [
        msgspec.structs.replace(
            image, path=image.path.replace("/scratches/", "/Kratzer/") if number % 2 else image.path
        )
        for number, image in enumerate(sorted(listed, key=lambda image: image.path))
    ]
    (state / "model" / SUMS).unlink()
    (state / "model" / "training.json").write_bytes(msgspec.json.encode(moved))
    page = page_of(state, tmp_path)
    assert '<td class="classes">inclusion, patches, scratches (Kratzer, scratches)</td>' in page
    assert '<td class="classes">inclusion, patches, scratches</td>' in page_of(
        federation / "plant-a", tmp_path
    )


def test_a_coordinators_report_shows_weights_and_bytes_and_no_image(
    federation: Path, tmp_path: Path
) -> None:
    page = page_of(federation / "coordinator", tmp_path)
    assert "What the coordinator averaged" in page
    assert "2 closed" in page
    assert "plant-a" in page
    assert "plant-b" in page
    assert "weight of the contribution by round" in page
    assert images_in(page) == 0


def test_of_masked_contributions_no_weight_is_shown(federation: Path, tmp_path: Path) -> None:
    """The coordinator was told 1 of each."""
    state = tmp_path / "coordinator"
    shutil.copytree(federation / "coordinator", state)
    assert re.search(r", weights: plant-a \d", here("rounds", state).stdout)
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal, journal:
        (spec,) = journal.execute("SELECT spec FROM runs").fetchone()
        masked = bytes(spec).replace(b'"mask_threshold":0', b'"mask_threshold":2')
        journal.execute("UPDATE runs SET spec = ?", (masked,))
        journal.execute("DROP TABLE checksum")
    page = page_of(state, tmp_path)
    assert "plant-a, plant-b" in page
    assert "weight of the contribution" not in page
    assert "their weights are masked" in page
    assert here("rounds", state).stdout.splitlines()[0].endswith(", contributors: plant-a, plant-b")


def test_images_that_are_gone_or_have_changed_are_not_shown(
    federation: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    shutil.copytree(federation / "plant-a", state)
    kept = [
        msgspec.structs.replace(verdict, path=str(tmp_path / f"{number}.png"))
        for number, verdict in enumerate(personal_model.load_predictions(state / "model"))
    ]
    (state / "model" / SUMS).unlink()
    (state / "model" / "verdicts.json").write_bytes(msgspec.json.encode(kept))
    (tmp_path / "0.png").write_bytes(b"another image than the one that was judged")
    page = page_of(state, tmp_path)
    assert images_in(page) == 0
    assert "no longer where they were" in page
    assert np.array(matrices(page)["plant-a"]).sum() == 6


def test_what_is_no_run_is_refused_with_what_to_pass(federation: Path, tmp_path: Path) -> None:
    result = here("report", tmp_path)
    assert result.returncode == 2
    for told in ("there is no run in", "--out folder", "edge-node-NAME", "coordinate"):
        assert told in result.stderr
    unfinished = tmp_path / "unfinished"
    shutil.copytree(federation / "plant-a", unfinished)
    shutil.rmtree(unfinished / "model")
    with pytest.raises(UsageError, match="personal model"):
        load_run(unfinished)
    (tmp_path / "report.json").write_bytes(b"{")
    with pytest.raises(UsageError, match="damaged"):
        load_run(tmp_path)


def test_a_row_is_what_an_image_shows_and_a_column_what_it_was_judged_to_be() -> None:
    told = [("c", "a"), ("c", "a"), ("c", "c"), ("a", "a")]
    verdicts = [
        HeldOutPrediction(path="", digest="0" * 64, label=label, verdict=v, confidence=1.0)
        for label, v in told
    ]
    matrix = report_page._matrix("plant", verdicts, ["a", "b", "c", "d"])
    assert (matrix.rows, matrix.columns, matrix.counts) == (
        ["a", "c"],
        ["a", "c"],
        [[1, 0], [2, 1]],
    )
    assert matrix.errors.endswith("defects are confused, not missed: c taken for a 2 of 3 times")
    errors = report_page._matrix("plant", verdicts, ["a", "no_defect", "c", "d"]).errors
    assert (
        errors
        == "missed defects 0.0% (0 to 49; 0 of 4), false rejects unknown, each image has a defect"
    )


@pytest.mark.parametrize("node", ["plant-a", "plant-b"])
def test_verdicts_are_of_the_files_that_they_name(node: str, federation: Path) -> None:
    metadata, verdicts = (
        personal_model.load_metadata(federation / node / "model"),
        personal_model.load_predictions(federation / node / "model"),
    )
    for verdict in verdicts:
        path = Path(verdict.path)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == verdict.digest
        assert path.parent.name == verdict.label
        assert 1 / 3 < verdict.confidence <= 1
    assert (
        len({verdict.digest for verdict in verdicts}) == len(verdicts) == metadata.metrics["images"]
    )
    right = sum(verdict.label == verdict.verdict for verdict in verdicts)
    assert right / len(verdicts) == pytest.approx(metadata.metrics["accuracy"])


# Names that others chose

HOSTILE = (
    "\"><img src=http://evil.example/x onerror=hacked=1>'<script>hacked=1</script>{{7*7}}&amp;"
)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def hostile(federation: Path) -> str:
    """A page on which every name and setting is hostile."""
    told = load_run(federation / "plant-a")
    node = told.nodes[0]
    names = (HOSTILE, "b" + HOSTILE, "c" + HOSTILE)
    node_report = msgspec.structs.replace(node.report, name=HOSTILE, classes=list(names))
    metadata = msgspec.structs.replace(
        node.metadata, node=HOSTILE, classes=names, software={"edge-node": HOSTILE}
    )
    verdicts = tuple(
        HeldOutPrediction(
            path=HOSTILE,
            digest=f"{number:064x}",
            label=names[number % 3],
            verdict=names[0],
            confidence=0.5,
        )
        for number in range(6)
    )
    bad = node._replace(
        report=node_report,
        metadata=metadata,
        predictions=verdicts,
        classes=tuple(node_report.classes),
    )
    report = msgspec.structs.replace(
        told.report,
        method=HOSTILE,
        model=HOSTILE,
        options={HOSTILE: HOSTILE},
        data=HOSTILE,
        nodes=[node_report],
    )
    pictures = [Example(verdicts[0], "data:image/jpeg;base64,", "data:image/jpeg;base64,")]
    examined = Examination(
        list(verdicts), np.random.default_rng(0).normal(size=(6, 2)), pictures, pictures
    )
    return report_page.render(
        told._replace(report=report, classes=names, nodes=[bad]), {HOSTILE: examined}
    )


def test_names_from_folders_and_from_the_network_are_shown_and_never_obeyed(hostile: str) -> None:
    page = Elements(hostile)
    assert [tag for tag, _ in page.found].count("script") == 1
    assert {attributes["src"] for tag, attributes in page.found if tag == "img"} == {
        "data:image/jpeg;base64,"
    }
    assert [
        name for _, attributes in page.found for name in attributes if name.startswith("on")
    ] == []
    assert HOSTILE in page.text


def test_a_page_names_no_address_that_a_browser_would_load(
    hostile: str, simulated_page: Path
) -> None:
    for page in (hostile, simulated_page.read_text()):
        for tag, attributes in Elements(page).found:
            for name in ("src", "href", "action", "data", "poster", "srcset"):
                address = attributes.get(name) or "#"
                assert address.startswith(("#", "data:")), (tag, name, address)
        assert "@import" not in page
        assert "default-src 'none'" in page


# In a real browser


@pytest.fixture
def shown(browser: Page, simulated_page: Path) -> Page:
    """A report, open in the browser."""
    browser.look()
    browser.open(simulated_page.as_uri())
    return browser


def test_it_loads_nothing_and_the_console_stays_silent(shown: Page) -> None:
    assert [url for url in shown.requests if not url.startswith("data:")] == [
        shown.ask("location.href")
    ]
    assert shown.problems == []
    assert shown.ask("document.images.length") > 0
    assert shown.ask("[...document.images].every(image => image.naturalWidth == 160)")


def test_hostile_names_do_nothing_there_either(browser: Page, hostile: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(hostile)
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.ask("typeof hacked") == "undefined"
    assert [url for url in browser.requests if "evil" in url] == []


BACKGROUND = "getComputedStyle(document.documentElement).backgroundColor"


def test_it_is_light_or_dark_as_the_system_is_until_the_button_is_pressed(shown: Page) -> None:
    light = shown.ask(BACKGROUND)
    shown.look(theme="dark")
    dark = shown.ask(BACKGROUND)
    assert light != dark
    shown.ask("document.getElementById('theme').click()")
    assert shown.ask(BACKGROUND) == light


CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const luminance = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  let least = [21, ""];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("title, .hidden")) continue;
    const style = getComputedStyle(element);
    const behind = [];
    for (let each = element; each; each = each.parentElement) \
behind.unshift(getComputedStyle(each).backgroundColor);
    const over = luminance([...behind, element.closest("svg") ? style.fill : style.color]), \
under = luminance(behind);
    const ratio = (Math.max(over, under) + 0.05) / (Math.min(over, under) + 0.05);
    if (ratio < least[0]) least = [ratio, node.data.trim()];
  }
  return least;
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(shown: Page, theme: str) -> None:
    shown.look(theme=theme)
    ratio, text = shown.ask(CONTRAST)
    assert ratio >= 4.5, text


def test_nothing_runs_out_of_a_phones_screen(shown: Page) -> None:
    shown.look(width=390)
    assert shown.ask("document.documentElement.scrollWidth <= innerWidth")
    assert shown.problems == []


def test_it_is_printed_on_a_few_pages(shown: Page) -> None:
    printed = shown.pdf()
    assert printed.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12


def test_pointing_into_a_chart_reads_the_values_of_a_round(shown: Page) -> None:
    read = """(() => {
      const chart = document.querySelector("svg.curves"), place = chart.getBoundingClientRect();
      chart.dispatchEvent(new PointerEvent("pointermove", {clientX: place.left + 5, \
clientY: place.top + 5}));
      return document.getElementById("readout").innerText;
    })()"""
    told = shown.ask(read).splitlines()
    assert told[0] == "round 1"
    assert [line.split()[0] for line in told[1:]] == ["plant-1", "plant-2", "plant-3"]


def test_every_figure_and_image_has_words_and_every_table_has_headers(shown: Page) -> None:
    assert shown.ask("[...document.images].every(image => image.alt.length > 10)")
    silent = (
        "[...document.querySelectorAll('main svg')].filter(svg => !(svg.ariaHidden || "
        "svg.ariaLabel)).length"
    )
    assert shown.ask(silent) == 0
    assert shown.ask(
        "[...document.querySelectorAll('main tr')].every(row => row.querySelector('th[scope]'))"
    )


# Figures


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.61, 0.74, [0.65, 0.7]),
        (1, 120, [50, 100]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_a_ninth_node_or_class_is_told_from_the_first_by_more_than_its_colour() -> None:
    looks = [charts.node_class(number) for number in range(32)]
    assert len(set(looks)) == len(looks)
    assert (
        len({(charts.label_class(number), charts.marker_id(number)) for number in range(32)}) == 32
    )


def test_the_middle_of_a_run_is_whole_rounds_and_does_not_count_the_waiting() -> None:
    spans = [
        Span("0" * 16, round_, "training", 10.0 * round_, 10.0 * round_ + 5)
        for round_ in range(1, 8)
    ]
    waiting = Span("0" * 16, 4, "waiting", 0.0, 100.0)
    assert charts.middle_rounds([charts.Lane("a", 0, [*spans, waiting])]) == (30.0, 55.0)


def test_a_timeline_of_a_thousand_rounds_stays_small() -> None:
    spans = [Span("0" * 16, r, a, r + 0.1, r + 0.9) for r in range(1000) for a in charts.ACTIVITIES]
    assert len(charts.timeline_chart([charts.Lane("a", 0, spans)], 0, 1000, "all")) < 300_000
