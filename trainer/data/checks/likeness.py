"""Likeness of images: whether two show one spot, moved a little, in other light,
turned, mirrored or cropped.

Phase correlation (Kuglin and Hines, 1975): of each thumbnail only the phases of low frequencies are
kept. Exposure hardly changes them, and between two pictures of one spot they differ by those of one
displacement; statistics of a texture, which all its spots share, are in the magnitudes. Pairs are
proposed by few frequencies at a grid of displacements, then confirmed by more of them, with zooms
and small turns beside.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainer.progress.long_work import steps

SIDE = 64  # pixels a side of a thumbnail
MAX_COMPARED = 10_000  # images; the comparison is quadratic

# Measured on tuning pools by research/studies/look_alikes.py
# correlations of phases, from which a pair is proposed and is alike
_PROPOSED = 0.45
ALIKE = 0.45
# cycles a side that proposals and confirmations go up to
_COARSE = 8
_FINE = 16
_GRID = np.arange(-8, 9, 4)  # displacements for proposals, pixels of a thumbnail
_NEAR = np.arange(-4, 5)  # those around a proposed one
_ZOOM = 0.82  # part of a side that the other image may show, for proposals
# for confirmations; the turns are degrees
_ZOOMS = (1.0, 0.94, 0.88, 0.82, 0.76)
_TURNS = (0.0, -4.0, 4.0)
# pixels: slower changes count as light; gray values: less contrast counts as noise
_BLUR = 6.0
_FLOOR = 2.0
_MIN_SIDE = 16  # pixels; a smaller image has too few frequencies
# images, and the correlation with their mean from which they share a scene
_MIN_FOR_SCENE = 20
_SCENE = 0.5
_BLOCK = 128  # images that are compared with all later ones at once


class Pair(NamedTuple):
    """Two images that show one spot, by their positions."""

    one: int
    other: int
    likeness: float  # correlation of phases, at most 1


def make_thumbnail(gray: Image.Image) -> np.ndarray:
    """The thumbnail that likeness is measured on, uint8 [SIDE, SIDE], of a gray image;
    black for one too small.
    """
    if min(gray.size) < _MIN_SIDE:
        return np.zeros((SIDE, SIDE), np.uint8)
    return np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.BOX))


def find_alike(thumbnails: Sequence[np.ndarray]) -> list[Pair]:
    """The pairs of images that look alike, the likest first;
    none of more than MAX_COMPARED images.
    """
    if not 1 < len(thumbnails) <= MAX_COMPARED:
        return []
    pictures = _remove_scene(_normalise(thumbnails))
    confirmation = _Confirmation(pictures)
    found = [
        Pair(proposal.one, proposal.other, likeness)
        for proposal in _propose(pictures)
        if (likeness := confirmation.correlate(proposal)) >= ALIKE
    ]
    return sorted(found, key=lambda pair: (-pair.likeness, pair.one, pair.other))


class _Frequencies(NamedTuple):
    """The frequencies within a radius, one of each conjugate pair, and phases of displacements."""

    rows: np.ndarray  # int [f]
    columns: np.ndarray

    @classmethod
    def up_to(cls, radius: int) -> "_Frequencies":
        rows, columns = np.meshgrid(
            np.arange(-radius, radius + 1), np.arange(radius + 1), indexing="ij"
        )
        chosen = (rows**2 + columns**2 <= radius**2) & ((columns > 0) | (rows > 0))
        return cls(rows[chosen], columns[chosen])

    def phases(self, pictures: np.ndarray) -> np.ndarray:
        """Unit vectors complex64 [n, f] of the phases in normalised pictures [n, SIDE, SIDE];
        0 for empty ones.
        """
        spectrum = np.fft.rfft2(pictures * _WINDOW)[:, self.rows, self.columns]
        size = np.abs(spectrum)
        phases: np.ndarray = np.where(size > 1e-3, spectrum / np.maximum(size, 1e-3), 0).astype(
            np.complex64
        )
        return phases / np.float32(np.sqrt(len(self.rows)))

    def displacements(self, down: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Phases complex64 [d, f] of moving a picture down and right by so many pixels [d]."""
        turns = np.outer(down, self.rows) + np.outer(right, self.columns)
        return np.exp(-2j * np.pi / SIDE * turns).astype(np.complex64)


def _make_window() -> np.ndarray:
    side = np.sqrt(np.hanning(SIDE + 2)[1:-1])
    return np.outer(side, side).astype(np.float32)


