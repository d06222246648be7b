"""Annotated pictures of inspected frames: region of interest, tiles, verdict and,
on demand, heatmaps.
"""

import bisect
import io
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from broker_config.protocol.errors import replace_unprintable
from edge.inference.heatmap import class_heat, heat_colors, overlay, scale_box
from edge.inference.image_decoding import ANNOTATED
from edge.inference.outcomes import Box, Verdict

if TYPE_CHECKING:
    from edge.inference.pipeline import Inspection

Color = tuple[int, int, int]
Corners = tuple[int, int, int, int]  # left, top, right, bottom

# Wong, "Color blindness", Nature Methods 2011: can be told apart by everybody.
_DEFECT: Color = (213, 94, 0)
_SOUND: Color = (0, 114, 178)
_INK: Color = (34, 34, 34)
_GRAY: Color = (105, 105, 105)
_PAPER: Color = (250, 250, 248)
_WHITE: Color = (255, 255, 255)
# Pixels of the longer side of a frame in the picture: at least, at most, and at most beside
# heatmaps.
_SMALL = 480
_LARGE = 1280
_LARGE_BESIDE = 720
# pixels
_EDGE = 16
_GAP = 10
# pixels, font sizes
_TITLE = 24
_TEXT = 15
_ENCODERS = {
    "received": "all plants' encoder",
    "own": "this plant's encoder",
    "alone": "the encoder trained alone",
}


class _Panel(NamedTuple):
    title: str
    picture: Image.Image


def annotate(inspection: "Inspection", *, heat: bool = False) -> Image.Image:
    """Draw a frame with its region of interest, its tiles and the verdict, RGB.

    With `heat`, and if the bundle has maps, the frame is repeated for each encoder with its heatmap
    for the verdict's class, all on one scale: an encoder of little influence looks dark. That runs
    the model once more. Small frames are enlarged, large ones reduced.
    """
    with_heat = heat and "maps" in inspection.model.manifest.extras
    largest = _LARGE_BESIDE if with_heat else _LARGE
    frame, scale = _resize(inspection.tiled.photo.image, largest)
    panels = [_Panel(_frame_title(inspection), _draw_tiles(frame, scale, inspection))]
    heat_panels = _heat_panels(frame, scale, inspection) if with_heat else []
    return _page(inspection, panels + heat_panels)


def render_frame(inspection: "Inspection", *, heat: bool = False) -> Image.Image:
    """A frame with its tiles, RGB; with `heat`, and if the bundle has maps,
    under the sum of all encoders' heat.
    """
    frame, scale = _resize(inspection.tiled.photo.image, _LARGE)
    if heat and "maps" in inspection.model.manifest.extras:
        total = _heat(frame, scale, inspection).sum(0)
        frame = overlay(frame, total / max(float(total.max()), 1e-9))
    return _mark(_draw_tiles(frame, scale, inspection))


def _mark(picture: Image.Image) -> Image.Image:
    """The picture, to be told from an image of a surface:
    with a comment of the JPEG file as which it is saved.
    """
    picture.info["comment"] = ANNOTATED.encode()
    return picture


def encode_jpeg(picture: Image.Image | NDArray[np.uint8]) -> bytes:
    """A JPEG file of a picture, or of pixels [height, width, 3] RGB."""
    out = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    (image).save(out, "JPEG", quality=90)
    return out.getvalue()


def _resize(image: Image.Image, most: int) -> tuple[Image.Image, float]:
    """The frame, RGB, at a size at which marks can be read, and the factor."""
    longer = max(image.size)
    scale = min(max(longer, _SMALL), most) / longer
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0).convert("RGB"), scale


def _frame_title(inspection: "Inspection") -> str:
    count = len(inspection.tiled.boxes)
    width, height = inspection.tiled.photo.image.size
    if count == 1:
        return f"{width} x {height} pixels"
    found = sum(tile.defect for tile in inspection.verdict.tiles)
    return f"{width} x {height} pixels, {count} tiles, {found} with a defect"


# ---------------------------------------------------------------- the frame


