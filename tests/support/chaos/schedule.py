"""Schedule of the kills: drawn from a seed,
so that a run can be repeated as far as the machine's timing allows.
"""

import itertools
import random
from typing import Literal, NamedTuple

from tests.support.chaos.tracing import When
from tests.support.mosquitto import BROKER
from trainer.federation.server.journal import TRANSITIONS

# Without the operator's own, of a coordinator that is down, and what there is where contributions
# are masked alone.
KINDS = tuple(kind for kind in TRANSITIONS if kind not in ("aborted", "masked"))

COORDINATOR = "coordinator"
_NODES_STEPS = ("contributed", "refined", "personal")
_FIRST, _LAST = ("begun", "admitted"), ("concluded", "finished", "personal")
# who does what then, several times in a round
_MASKED = ((COORDINATOR, "masked"), ("", "kept masks"))
_AGAIN = ("opened", "contributed", "refined")  # happen in every round: hit several times
_PAUSE = 1.2  # seconds between two kills in a round, at most
_MIDWAY = 0.5  # share of the kills at random moments
# "": one of the nodes
_VICTIMS = (BROKER, COORDINATOR, "", "", COORDINATOR, "", BROKER, "", COORDINATOR, "")


class Strike(NamedTuple):
    """What is to come: a kill at a random moment, or by a fault that is armed then;
    or a copy of a state folder.

    A `twin` is a process on a copy of the victim's folder, while the victim runs. A `backup` is a
    kill after which the folder is copied; right after the next round or the next but one is opened,
    a kill follows after which that copy takes the folder's place.
    """

    round: int  # not before this round is open; 0: from the start
    wait: float  # seconds after the strike before; none if the round is over
    victim: str
    down: float  # seconds until it is started again
    # right before or after the victim's next step of this kind
    fault: tuple[When, str] | None = None
    midway: bool = False  # while a blob is under way, unless the round is over
    deed: Literal["kill", "twin", "backup"] = "kill"


def draw(
    seed: int, kills: int, rounds: int, nodes: tuple[str, ...], *, is_masked: bool = False
) -> list[Strike]:
    """As many strikes as `kills`, spread over the rounds; up to half of them are faults,
    to hit each kind of step.
    """
    chance = random.Random(seed)
    faults = _faults(chance, rounds, nodes, is_masked=is_masked)
    chosen = faults if 2 * len(faults) <= kills else chance.sample(faults, kills // 2)
    strikes = list(chosen)
    turns = itertools.cycle(nodes)
    victims = [
        _VICTIMS[number % len(_VICTIMS)] or next(turns) for number in range(kills - len(chosen))
    ]
    chance.shuffle(victims)
    for number, victim in enumerate(victims):
        strike = _strike(chance, number * rounds // len(victims), victim)
        strikes.append(strike._replace(midway=chance.random() < _MIDWAY))
    return sorted(strikes, key=lambda strike: strike.round)


def draw_copies(seed: int, copies: int, rounds: int, nodes: tuple[str, ...]) -> list[Strike]:
    """As many twins as `copies`, and as many restored backups of the coordinator.

    A node is not restored here: what it has learnt since cannot be learnt again to the same bytes.
    """
    chance = random.Random(seed)
    strikes = []
    for number in range(copies):
        victim = COORDINATOR if number % 2 else chance.choice(nodes)
        strikes.append(
            _strike(chance, chance.randint(1, rounds // 2), victim)._replace(deed="twin")
        )
    for number in range(copies):
        strikes.append(
            _strike(chance, 1 + number * (rounds - 2) // copies, COORDINATOR)._replace(
                deed="backup"
            )
        )
    return sorted(strikes, key=lambda strike: strike.round)


def _faults(
    chance: random.Random, rounds: int, nodes: tuple[str, ...], *, is_masked: bool
) -> list[Strike]:
    steps = [(COORDINATOR, kind) for kind in KINDS] + [("", kind) for kind in _NODES_STEPS]
    steps += 3 * _MASKED if is_masked else ()
    found = []
    for who, kind in steps:
        for when in ("before", "after"):
            for _ in range(2 if kind in _AGAIN else 1):
                round_ = (
                    0
                    if kind in _FIRST
                    else rounds
                    if kind in _LAST
                    else chance.randint(0, rounds // 2)
                )
                found.append(_strike(chance, round_, who or chance.choice(nodes), (when, kind)))
    return found


def _strike(
    chance: random.Random, round_: int, victim: str, fault: tuple[When, str] | None = None
) -> Strike:
    return Strike(
        round_, 0 if fault else chance.uniform(0, _PAUSE), victim, chance.expovariate(4), fault
    )