_WINDOW = _make_window()


def _normalise(thumbnails: Sequence[np.ndarray]) -> np.ndarray:
    """Thumbnails float16 [n, SIDE, SIDE] without slow changes of light and contrast."""
    margin = SIDE // 4
    down = np.fft.fftfreq(SIDE + 2 * margin)
    right = np.fft.rfftfreq(SIDE + 2 * margin)
    low = np.exp(-2 * (np.pi * _BLUR) ** 2 * (down[:, None] ** 2 + right**2))

    def blur(pictures: np.ndarray) -> np.ndarray:
        padded = np.pad(pictures, ((0, 0), (margin, margin), (margin, margin)), mode="reflect")
        return np.fft.irfft2(np.fft.rfft2(padded) * low)[:, margin:-margin, margin:-margin].astype(
            np.float32
        )

    normal = []
    for start in range(0, len(thumbnails), _BLOCK):
        pictures = np.stack(thumbnails[start : start + _BLOCK]).astype(np.float32)
        detail = pictures - blur(pictures)
        normal.append(
            (detail / (np.sqrt(np.maximum(blur(detail**2), 0)) + _FLOOR)).astype(np.float16)
        )
    return np.concatenate(normal)


def _remove_scene(pictures: np.ndarray) -> np.ndarray:
    """Pictures without what nearly all of them show at one place: a part's outline, a fixture."""
    if len(pictures) < _MIN_FOR_SCENE:
        return pictures
    scene = pictures.mean(0, dtype=np.float32)
    flat = pictures.reshape(len(pictures), -1).astype(np.float32)
    shares = (
        flat
        @ scene.ravel()
        / np.maximum(np.linalg.norm(flat, axis=1) * np.linalg.norm(scene), 1e-6)
    )
    return pictures - scene.astype(np.float16) if np.quantile(shares, 0.2) > _SCENE else pictures