def _draw_tiles(frame: Image.Image, scale: float, inspection: "Inspection") -> Image.Image:
    """The frame with its tiles; what was not inspected is dark."""
    verdict = inspection.verdict
    picture = _dim_outside(frame, scale, inspection)
    draw = ImageDraw.Draw(picture, "RGBA")
    for tile in verdict.tiles:
        if not tile.defect:
            draw.rectangle(_corners(tile.box, scale), outline=(*_WHITE, 80))
    defects = sorted(
        (tile for tile in verdict.tiles if tile.defect), key=lambda tile: -tile.confidence
    )
    for tile in reversed(defects):
        width = 4 if tile is defects[0] else 2
        draw.rectangle(_corners(tile.box, scale), outline=_DEFECT, width=width)
    occupied: list[Corners] = []
    for tile in defects:
        _draw_label(
            draw,
            _corners(tile.box, scale),
            f"{tile.label} {tile.confidence:.0%}",
            occupied,
            frame.size,
        )
    return picture


def _dim_outside(picture: Image.Image, scale: float, inspection: "Inspection") -> Image.Image:
    """A picture of the frame with the part that was not inspected darkened."""
    inside = scale_box(_bounding_box(inspection.tiled.boxes), scale)
    dark = Image.blend(
        picture.convert("L").convert("RGB"), Image.new("RGB", picture.size, _INK), 0.6
    )
    dark.paste(picture.crop(inside), inside)
    return dark


def _bounding_box(boxes: tuple[Box, ...]) -> Box:
    """The smallest rectangle around all tiles."""
    left = min(box.left for box in boxes)
    top = min(box.top for box in boxes)
    right = max(box.left + box.width for box in boxes)
    bottom = max(box.top + box.height for box in boxes)
    return Box(left, top, right - left, bottom - top)


def _corners(box: Box, scale: float) -> Corners:
    """A rectangle as Pillow draws it: its last pixels included."""
    left, top, right, bottom = scale_box(box, scale)
    return left, top, right - 1, bottom - 1


