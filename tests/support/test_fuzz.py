"""Whatever bytes come in: they are refused, or they are what they should be.

`tests/support/fuzz.py` sends more.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random, getrandbits

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.protocol.codec import decode, decode_any, decode_chunk
from broker_config.protocol.messages import Want
from tests.support.frame_mutation import Frame, Mutator, is_message
from tests.support.fuzz import SHARES, Target, bombard, everything
from tests.support.live_attack import IMPOSSIBLE, SPELL, Attacker, attack_federation, check

pytestmark = pytest.mark.slow

FRAMES = 1000  # for each target

Bombed = tuple[list[Frame], dict[str, Target]]


@pytest.fixture(scope="module")
def bombed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bombed]:
    with everything(tmp_path_factory.mktemp("fuzz")) as found:
        yield found


def test_what_a_real_federation_says_is_understood(bombed: Bombed) -> None:
    """Else all that is made of it would only be refused at once."""
    frames, _ = bombed
    for frame in frames:
        if not is_message(frame):
            decode_chunk(frame.payload)
        elif "/want/" in frame.topic:
            decode(frame.payload, Want)
        else:
            decode_any(frame.payload)
    assert {"Spec", "RoundState", "Hello", "Contribution", "Accepted", "Finished"} <= {
        type(decode_any(frame.payload)).__name__ for frame in frames if is_message(frame)
    }


@pytest.mark.parametrize("name", SHARES)
def test_hostile_frames_crash_hang_and_fill_nothing(bombed: Bombed, name: str) -> None:
    frames, targets = bombed
    seed = getrandbits(32)
    print(f"seed {seed}")
    bombard(name, partial(targets[name].feed, Mutator(frames, Random(seed))), FRAMES)


@pytest.mark.parametrize("name", ["messages", "tensors", "holder"])
def test_hostile_frames_that_are_made_smaller_when_one_is_found(bombed: Bombed, name: str) -> None:
    frames, targets = bombed

    @settings(max_examples=50)
    @given(st.randoms(use_true_random=False))
    def attack(random: Random) -> None:
        targets[name].feed(Mutator(frames, random))

    attack()


def test_a_live_coordinator_under_hostile_frames_ends_with_the_honest_nodes_bytes(
    bombed: Bombed, tmp_path: Path
) -> None:
    seed = getrandbits(32)
    print(f"seed {seed}")
    mutator = Mutator(bombed[0], Random(seed))
    peace, war = (
        attack_federation(tmp_path / str(frames), mutator, frames) for frames in (0, FRAMES)
    )
    check(war, peace)
    refused = {event["node"] for event in war.events if event["event"] == "NodeRefused"}
    assert len(refused) > len(IMPOSSIBLE) + war.frames // SPELL, refused


def test_a_storm_of_hellos_that_nobody_can_answer_stops_nothing(
    bombed: Bombed, tmp_path: Path
) -> None:
    mutator = Mutator(bombed[0], Random(0))
    peace = attack_federation(tmp_path / "peace", mutator, 0)
    check(attack_federation(tmp_path / "war", mutator, 40_000, Attacker.storms), peace)
