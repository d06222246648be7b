"""Claims of the paper (Wang et al., 2025) about each figure; it has curves, no table of numbers."""

from research.dao_vfl.data import SUBSETS

CLAIMS = {
    "tune": "A step of 0.01.",
    "fig4": (
        "Equal numbers of local iterations learn better than unequal ones of the same sum, on "
        "both data sets."
    ),
    "fig6": "C-MAPSS: with noise it hardly converges, denoised it is as good as without noise. "
    "CIFAR-10: denoised it is better than without noise.",
    "fig7": "The longer the denoiser learns, the better; more so on C-MAPSS, whose set grows.",
    "fig8": "HO learns best, then PPO, then HE.",
    "fig9": "PPO has the lowest latency, then HE, then HO.",
    "fig10": "PPO has the highest reward, then HO, then HE.",
    "curve": "Agents learn on the line itself.",
    "regret": (
        "With a step of order 1/sqrt(T), regret is of order sqrt(T) + T times what noise leaves "
        "in the gradient; there is no figure of it."
    ),
    "central": "There is no centralised model.",
}
TITLES = {
    "tune": "The step of gradient descent, chosen on the training file",
    "fig4": "Fig. 4: local iterations, equal and unequal",
    "fig6": "Fig. 6: noise excluded, included, denoised",
    "fig7": "Fig. 7: how long the denoiser learns",
    "fig8": "Fig. 8: who decides local iterations",
    "fig9": "Fig. 9: latency",
    "fig10": "Fig. 10: reward",
    "curve": "Learning under decisions that stay the same",
    "regret": "Regret against an offline-trained proxy of the best fixed model",
    "central": "Beside a centralised model with the same network",
}
DATASETS = {
    **{name: f"C-MAPSS {subset}" for name, subset in SUBSETS.items()},
    "cifar10": "CIFAR-10",
}