def _draw_label(
    draw: ImageDraw.ImageDraw,
    box: Corners,
    text: str,
    occupied: list[Corners],
    size: tuple[int, int],
) -> None:
    """Label a tile in its corner, unless that would cover a more confident tile's label or the
    frame is too narrow.
    """
    font = _font(_TEXT)
    text = replace_unprintable(text, keep="")
    width, height = round(font.getlength(text)) + 10, _TEXT + 8
    left = max(0, min(box[0], size[0] - width))
    top = max(0, min(box[1], size[1] - height))
    plate = (left, top, left + width, top + height)
    if width > size[0] or any(_overlap(plate, other) for other in occupied):
        return
    occupied.append(plate)
    draw.rectangle(plate, fill=_DEFECT)
    draw.text((left + 5, top + height // 2), text, _WHITE, font, anchor="lm")


def _overlap(one: Corners, other: Corners) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


# ---------------------------------------------------------------- heat


def _heat_panels(frame: Image.Image, scale: float, inspection: "Inspection") -> list[_Panel]:
    """The frame under each encoder's heatmap."""
    found = _heat(frame, scale, inspection)
    most = max(float(found.max()), 1e-9)
    total = max(float(found.sum()), 1e-9)
    titles = [_ENCODERS[each] for each in inspection.model.manifest.encoders] or ["encoder"]
    return [
        _Panel(
            f"{title}, {each.sum() / total:.0%} of the heat",
            _dim_outside(overlay(frame, each / most), scale, inspection),
        )
        for title, each in zip(titles, found, strict=True)
    ]


def _heat(frame: Image.Image, scale: float, inspection: "Inspection") -> NDArray[np.float32]:
    """Evidence for the verdict's class by each encoder, as `class_heat` gives it."""
    model = inspection.model
    (pixels, boxes, _) = inspection.tiled
    maps = model.predictor.run_one_by_one(pixels, ("maps",)).maps
    assert maps is not None
    return class_heat(
        maps, model.manifest.classes.index(inspection.verdict.label), boxes, scale, frame.size
    )


def _legend(label: str, width: int) -> Image.Image:
    """The colours and what they mean."""
    font = _font(_TEXT)
    before = "no more than for other classes"
    after = f"speaks for {label}"
    bar = heat_colors(np.tile(np.linspace(0, 1, 160, dtype=np.float32), (12, 1)))
    legend = Image.new("RGB", (width, _TEXT + 8), _PAPER)
    draw = ImageDraw.Draw(legend)
    draw.text((0, legend.height // 2), before, _GRAY, font, anchor="lm")
    start = round(font.getlength(before)) + _GAP
    legend.paste(Image.fromarray(bar), (start, (legend.height - 12) // 2))
    draw.text((start + 160 + _GAP, legend.height // 2), after, _GRAY, font, anchor="lm")
    return legend


# ---------------------------------------------------------------- the page


def _page(inspection: "Inspection", panels: list[_Panel]) -> Image.Image:
    """Header, panels beside each other or, if they are wide, below each other,
    and the legend of the heatmap.
    """
    wide, high = panels[0].picture.size
    beside = wide <= 1.6 * high
    caption = _TEXT + 12
    columns = len(panels) if beside else 1
    width = max(columns * (wide + _GAP) - _GAP, _SMALL)
    rows = -(-len(panels) // columns)
    header = _header(inspection.verdict, width)
    legend = (
        [_legend(replace_unprintable(inspection.verdict.label, keep=""), width)]
        if len(panels) > 1
        else []
    )
    height = (
        header.height
        + rows * (caption + high + _GAP)
        - _GAP
        + sum(_GAP + each.height for each in legend)
    )
    page = Image.new("RGB", (width + 2 * _EDGE, height + 2 * _EDGE), _PAPER)
    page.paste(header, (_EDGE, _EDGE))
    draw = ImageDraw.Draw(page)
    font = _font(_TEXT)
    for number, (title, picture) in enumerate(panels):
        row, column = divmod(number, columns)
        left = _EDGE + column * (wide + _GAP)
        top = _EDGE + header.height + row * (caption + high + _GAP)
        room = wide if beside and len(panels) > 1 else width
        draw.text(
            (left, top + caption // 2), _truncate(title, font, room), _GRAY, font, anchor="lm"
        )
        page.paste(picture, (left, top + caption))
    for each in legend:
        page.paste(each, (_EDGE, page.height - _EDGE - each.height))
    return _mark(page)


def _header(verdict: Verdict, width: int) -> Image.Image:
    """Label and confidence, image and model, and the reasons for doubt."""
    color = _DEFECT if verdict.defect else _SOUND
    what = f"Defect: {verdict.label}" if verdict.defect else f"No defect ({verdict.label})"
    small = [f"{verdict.image}   {verdict.bundle}   {verdict.time}"]
    if verdict.disagreement is not None:
        small.append(f"the encoders disagree by {verdict.disagreement:.2f}")
    if not verdict.taught:
        small.append(f"this plant never taught {verdict.label}")
    small += [f"in doubt: {doubt}" for doubt in verdict.doubts]
    line_height = _TEXT + 6
    header = Image.new("RGB", (width, _TITLE + 12 + line_height * len(small)), _PAPER)
    draw = ImageDraw.Draw(header)
    large = _font(_TITLE)
    font = _font(_TEXT)
    draw.rectangle((0, 2, 7, _TITLE + 5), fill=color)
    sure = f"{verdict.confidence:.1%}"
    room = width - 16 - round(large.getlength(f"  {sure}"))
    draw.text(
        (16, _TITLE // 2 + 3), f"{_truncate(what, large, room)}  {sure}", color, large, anchor="lm"
    )
    for number, text in enumerate(small):
        ink = _INK if text.startswith("in doubt") else _GRAY
        draw.text(
            (0, _TITLE + 12 + line_height * number + line_height // 2),
            _truncate(text, font, width),
            ink,
            font,
            anchor="lm",
        )
    return header


def _truncate(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, shortened to a width."""
    text = replace_unprintable(text[:1000], keep="")
    if font.getlength(text) <= width:
        return text
    most = bisect.bisect_right(
        range(len(text)), width, key=lambda count: round(font.getlength(f"{text[:count]}…"))
    )
    return f"{text[: most - 1]}…" if most else ""


def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own typeface; `size` in pixels."""
    return ImageFont.load_default(size)  # type: ignore[return-value]
