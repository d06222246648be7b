"""Any number of kinds of texture, drawn from a seed,
for a network to tell apart before it sees a plant's images.
"""

from collections.abc import Callable

import numpy as np

from trainer.data.drawn_surfaces import Defect, Random, Style, draw_field, shade_relief, soft_step
from trainer.seeding import generator

_SHAPES: tuple[Callable[[np.ndarray, float], np.ndarray], ...] = (
    lambda values, _: values,  # clouds, fibres
    lambda values, level: soft_step(values - level, 8),  # spots
    lambda values, level: (
        soft_step(values - level, 8) - 0.4 * np.exp(-(((values - level) / 0.2) ** 2))
    ),  # spots with a rim
    lambda values, level: np.exp(-((values / (0.05 + 0.1 * abs(level))) ** 2)),  # cracks
    lambda values, level: np.sin((2 + 2 * abs(level)) * values),  # bands
    lambda values, level: 2 * shade_relief(soft_step(values - level, 5)),  # dents
    lambda values, _: np.abs(values),  # folds
)
"""From a Gaussian field [n, S, S] to a pattern of about the same deviation."""


def texture(seed: int, kind: int) -> Defect:
    """The kind of texture number `kind`: two patterns, added, one masking the other,
    or one breaking the other up.

    What it has in common with others of its kind are scales, directions and shapes; nothing else
    repeats.
    """
    recipe = generator(seed, "texture", kind)
    first, second = _pattern(recipe), _pattern(recipe)
    way = recipe.choice(["add", "mask", "break"])
    tone = recipe.choice([-1, 1]) * recipe.uniform(20, 60)
    amount = recipe.uniform(0.2, 0.8)
    level = recipe.uniform(-0.5, 1.0)

    def draw(random: Random, look: Style, count: int, size: int) -> np.ndarray:
        one, other = first(random, look, count, size), second(random, look, count, size)
        if way == "add":
            return np.asarray(tone * (amount * one + (1 - amount) * other))
        if way == "mask":
            place = soft_step(draw_field(random, count, size, 0.13, 0.13) - np.float32(level), 8)
            return np.asarray(tone * (place * one + (1 - place) * 0.4 * amount * other))
        return np.asarray(tone * one * soft_step(other - np.float32(level) + 0.3, 6))

    return draw


def _pattern(recipe: Random) -> Defect:
    long, thin = 0.008 * 14 ** recipe.random(), 0.008 * 8 ** recipe.random()
    slant = recipe.choice([0.0, np.pi / 2, recipe.uniform(-np.pi / 2, np.pi / 2)])
    shape = _SHAPES[recipe.integers(len(_SHAPES))]
    level = recipe.uniform(0, 1.8)

    def draw(random: Random, look: Style, count: int, size: int) -> np.ndarray:
        s = look.scale
        return np.asarray(shape(draw_field(random, count, size, long * s, thin * s, slant), level))

    return draw
