"""Outcomes as a CSV file, for spreadsheets: the main columns only."""

import csv
import io
from pathlib import Path

from msgspec import Struct

from broker_config.protocol.errors import replace_unprintable
from edge.config.instance import Instance
from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.sinks.append_file import AppendingSink
from edge.sinks.sink import IsOurs, Item, Origin
from edge.terminal.formatting import plain_cell

COLUMNS = (
    "seq", "id", "type", "time", "source", "image", "label", "confidence", "defect", "taught",
    "doubts", "bundle", "model", "milliseconds", "text",
)  # fmt: skip


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="csv"
):
    """`[[sinks]] kind = "csv"`: a row for each outcome."""

    path: str

    def open_sink(self, instance: Instance, origin: Origin) -> "Csv":
        """Open the sink."""
        return Csv(Path(self.path), origin.contains)


class Csv(AppendingSink):
    """A header, then a row for each outcome.

    Line ends in names are replaced, so that a row is a line.
    """

    header = (",".join(COLUMNS) + "\n").encode()

    def __init__(self, path: Path, is_ours: IsOurs) -> None:
        self.name = f"csv:{path.absolute()}"
        super().__init__(path, is_ours)

    def format(self, item: Item) -> bytes:
        """The outcome's row."""
        row = {"seq": item.seq, "type": type(item.outcome).__name__} | _cells(item.outcome)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(
            plain_cell(replace_unprintable(str(row.get(name, "")), keep="")) for name in COLUMNS
        )
        return text.getvalue().encode(errors="replace")

    def parse(self, line: bytes) -> tuple[int, str]:
        """Number and id; ValueError for the header and for rows of another origin."""
        seq, id_, *_ = [*line.decode().split(",", 2), ""]
        return int(seq), id_

    def is_partial(self, half: bytes) -> bool:
        """Whether it begins with a number."""
        return half.partition(b",")[0].isdigit()


def _cells(outcome: Outcome) -> dict[str, object]:
    match outcome:
        case Verdict():
            cells: dict[str, object] = {
                name: getattr(outcome, name) for name in COLUMNS if hasattr(outcome, name)
            }
            flags = {"defect": int(outcome.defect), "taught": int(outcome.taught)}
            return cells | flags | {"doubts": " ".join(outcome.doubts)}
        case Failure():
            text = f"{outcome.error}; {outcome.remedy}"
            return {
                "id": outcome.id,
                "time": outcome.time,
                "source": outcome.source,
                "image": outcome.image,
                "text": text,
            }
        case Notice():
            return {
                "id": outcome.id,
                "time": outcome.time,
                "text": f"{outcome.kind}: {outcome.text}",
            }
