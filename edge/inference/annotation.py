"""A judged frame -> a picture that shows what was looked at, what was found, and which places spoke for it."""

import bisect
import io
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from broker_config.protocol.errors import printable
from edge.inference import heatmap as heating
from edge.inference.heatmap import scaled
from edge.inference.tile_inference import look
from edge.inference.verdict import Box, Verdict

if TYPE_CHECKING:
    from edge.inference.pipeline import Inspection

Color = tuple[int, int, int]
Corners = tuple[int, int, int, int]  # left, top, right, bottom

# Wong, "Color blindness", Nature Methods 2011: told apart by everybody.
_DEFECT: Color = (213, 94, 0)
_SOUND: Color = (0, 114, 178)
_INK: Color = (34, 34, 34)
_GRAY: Color = (105, 105, 105)
_PAPER: Color = (250, 250, 248)
_WHITE: Color = (255, 255, 255)
_SMALL, _LARGE, _LARGE_BESIDE = 480, 1280, 720  # pixels: the longer side of a frame as it is shown, at least, at most
_EDGE, _GAP = 16, 10  # pixels
_TITLE, _TEXT = 24, 15  # pixels, heights of letters
_ENCODERS = {"received": "all plants' encoder", "own": "this plant's encoder"}


class _Panel(NamedTuple):
    title: str
    picture: Image.Image


def annotate(inspection: "Inspection", *, heat: bool = False) -> Image.Image:
    """Draw a frame with its region of interest, its tiles and the verdict, RGB.

    With `heat`, and if the bundle has maps, the frame stands there again for each encoder, with the places that spoke
    for the verdict's class, all on one scale: an encoder that counts little looks dark. That asks the model once more.
    Small frames are shown larger, large ones smaller.
    """
    with_heat = heat and "maps" in inspection.model.manifest.extras
    frame, scale = _shown(inspection.cut.photo.image, _LARGE_BESIDE if with_heat else _LARGE)
    panels = [_Panel(_view(inspection), _marked(frame, scale, inspection))]
    return _page(inspection, panels + (_heated(frame, scale, inspection) if with_heat else []))


def jpeg(inspection: "Inspection", *, heat: bool = False) -> bytes:
    """The annotated picture as a JPEG file."""
    out = io.BytesIO()
    annotate(inspection, heat=heat).save(out, "JPEG", quality=90)
    return out.getvalue()


def _shown(image: Image.Image, most: int) -> tuple[Image.Image, float]:
    """The frame at a size at which marks can be read, RGB, and how much larger it is now."""
    longer = max(image.size)
    scale = min(max(longer, _SMALL), most) / longer
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0).convert("RGB"), scale


def _view(inspection: "Inspection") -> str:
    count = len(inspection.cut.boxes)
    width, height = inspection.cut.photo.image.size
    if count == 1:
        return f"{width} x {height} pixels"
    found = sum(tile.defect for tile in inspection.verdict.tiles)
    return f"{width} x {height} pixels, {count} tiles, {found} with a defect"


# ---------------------------------------------------------------- the frame


def _marked(frame: Image.Image, scale: float, inspection: "Inspection") -> Image.Image:
    """The frame with its region and its tiles; what was not looked at is dark."""
    verdict, marked = inspection.verdict, _inside(frame, scale, inspection)
    draw = ImageDraw.Draw(marked, "RGBA")
    for tile in verdict.tiles:
        if not tile.defect:
            draw.rectangle(_drawn(tile.box, scale), outline=(*_WHITE, 80))
    defects = sorted((tile for tile in verdict.tiles if tile.defect), key=lambda tile: -tile.confidence)
    for tile in reversed(defects):
        draw.rectangle(_drawn(tile.box, scale), outline=_DEFECT, width=4 if tile is defects[0] else 2)
    taken: list[Corners] = []
    for tile in defects:
        _label(draw, _drawn(tile.box, scale), f"{tile.label} {tile.confidence:.0%}", taken, frame.size)
    return marked


def _inside(picture: Image.Image, scale: float, inspection: "Inspection") -> Image.Image:
    """A picture of the frame in which what was not looked at is dark."""
    inside = scaled(_around(inspection.cut.boxes), scale)
    dark = Image.blend(picture.convert("L").convert("RGB"), Image.new("RGB", picture.size, _INK), 0.6)
    dark.paste(picture.crop(inside), inside)
    return dark


def _around(boxes: tuple[Box, ...]) -> Box:
    """The region that tiles cover."""
    left, top = min(box.left for box in boxes), min(box.top for box in boxes)
    right, bottom = max(box.left + box.width for box in boxes), max(box.top + box.height for box in boxes)
    return Box(left, top, right - left, bottom - top)


def _drawn(box: Box, scale: float) -> Corners:
    """As Pillow draws rectangles: with their last pixels."""
    left, top, right, bottom = scaled(box, scale)
    return left, top, right - 1, bottom - 1