def _warp(picture: np.ndarray, zoom: float, turn: float) -> np.ndarray:
    """The picture [SIDE, SIDE] zoomed into and turned about its centre."""
    if (zoom, turn) == (1.0, 0.0):
        return picture
    across = zoom * np.cos(np.radians(turn))
    along = zoom * np.sin(np.radians(turn))
    middle = SIDE / 2
    matrix = (
        across,
        -along,
        middle * (1 - across + along),
        along,
        across,
        middle * (1 - along - across),
    )
    return np.asarray(
        Image.fromarray(picture).transform(
            (SIDE, SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        )
    )


class _Proposal(NamedTuple):
    one: int
    other: int
    symmetry: int  # of the first, which makes it most like the second
    down: int  # displacement of the first after that, pixels
    right: int


_QUARTERS = 4  # symmetries without their half turns


def _apply_symmetry(picture: np.ndarray, number: int) -> np.ndarray:
    """One of the eight symmetries of pictures [..., SIDE, SIDE];
    half turns of the first four are the last four.
    """
    half, number = divmod(number, _QUARTERS)
    mirrored, quarter = divmod(number, 2)
    turned = np.swapaxes(picture, -1, -2) if mirrored else picture
    return np.rot90(turned, quarter + 2 * half, (-2, -1))


class _Phases(NamedTuple):
    """Phases as two arrays [..., images, f], which matrix products want in one piece."""

    real: np.ndarray
    imaginary: np.ndarray

    @classmethod
    def of(cls, phases: np.ndarray) -> "_Phases":
        return cls(np.ascontiguousarray(phases.real), np.ascontiguousarray(phases.imag))

    def only(self, position: int) -> "_Phases":
        """One image of them."""
        return _Phases(
            *(np.ascontiguousarray(part[..., position : position + 1, :]) for part in self)
        )


def _correlate(moved: _Phases, plain: _Phases) -> tuple[np.ndarray, np.ndarray]:
    """Two parts [variants, n, m] of the correlations of variants of n images with m images.

    Their sum is the correlation; their difference, that with the half turn, which conjugates
    phases.
    """
    variants, count, size = moved.real.shape
    real, imaginary = (
        (each.reshape(variants * count, size) @ other.T).reshape(variants, count, -1)
        for each, other in zip(moved, plain, strict=True)
    )
    return real, imaginary


def _propose(pictures: np.ndarray) -> Iterator[_Proposal]:
    """Pairs of pictures that may be alike: each against those after it."""
    frequencies = _Frequencies.up_to(_COARSE)
    down, right = (each.ravel() for each in np.meshgrid(_GRID, _GRID, indexing="ij"))
    moves = frequencies.displacements(down, right)
    starts = range(0, len(pictures), _BLOCK)
    plain = []
    for first_of_block in starts:
        plain.append(
            [
                _Phases.of(frequencies.phases(view))
                for view in _zoom_beside(pictures[first_of_block : first_of_block + _BLOCK])
            ]
        )
    for first, start in enumerate(steps("looking for look-alikes", starts)):
        variants = []
        for view in _zoom_beside(pictures[start : start + _BLOCK]):
            turned = [
                frequencies.phases(_apply_symmetry(view, symmetry)) for symmetry in range(_QUARTERS)
            ]
            shifted = [each * move for each, move in product(turned, moves)]
            variants.append(_Phases.of(np.stack(shifted)))
        whole, part = variants
        for second in range(first, len(starts)):
            compared = (
                (whole, plain[second][0]),
                (whole, plain[second][1]),
                (part, plain[second][0]),
            )
            best = functools.reduce(np.maximum, (_find_best(*each) for each in compared))
            for row, column in np.argwhere(best >= _PROPOSED).tolist():
                one = start + row
                other = starts[second] + column
                if one < other:
                    pair = [
                        _correlate(moved.only(row), still.only(column)) for moved, still in compared
                    ]
                    real, imaginary = (
                        np.stack(each).reshape(len(compared), -1)
                        for each in zip(*pair, strict=True)
                    )
                    view, variant = np.unravel_index(
                        (real + np.abs(imaginary)).argmax(), real.shape
                    )
                    half = bool(imaginary[view, variant] < 0)
                    symmetry, move = divmod(int(variant), len(moves))
                    sign = -1 if half else 1  # of a displaced picture's half turn
                    yield _Proposal(
                        one,
                        other,
                        symmetry + _QUARTERS * half,
                        sign * int(down[move]),
                        sign * int(right[move]),
                    )


def _zoom_beside(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pictures as they are, and zoomed into: one may show a part of another."""
    whole = pictures.astype(np.float32)
    return whole, np.stack([_warp(each, _ZOOM, 0) for each in whole])


def _find_best(moved: _Phases, plain: _Phases) -> np.ndarray:
    """The best correlation [n, m] of any variant of n images with m images."""
    real, imaginary = _correlate(moved, plain)
    np.abs(imaginary, out=imaginary)
    real += imaginary
    best: np.ndarray = real.max(0)
    return best


class _Confirmation:
    """Measures proposed pairs by more frequencies,
    zooming into and turning either image if need be.
    """

    def __init__(self, pictures: np.ndarray):
        self._pictures = pictures
        self._frequencies = _Frequencies.up_to(_FINE)
        self._variants = functools.lru_cache(1024)(self._warped)
        down, right = (each.ravel() for each in np.meshgrid(_NEAR, _NEAR, indexing="ij"))
        self._near = self._frequencies.displacements(down, right)

    def correlate(self, proposal: _Proposal) -> float:
        """The correlation of the two images' phases, at most 1."""
        one, other, symmetry, down, right = proposal
        moves = self._near * self._frequencies.displacements(np.array([down]), np.array([right]))
        first = self._frequencies.phases(_apply_symmetry(self._picture(one), symmetry)[None])
        second = self._frequencies.phases(self._picture(other)[None])
        moved = first * moves
        likeness = self._best(moved, second)
        if likeness < ALIKE:
            likeness = max(likeness, self._best(moved, self._variants(other, 0)))
        if likeness < ALIKE:
            likeness = max(
                likeness, self._best(second * moves.conj(), self._variants(one, symmetry))
            )
        return likeness

    @staticmethod
    def _best(moved: np.ndarray, plain: np.ndarray) -> float:
        return float((moved.real @ plain.real.T + moved.imag @ plain.imag.T).max())

    def _picture(self, position: int) -> np.ndarray:
        return np.asarray(self._pictures[position], np.float32)

    def _warped(self, position: int, symmetry: int) -> np.ndarray:
        """Phases [variants, f] of the image, zoomed and turned."""
        picture = self._picture(position)
        warped = np.stack(
            [
                _warp(picture, zoom, turn)
                for zoom, turn in product(_ZOOMS, _TURNS)
                if (zoom, turn) != (1, 0)
            ]
        )
        return self._frequencies.phases(_apply_symmetry(warped, symmetry))
