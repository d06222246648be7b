"""Outcomes of a line, all at one fixed time."""

from edge.inference.outcomes import Failure, Notice, Verdict

NOON = "2026-03-01T12:00:00.250+00:00"
NOON_MS = 1772366400250


def verdict(number: int = 0, **others: object) -> Verdict:
    return Verdict(
        **{  # type: ignore[arg-type]
            "image": f"part-{number}.png",
            "label": "scratches",
            "confidence": 0.75,
            "probabilities": {"scratches": 0.75},
            "bundle": "press@3",
            "milliseconds": 12.5,
            "time": NOON,
            "id": f"{number:032x}",
        }
        | others
    )


def failure(number: int = 0) -> Failure:
    return Failure(
        image=f"part-{number}", error="no image", remedy="send one", time=NOON, id=f"{number:032x}"
    )


def notice() -> Notice:
    return Notice(kind="drift", text="the images have changed", time=NOON, id="0" * 32)