def _label(draw: ImageDraw.ImageDraw, box: Corners, text: str, taken: list[Corners], size: tuple[int, int]) -> None:
    """Write into a tile's corner, unless that would cover what a surer tile says, or the frame is too narrow for it."""
    font = _font(_TEXT)
    text = printable(text, keep="")
    width, height = round(font.getlength(text)) + 10, _TEXT + 8
    left, top = max(0, min(box[0], size[0] - width)), max(0, min(box[1], size[1] - height))
    plate = (left, top, left + width, top + height)
    if width > size[0] or any(_overlap(plate, other) for other in taken):
        return
    taken.append(plate)
    draw.rectangle(plate, fill=_DEFECT)
    draw.text((left + 5, top + height // 2), text, _WHITE, font, anchor="lm")


def _overlap(one: Corners, other: Corners) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


# ---------------------------------------------------------------- heat


def _heated(frame: Image.Image, scale: float, inspection: "Inspection") -> list[_Panel]:
    """The frame under each encoder's heat."""
    model, (pixels, boxes, _) = inspection.model, inspection.cut
    maps = look(model.predictor, pixels, ("maps",)).maps
    assert maps is not None
    label = model.manifest.classes.index(inspection.verdict.label)
    found = heating.heat(maps, label, boxes, scale, frame.size)
    most, total = max(float(found.max()), 1e-9), max(float(found.sum()), 1e-9)
    titles = [_ENCODERS[each] for each in model.manifest.encoders] or ["encoder"]
    return [
        _Panel(
            f"{title}, {each.sum() / total:.0%} of the heat",
            _inside(heating.over(frame, each / most), scale, inspection),
        )
        for title, each in zip(titles, found, strict=True)
    ]


def _legend(label: str, width: int) -> Image.Image:
    """The colours and what they mean."""
    font = _font(_TEXT)
    before, after = "no more than for other classes", f"speaks for {label}"
    bar = heating.colors(np.tile(np.linspace(0, 1, 160, dtype=np.float32), (12, 1)))
    legend = Image.new("RGB", (width, _TEXT + 8), _PAPER)
    draw = ImageDraw.Draw(legend)
    draw.text((0, legend.height // 2), before, _GRAY, font, anchor="lm")
    start = round(font.getlength(before)) + _GAP
    legend.paste(Image.fromarray(bar), (start, (legend.height - 12) // 2))
    draw.text((start + 160 + _GAP, legend.height // 2), after, _GRAY, font, anchor="lm")
    return legend


# ---------------------------------------------------------------- the page


def _page(inspection: "Inspection", panels: list[_Panel]) -> Image.Image:
    """Head, panels beside each other or, if they are wide, below each other, and the legend of the heat."""
    wide, high = panels[0].picture.size
    beside = wide <= 1.6 * high
    caption = _TEXT + 12
    columns = len(panels) if beside else 1
    width = max(columns * (wide + _GAP) - _GAP, _SMALL)
    rows = -(-len(panels) // columns)
    head = _head(inspection.verdict, width)
    legend = [_legend(printable(inspection.verdict.label, keep=""), width)] if len(panels) > 1 else []
    height = head.height + rows * (caption + high + _GAP) - _GAP + sum(_GAP + each.height for each in legend)
    page = Image.new("RGB", (width + 2 * _EDGE, height + 2 * _EDGE), _PAPER)
    page.paste(head, (_EDGE, _EDGE))
    draw, font = ImageDraw.Draw(page), _font(_TEXT)
    for number, (title, picture) in enumerate(panels):
        row, column = divmod(number, columns)
        left, top = _EDGE + column * (wide + _GAP), _EDGE + head.height + row * (caption + high + _GAP)
        room = wide if beside and len(panels) > 1 else width
        draw.text((left, top + caption // 2), _fitted(title, font, room), _GRAY, font, anchor="lm")
        page.paste(picture, (left, top + caption))
    for each in legend:
        page.paste(each, (_EDGE, page.height - _EDGE - each.height))
    return page


def _head(verdict: Verdict, width: int) -> Image.Image:
    """What the verdict is, of which image and by which model, and why somebody should look at it."""
    color = _DEFECT if verdict.defect else _SOUND
    what = f"Defect: {verdict.label}" if verdict.defect else f"No defect ({verdict.label})"
    small = [f"{verdict.image}   {verdict.bundle}   {verdict.time}"]
    if verdict.disagreement is not None:
        small.append(f"the encoders disagree by {verdict.disagreement:.2f}")
    small += [f"in doubt: {doubt}" for doubt in verdict.doubts]
    line = _TEXT + 6
    head = Image.new("RGB", (width, _TITLE + 12 + line * len(small)), _PAPER)
    draw, large, font = ImageDraw.Draw(head), _font(_TITLE), _font(_TEXT)
    draw.rectangle((0, 2, 7, _TITLE + 5), fill=color)
    sure = f"{verdict.confidence:.1%}"
    room = width - 16 - round(large.getlength(f"  {sure}"))
    draw.text((16, _TITLE // 2 + 3), f"{_fitted(what, large, room)}  {sure}", color, large, anchor="lm")
    for number, text in enumerate(small):
        ink = _INK if text.startswith("in doubt") else _GRAY
        draw.text((0, _TITLE + 12 + line * number + line // 2), _fitted(text, font, width), ink, font, anchor="lm")
    return head


def _fitted(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, without its end if there is no room for it."""
    text = printable(text[:1000], keep="")
    if font.getlength(text) <= width:
        return text
    most = bisect.bisect_right(range(len(text)), width, key=lambda count: round(font.getlength(f"{text[:count]}…")))
    return f"{text[: most - 1]}…" if most else ""


def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own typeface; `size` in pixels."""
    return ImageFont.load_default(size)  # type: ignore[return-value]
