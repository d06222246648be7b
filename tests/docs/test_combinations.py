"""The page of what does not combine has the table's rows."""

from tests.support.combined_features import ASKED, plain
from tests.support.paths import REPOSITORY
from trainer.federation.combinations import ROWS, Exclusion, Wanted
from trainer.methods import METHODS


def cells(row: Exclusion, methods: dict[str, Wanted]) -> str:
    """A row of the page; methods that have a feature with their own options are named."""
    shown = []
    for feature in (row.one, row.other):
        having_it = [f"`{name}`" for name, wanted in methods.items() if feature.find(wanted)]
        named = f" ({', '.join(having_it)})" if feature not in ASKED and having_it else ""
        shown.append(f"{feature.title}{named}")
    return f"| {shown[0]} | {shown[1]} | {row.because} |"


def test_the_page_has_every_row_and_no_other() -> None:
    methods = {name: plain(name) for name in METHODS}
    page = (REPOSITORY / "docs" / "combinations.md").read_text()
    table = "\n".join(cells(row, methods) for row in ROWS)
    assert table in page, f"write there:\n{table}"
    assert page.count("\n| ") == len(ROWS) + page.partition(table)[2].count("\n| ") + 1
