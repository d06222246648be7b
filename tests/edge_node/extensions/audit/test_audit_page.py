"""The page of an audit: one file, complete in itself, whoever named the federation,
and good in a real browser.
"""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from edge_node.extensions.audit import audit_page
from edge_node.extensions.audit.audit import Audit, Audited, ModeAudit
from edge_node.extensions.audit.exposure import Exposure, Pictures
from tests.support.audited_plant import striped
from tests.support.browser import Page


@pytest.fixture(scope="module")
def audited() -> Audited:
    def exposures(counts: float) -> tuple[Exposure, ...]:
        return (
            Exposure(what="counts", seen="sums", attack="they are read", value=counts, chance=0.6),
            Exposure(
                what="membership",
                seen="sums",
                attack="leverage",
                value=0.8,
                chance=0.5,
                low=0.7,
                high=0.9,
            ),
            Exposure(what="pictures", seen="model", attack="a guess", value=0.3, chance=0.4),
        )

    modes = (
        ModeAudit(mode="open", is_actual=True, exposures=exposures(1), notes=("a note",)),
        ModeAudit(mode="masked", is_actual=False, refused="two plants are too few"),
        ModeAudit(mode="private", is_actual=False, setting="epsilon 3", exposures=exposures(0.7)),
    )
    found = Audit(
        federation="steel",
        method="gaussian",
        model="small",
        nodes=3,
        software="1",
        afterwards=False,
        sent=10,
        unsent=5,
        known=5,
        modes=modes,
    )
    images = striped([2, 1, 0], 0).images
    some, others = (
        Pictures("sums", "a guess", images, images),
        Pictures("model", "a search", images, images),
    )
    return Audited(found, {"open": (some,), "private": (others,)})


def test_the_table_tells_each_kind_in_each_mode(audited: Audited) -> None:
    console = Console(file=io.StringIO(), width=160)
    audit_page.print_table(audited.audit, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert rows["counts: how many images there are of each class"].split()[-3:] == [
        "100%",
        "-",
        "25%",
    ]
    assert rows["membership: whether an image that somebody has is among them"].endswith(
        "60% (40%)"
    )
    assert "open *" in text
    assert rows["pictures: what they look like"].split()[-3:] == ["0%", "-", "0%"]
    assert "10 of 20 images play those that are sent" in text
    assert "private: noise hides each image (--privacy); epsilon 3" in text
    assert "masked: not possible here: two plants are too few" in text


def test_the_result_for_machines_has_the_worst_of_each_kind(audited: Audited) -> None:
    result = audit_page.to_result(audited.audit, Path("a.html"))
    assert result["actual"] == "open"
    assert result["told"].keys() == {"open", "private"}
    assert result["told"]["open"]["counts"] == 1
    assert result["told"]["private"]["counts"] == pytest.approx(0.25)
    assert msgspec.json.decode(msgspec.json.encode(result))["audit"]["federation"] == "steel"


def test_it_loads_nothing_and_shows_its_pictures(
    audited: Audited, browser: Page, tmp_path: Path
) -> None:
    audit_page.write(audited, page := tmp_path / "audit.html")
    browser.look()
    browser.open(page.as_uri())
    assert [url for url in browser.requests if not url.startswith("data:")] == [
        browser.ask("location.href")
    ]
    assert browser.problems == []
    made = sum(len(each.made) for groups in audited.pictures.values() for each in groups)
    assert made > 0
    assert browser.ask("document.images.length") == 2 * made
    assert browser.ask("[...document.images].every(image => image.naturalWidth == 96)")
    assert browser.ask("document.querySelectorAll('tbody tr').length") == 3 + sum(
        len(each.exposures) for each in audited.audit.modes
    )


@pytest.mark.parametrize("width", [390, 1200])
def test_what_is_told_is_seen_on_a_narrow_screen_too(
    width: int, audited: Audited, browser: Page, tmp_path: Path
) -> None:
    audit_page.write(audited, page := tmp_path / "audit.html")
    browser.look(width=width)
    browser.open(page.as_uri())
    assert browser.ask(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    told = "[...document.querySelectorAll('tbody td:nth-child(2)')]"
    assert browser.ask(f"{told}.every(each => each.getBoundingClientRect().right <= innerWidth)")


def test_of_several_attacks_the_one_counts_that_tells_most_surely() -> None:
    lucky = Exposure(
        what="membership", seen="model", attack="lucky", value=0.9, chance=0.5, low=0.5, high=1
    )
    sure = Exposure(
        what="membership", seen="sums", attack="sure", value=0.8, chance=0.5, low=0.75, high=0.85
    )
    weak = Exposure(
        what="membership", seen="sums", attack="weak", value=0.6, chance=0.5, low=0.4, high=0.8
    )
    mode = ModeAudit(mode="open", is_actual=True, exposures=(weak, lucky, sure))
    assert mode.worst("membership") == sure
    assert mode.worst("counts") is None


def test_a_hostile_name_does_nothing_there(audited: Audited, browser: Page, tmp_path: Path) -> None:
    name = "<script>hacked = 1</script><img src=https://evil.example/x>"
    hostile = msgspec.structs.replace(audited.audit, federation=name)
    (tmp_path / "page.html").write_text(
        audit_page.render(audited._replace(audit=hostile)), encoding="utf-8"
    )
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.ask("typeof hacked") == "undefined"
    assert [url for url in browser.requests if "evil" in url] == []
