"""Training alone beside the federation: pauses and kills change no byte,
and the federation's rounds come first.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from broker_config.protocol.errors import UsageError
from tests.support.method_cases import drafted, equal, shares
from tests.support.waiting import wait_until
from trainer.federation.client.alone_training import AloneTraining
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays
from trainer.progress.long_work import Stopped
from trainer.training.alone import NotComparableError, TrainedAlone, alone_spec, count_epochs
from trainer.training.participant import Participant

NODE = "plant-1"
SPEC, BROADCAST = drafted("afedcl")


@pytest.fixture(scope="module")
def expected() -> TrainedAlone:
    """What the node learns by itself, without interruption."""
    federation = simulate(alone_spec(SPEC), BROADCAST, shares(1))
    return TrainedAlone({}, federation.models[NODE].tensors)


def training(folder: Path) -> AloneTraining:
    return AloneTraining(SPEC, NODE, shares(1)[NODE], folder)


def agree(found: TrainedAlone | None, expected: TrainedAlone) -> None:
    assert found is not None
    assert equal(to_arrays(found.tensors), to_arrays(expected.tensors))


def interrupt(folder: Path) -> None:
    """A process that ends once a round is on disk."""
    first = training(folder)
    first.begin(BROADCAST)
    first.resume()
    wait_until(lambda: b'"round":0' not in (folder / "alone.json").read_bytes())
    first.close()


def test_it_trains_as_many_epochs_as_the_federation() -> None:
    assert count_epochs(SPEC) == 2 * SPEC.training.local_epochs  # both stages
    assert alone_spec(SPEC).options == {"epochs": count_epochs(SPEC)}


class Turns(NamedTuple):
    """Between batches training asks whether it may go on: how often it has,
    and its answers (True: it is to stop).
    """

    asked: list[None]
    given: list[bool]

    def watch(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """As a participant's part of a round, whose last argument is that question."""

        def watched(*inputs: Any) -> Any:
            *others, turn = inputs

            def between_batches() -> bool:
                self.asked.append(None)
                self.given.append(turn())
                return self.given[-1]

            return work(*others, between_batches)

        return watched


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    found = Turns([], [])
    for name in ("contribute", "refine"):
        monkeypatch.setattr(Participant, name, found.watch(getattr(Participant, name)))
    return found


def test_when_it_is_paused_its_batch_has_ended(tmp_path: Path, turns: Turns) -> None:
    """The memory of a batch of its own and of one of the federation is not needed at once."""
    alone = AloneTraining(
        msgspec.structs.replace(SPEC, rounds=1000), NODE, shares(1)[NODE], tmp_path
    )
    alone.begin(BROADCAST)
    for _ in range(20):
        before = len(turns.given)
        alone.resume()
        wait_until(lambda before=before: len(turns.given) > before)  # it has begun a batch
        alone.pause(60.0)  # a batch may take long on a busy machine
        assert len(turns.asked) == len(turns.given) + 1, "it is between two batches"
    alone.close()


def test_it_rests_until_the_node_waits_for_others(
    tmp_path: Path, expected: TrainedAlone, turns: Turns
) -> None:
    resting = training(tmp_path)
    resting.begin(BROADCAST)
    wait_until(lambda: turns.asked)
    resting.close()
    assert turns.given == [True]
    assert not (tmp_path / "alone-1.safetensors").exists()
    alone = training(tmp_path)
    alone.begin(BROADCAST)
    alone.resume()
    wait_until(lambda: alone.rounds_done == SPEC.rounds)
    agree(alone.result(), expected)


def test_a_process_goes_on_with_the_round_in_which_an_earlier_one_was_killed(
    tmp_path: Path, expected: TrainedAlone
) -> None:
    interrupt(tmp_path)
    second = training(tmp_path)
    # a later round's; the start is known already
    second.begin({name: value + 1 for name, value in BROADCAST.items()})
    agree(second.result(), expected)


def test_a_process_that_is_killed_at_once_has_written_down_what_it_starts_from(
    tmp_path: Path, expected: TrainedAlone
) -> None:
    first = training(tmp_path)
    first.begin(BROADCAST)
    # when `begin` has returned
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    first.close()
    for name, content in left.items():
        (tmp_path / "later" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "later" / name).write_bytes(content)
    second = training(tmp_path / "later")
    second.begin(None)
    agree(second.result(), expected)


def damaged(folder: Path, name: str, how: str) -> AloneTraining:
    """After a round a file is damaged; the training of the process that comes then."""
    interrupt(folder)
    path = next(folder.glob(name))
    content = path.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"cut": content[: len(content) // 2], "empty": b"", "flipped": flipped}[how]
        )
    second = training(folder)
    second.begin(None)
    return second


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "missing"])
def test_a_damaged_state_is_trained_again(tmp_path: Path, expected: TrainedAlone, how: str) -> None:
    agree(damaged(tmp_path, "alone-[0-9].safetensors", how).result(), expected)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("alone-initial.safetensors", how) for how in ("cut", "empty", "flipped", "missing")),
        *(("alone.json", how) for how in ("cut", "empty", "missing")),
    ],
)
def test_without_what_it_started_from_there_is_no_comparison(
    tmp_path: Path, name: str, how: str
) -> None:
    with pytest.raises(NotComparableError, match=str(tmp_path)):
        damaged(tmp_path, name, how).result()


def test_closed_before_its_end_it_has_no_result(tmp_path: Path) -> None:
    alone = training(tmp_path)
    alone.begin(BROADCAST)
    alone.close()
    with pytest.raises(Stopped):
        alone.result()


def test_closed_before_it_is_told_to_begin_it_starts_no_training(tmp_path: Path) -> None:
    """The node is closed by one thread, and begins in another."""
    alone = training(tmp_path)
    alone.close()
    alone.begin(BROADCAST)
    alone.resume()
    assert not any(thread.name == "alone" for thread in threading.enumerate())
    assert alone.result() is None


def test_a_new_run_begins_anew(tmp_path: Path, expected: TrainedAlone) -> None:
    old = AloneTraining(
        msgspec.structs.replace(SPEC, run="0" * 16, seed=9), NODE, shares(1)[NODE], tmp_path
    )
    old.begin(BROADCAST)
    assert old.result() is not None
    new = training(tmp_path)
    new.begin(BROADCAST)
    agree(new.result(), expected)


def test_the_baseline_itself_is_not_compared_with_itself(tmp_path: Path) -> None:
    spec, broadcast = drafted("local")
    alone = AloneTraining(spec, NODE, shares(1)[NODE], tmp_path)
    alone.begin(broadcast)
    assert alone.result() is None
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_its_training_reaches_who_asks_for_the_result(tmp_path: Path) -> None:
    alone = training(tmp_path)
    alone.begin({"encoder.unknown": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match="not fit"):
        alone.result()
