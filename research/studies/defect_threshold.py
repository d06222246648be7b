"""Threshold of a defect by Bayes' rule or by what held-out images would have cost:
expected cost on fresh images.

    python -m research.studies.defect_threshold

Logits of four classes, the first of which means no defect, are twice as sure as they should be; in
other rows the model also leans to or away from the first class, which a temperature does not cure.
A few held-out images give the temperature and, for the empirical rule, the threshold at which they
cost least; 20,000 others tell what either threshold costs an image.
"""

import numpy as np

from trainer.training.calibration import fit_temperature, softmax

FRESH, REPEATS = 20_000, 60
Random = np.random.Generator


def draw(random: Random, count: int, leaning: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, 4] and labels [n]."""
    first = np.eye(1, 4)
    logits = random.normal(0, 2, (count, 4)) + 0.5 * first
    labels = (softmax(logits).cumsum(1) > random.random((count, 1))).argmax(1)
    return 2 * logits + leaning * first, labels


def cost_of(defect: np.ndarray, labels: np.ndarray, threshold: float, missed_cost: float) -> float:
    """Mean cost in false rejects of verdicts with these probabilities of a defect [n]."""
    called = defect >= threshold
    return float((missed_cost * (~called & (labels != 0)) + (called & (labels == 0))).mean())


def least_cost(defect: np.ndarray, labels: np.ndarray, missed_cost: float) -> tuple[float, float]:
    """The least mean cost, and the threshold that has it."""
    ordered = np.concatenate([[0.0], np.sort(defect), [1.0]])
    thresholds = (ordered[1:] + ordered[:-1]) / 2
    return min((cost_of(defect, labels, each, missed_cost), float(each)) for each in thresholds)


def main() -> None:
    """Measure and print."""
    random = np.random.default_rng(0)
    for leaning in (0.0, 2.0, -2.0):
        logits, labels = draw(random, FRESH, leaning)
        for count in (30, 60, 200):
            for missed_cost in (1.0, 5.0, 20.0):
                found = []
                for _ in range(REPEATS):
                    few, truth = draw(random, count, leaning)
                    divisor = fit_temperature(few, truth)
                    promised, empirical = least_cost(
                        1 - softmax(few / divisor)[:, 0], truth, missed_cost
                    )
                    fresh = 1 - softmax(logits / divisor)[:, 0]
                    rules = (1 / (1 + missed_cost), empirical)
                    found.append(
                        (*(cost_of(fresh, labels, each, missed_cost) for each in rules), promised)
                    )
                bayes, chosen, promised = np.mean(found, 0)
                print(
                    f"leaning {leaning:+.0f}, {count:3} images, missed costs {missed_cost:2.0f}: "
                    f"Bayes {bayes:.3f}, empirical {chosen:.3f}, which promised {promised:.3f}"
                )


if __name__ == "__main__":
    main()
