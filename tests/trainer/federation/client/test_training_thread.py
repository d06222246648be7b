"""What a node makes of a run's result: nothing of false totals,
and what is right for its images as they are now.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Manifest, TensorSpec
from broker_config.storage import disk
from tests.support.method_cases import equal
from tests.support.plants import CLASSES, draw, load_images
from tests.support.waiting import heard
from trainer.federation.client import checkpoint
from trainer.federation.client.plant_checks import PlantCheck
from trainer.federation.client.session_events import (
    Begun,
    Contributed,
    Deployed,
    Failed,
    Refined,
)
from trainer.federation.client.training_thread import Worker
from trainer.federation.server.aggregation import scale_for, with_totals
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.models.named_tensors import Arrays
from trainer.models.network import to_arrays
from trainer.progress import Step, steps
from trainer.training import alone, frozen_heads, personal_model
from trainer.training.participant import Participant, State
from trainer.training.preview import Preview

PLANTS = NAME, _ = "plant-1", "plant-2"
NOTHING = State({}, {})


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training alone, for comparison, takes no longer than it must."""
    monkeypatch.setattr(alone, "ROUNDS", 1)


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    """Two plants' images, and those that the first one has later."""
    return {
        NAME: draw(tmp_path / NAME, 3, 1, CLASSES[:2]),
        "plant-2": draw(tmp_path / "plant-2", 3, 2),
        "later": draw(tmp_path / "later", 2, 3),
    }


def finish(
    folders: dict[str, Path],
    state: Path,
    now: str,
    *,
    previews: bool,
    change: Callable[[Arrays], Arrays] = dict,
    chooses: bool = False,
    is_denied: bool = False,
) -> object:
    """What the plant says in the end: restarted, with the images of `now`,
    and told the changed result, or that this holds nothing of it.
    """
    spec, broadcast = draft(
        Request("gaussian", model="small", weights="none", size=32, seed=7),
        federation="steel",
        classes=CLASSES,
        nodes=2,
        chooses=chooses,
    )
    every = {name: load_images(spec, folder) for name, folder in folders.items()}
    sums = [
        Participant(spec, name, every[name]).contribute(NOTHING, broadcast, 1)[1].tensors
        for name in PLANTS
    ]
    result = change(
        {**broadcast, **{name: sum(each[name] for each in sums) for name in spec.statistics}}
    )
    inbox: queue.Queue[object] = queue.Queue()

    def put(worker: Worker, round_: int, tensors: Arrays) -> Manifest:
        digest, size = worker.store.put(encode_tensors(tensors))
        return Manifest(
            federation="steel",
            run=spec.run,
            round=round_,
            node="coordinator",
            digest=digest,
            size=size,
            chunk_size=1024,
        )

    first = Worker(spec, NAME, every[NAME], state, inbox, previews=previews)
    first.train(put(first, 1, broadcast), counted=False)
    assert isinstance(heard(inbox), Contributed)
    assert isinstance(heard(inbox), Refined)
    first.close()
    again = Worker(spec, NAME, every[now], state, inbox, previews=previews)
    again.deploy(put(again, 1, result), counted=not is_denied)
    told = heard(inbox)
    again.close()
    return told


def negative(result: Arrays) -> Arrays:
    return {**result, "statistics.images": -result["statistics.images"]}


def singular(result: Arrays) -> Arrays:
    return {
        **result,
        "statistics.single_sums": np.full_like(result["statistics.single_sums"], 2**63 - 1),
    }


@pytest.mark.parametrize("change", [negative, singular])
@pytest.mark.parametrize("previews", [False, True])
def test_totals_that_no_plants_can_have_are_refused(
    previews: bool, change: Callable[[Arrays], Arrays], images: dict[str, Path], tmp_path: Path
) -> None:
    told = finish(images, tmp_path / "state", NAME, previews=previews, change=change)
    assert isinstance(told, Failed)
    assert isinstance(told.error, EdgeNodeError)
    assert "sums over the plants" in str(told.error)
    assert not {each.name for each in (tmp_path / "state").iterdir()} & {"model", "preview.json"}


@pytest.mark.parametrize("chooses", [False, True])
def test_images_that_changed_since_their_sums_were_sent_are_previewed_as_they_are_now(
    chooses: bool, images: dict[str, Path], tmp_path: Path
) -> None:
    """Only a choosing run's coordinator is told of it."""
    told = finish(images, tmp_path / "state", "later", previews=True, chooses=chooses)
    assert isinstance(told, Deployed)
    made = msgspec.json.decode((tmp_path / "state" / "preview.json").read_bytes(), type=Preview)
    assert [(share.own, share.others) for share in made.classes] == [(2, 3), (2, 3), (2, 3)]
    assert made.forecasts[0].images == 6
    known = {"leave-one-out loss small", "images left out"} if chooses else set()
    assert told.metrics.keys() == known
    assert all(np.isfinite(value) for value in told.metrics.values())
    assert (made.accuracy is None) == chooses, "no model is made to choose"


def test_a_model_is_of_the_images_as_they_are_now(images: dict[str, Path], tmp_path: Path) -> None:
    """As if they had always been those; the earlier ones, which others' models know of,
    are not in it.
    """
    assert isinstance(finish(images, tmp_path / "state", "later", previews=False), Deployed)
    made = personal_model.load(tmp_path / "state" / "model")
    always = {NAME: images["later"], "plant-2": images["plant-2"], "later": images["later"]}
    assert isinstance(finish(always, tmp_path / "other", NAME, previews=False), Deployed)
    expected = personal_model.load(tmp_path / "other" / "model")
    assert equal(to_arrays(made.tensors), to_arrays(expected.tensors))
    assert made.metadata.trained == expected.metadata.trained


@pytest.mark.parametrize("round_", [1, 2])
def test_a_node_contributes_nothing_in_steps_that_do_not_follow_from_what_it_begins_with(
    round_: int, images: dict[str, Path], tmp_path: Path
) -> None:
    """A newcomer, or a node that has lost its folder, begins in a later round."""
    spec, broadcast = draft(
        Request("fedavg", model="small", weights="none", size=32, rounds=3),
        federation="steel",
        classes=CLASSES,
        nodes=2,
    )
    name = min(spec.tensors)
    coarse = msgspec.structs.replace(spec.tensors[name], scale=spec.tensors[name].scale - 20)
    spec = msgspec.structs.replace(spec, tensors={**spec.tensors, name: coarse})
    inbox: queue.Queue[object] = queue.Queue()
    worker = Worker(spec, NAME, load_images(spec, images[NAME]), tmp_path / "state", inbox)
    digest, size = worker.store.put(encode_tensors(broadcast))
    manifest = Manifest(
        federation="steel",
        run=spec.run,
        round=round_,
        node="coordinator",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    worker.train(manifest, counted=False)
    told = inbox.get(timeout=60)
    worker.close()
    assert isinstance(told, Failed)
    assert isinstance(told.error, UsageError)
    assert name in str(told.error)
    assert worker.progress is None


class ManyRounds(PlantCheck, frozen=True):
    """A made-up check that finds fault with every round."""

    patience: int = 0

    def check_begin(self, spec: Any, images: Any, broadcast: Any, round_: int, *_: Any, **__: Any):
        assert len(images.train.labels) == 6
        assert broadcast.keys() >= spec.tensors.keys()
        raise UsageError(f"round {round_} begins with what this plant does not want", "stay out")


def test_a_check_sees_what_a_round_begins_with_before_anything_leaves(
    images: dict[str, Path], tmp_path: Path
) -> None:
    request = Request("fedavg", model="small", weights="none", size=32, seed=7)
    spec, broadcast = draft(request, federation="steel", classes=CLASSES, nodes=2)
    inbox: queue.Queue[object] = queue.Queue()
    checks = {"made-up": ManyRounds()}
    plant = load_images(spec, images[NAME])
    worker = Worker(spec, NAME, plant, tmp_path / "state", inbox, checks=checks)
    digest, size = worker.store.put(encode_tensors(broadcast))
    manifest = Manifest(
        federation="steel",
        run=spec.run,
        round=3,
        node="coordinator",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    worker.train(manifest, counted=False)
    told = inbox.get(timeout=60)
    worker.close()
    assert isinstance(told, Failed)
    assert "round 3" in str(told.error)
    assert worker.progress is None


@pytest.mark.parametrize("method", ["gaussian", "afedcl_plus"])
@pytest.mark.parametrize("privacy", [{}, {"epsilon": "3"}])
def test_an_encoder_of_which_no_sums_can_be_made_is_an_error_that_names_the_run(
    privacy: dict[str, str], method: str, images: dict[str, Path], tmp_path: Path
) -> None:
    """Its values are those that a coordinator may send, and its scales fit them."""
    training = {"batch_norm": "eval"}
    request = Request(method, {}, "small", "none", 32, training, privacy=privacy)
    spec, broadcast = draft(
        request._replace(rounds=0 if method == "gaussian" else 2),
        federation="steel",
        classes=CLASSES,
        nodes=2,
    )
    huge = {
        name: np.full_like(value, 1e30) if name.startswith("encoder.") else value
        for name, value in broadcast.items()
    }
    tensors = {name: TensorSpec(value.shape, scale_for(value, 2)) for name, value in huge.items()}
    spec = msgspec.structs.replace(spec, tensors=tensors)
    inbox: queue.Queue[object] = queue.Queue()
    worker = Worker(spec, NAME, load_images(spec, images[NAME]), tmp_path / "state", inbox)
    digest, size = worker.store.put(encode_tensors(huge))
    manifest = Manifest(
        federation="steel",
        run=spec.run,
        round=1,
        node="coordinator",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    worker.train(manifest, counted=False)
    told = inbox.get(timeout=60)
    worker.close()
    assert isinstance(told, Failed)
    assert isinstance(told.error, EdgeNodeError), told.error
    assert spec.run in str(told.error)
    assert "steel" in str(told.error)
    assert told.error.remedy


# The model of the first sums


def begun(
    folders: dict[str, Path],
    state: Path,
    *,
    counted: bool = True,
    is_denied: bool = False,
    now: str = NAME,
    change: Callable[[Arrays], Arrays] = dict,
) -> list[object]:
    """What the plant says of the first two rounds, by a new process in each.

    It is told whether its sums are `counted`, or that is denied.
    """
    spec, broadcast = draft(
        Request("afedcl_plus", model="small", weights="none", size=32, seed=7, rounds=1),
        federation="steel",
        classes=CLASSES,
        nodes=2,
    )
    spec = msgspec.structs.replace(spec, run="1" * 16)
    every = {name: load_images(spec, folder) for name, folder in folders.items()}
    sums = [
        Participant(spec, name, every[name]).contribute(NOTHING, broadcast, 1)[1].tensors
        for name in (PLANTS if counted else PLANTS[1:])
    ]
    method = make(spec.method, spec.training, spec.options)
    assert method.statistics is not None
    totals = {name: sum(each[name] for each in sums) for name in spec.statistics}
    second = change(with_totals(spec, method.statistics.begin, broadcast, totals))
    inbox: queue.Queue[object] = queue.Queue()
    said: list[object] = []
    for round_, tensors, name in ((1, broadcast, NAME), (2, second, now)):
        worker = Worker(spec, NAME, every[name], state, inbox)
        progress = worker.progress
        if progress is None or progress.round < round_:
            digest, size = worker.store.put(encode_tensors(tensors))
            manifest = Manifest(
                federation="steel",
                run=spec.run,
                round=round_,
                node="coordinator",
                digest=digest,
                size=size,
                chunk_size=1024,
            )
            worker.train(manifest, counted=counted and not is_denied)
            while not isinstance(told := heard(inbox), Refined | Failed):
                said.append(told)
            said.append(told)
        worker.close()
    return said


def model(state: Path) -> dict[str, bytes]:
    found = personal_model.load(state / "model")
    shared = personal_model.load_shared(found, state / "model")
    arrays = to_arrays({**shared, **found.tensors})
    return {name: value.tobytes() for name, value in arrays.items()}


def test_a_model_is_ready_before_anybody_has_trained(
    images: dict[str, Path], tmp_path: Path
) -> None:
    said = begun(images, tmp_path / "state")
    assert [type(each) for each in said] == [Contributed, Refined, Begun, Contributed, Refined]
    made = personal_model.load(tmp_path / "state" / "model")
    assert made.metadata.method == "gaussian"
    assert made.metadata.metrics["images"] == 6
    assert isinstance(said[2], Begun)
    assert Path(said[2].ready.folder) == tmp_path / "state" / "model"
    assert said[2].ready.accuracy == made.metadata.metrics["accuracy"]


def test_the_first_model_is_the_same_whichever_totals_hold_this_plant(
    images: dict[str, Path], tmp_path: Path
) -> None:
    """A node whose sums came too late is not taken out of totals that do not hold them."""
    begun(images, tmp_path / "counted")
    begun(images, tmp_path / "late", counted=False)
    assert model(tmp_path / "counted") == model(tmp_path / "late")


def test_a_coordinator_that_denies_a_node_s_sums_does_not_flatter_its_first_model(
    images: dict[str, Path], tmp_path: Path
) -> None:
    """Heads are made without each image; totals that hold it all the same would know it."""
    begun(images, tmp_path / "counted")
    begun(images, tmp_path / "denied", is_denied=True)
    assert model(tmp_path / "counted") == model(tmp_path / "denied")
    judged = [
        personal_model.load(tmp_path / name / "model").metadata.metrics
        for name in ("counted", "denied")
    ]
    assert judged[0] == judged[1]


@pytest.mark.parametrize("previews", [False, True])
def test_a_coordinator_that_denies_a_node_s_sums_does_not_flatter_its_last_model(
    previews: bool, images: dict[str, Path], tmp_path: Path
) -> None:
    made = []
    for name, is_denied in (("counted", False), ("denied", True)):
        state = tmp_path / name
        told = finish(images, state, NAME, previews=previews, is_denied=is_denied)
        assert isinstance(told, Deployed)
        if previews:
            preview = msgspec.json.decode((state / "preview.json").read_bytes(), type=Preview)
            made.append(preview)
        else:
            made.append(model(state))
    assert made[0] == made[1]


def test_the_first_model_is_of_the_images_as_they_are_now(
    images: dict[str, Path], tmp_path: Path
) -> None:
    begun(images, tmp_path / "state", now="later")
    always = {**images, NAME: images["later"]}
    begun(always, tmp_path / "other")
    assert model(tmp_path / "state") == model(tmp_path / "other")


def test_a_process_that_ends_at_any_write_leaves_the_first_model_or_none(
    images: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process makes the same one, and knows at the end what it was made of."""
    begun(images, tmp_path / "whole")
    expected = model(tmp_path / "whole")
    first = checkpoint.load_first(tmp_path / "whole", "1" * 16)
    assert first is not None
    replace = disk.replace
    writes: list[str] = []
    for stop in itertools.count(1):
        state = tmp_path / f"state-{stop}"
        writes.clear()

        def die(path: Path, write: Callable[[Path], object], **kept: Any) -> None:
            if "first-sums" in path.name or path.parent.name == "model":
                writes.append(path.name)
                if len(writes) == stop:  # noqa: B023
                    raise SystemExit
            replace(path, write, **kept)

        monkeypatch.setattr(disk, "replace", die)
        said = begun(images, state)
        monkeypatch.setattr(disk, "replace", replace)
        if not isinstance(said[-1], Failed):
            break
        if (state / "model").exists() and model_folder_is_whole(state / "model"):
            assert model(state) == expected
        assert isinstance(begun(images, state)[-1], Refined)
        assert model(state) == expected
        again = checkpoint.load_first(state, "1" * 16)
        assert again is not None
        assert equal(again, first)
    assert stop > len({*writes}) > 5


def model_folder_is_whole(folder: Path) -> bool:
    try:
        personal_model.load(folder)
    except UsageError:
        return False
    return True


def of_another_encoder(broadcast: Arrays) -> Arrays:
    return {
        name: value * 0 if name.startswith("encoder.") else value
        for name, value in broadcast.items()
    }


@pytest.mark.parametrize("change", [negative, singular, of_another_encoder])
def test_no_first_model_is_made_of_what_cannot_be_the_sums(
    change: Callable[[Arrays], Arrays], images: dict[str, Path], tmp_path: Path
) -> None:
    told = begun(images, tmp_path / "state", change=change)[-1]
    assert isinstance(told, Failed)
    assert isinstance(told.error, EdgeNodeError)
    assert not (tmp_path / "state" / "model").exists()


@pytest.mark.parametrize("has_model", [False, True])
def test_a_node_that_is_closed_while_it_judges_stops_between_two_steps_and_has_a_model(
    has_model: bool, images: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, broadcast = draft(
        Request("gaussian", model="small", weights="none", size=32, seed=7),
        federation="steel",
        classes=CLASSES,
        nodes=1,
    )
    judging = threading.Event()
    begun = 0

    def leave_out(*_: object) -> None:
        nonlocal begun
        judging.set()
        for _step in steps("judging", range(1_000_000_000)):
            begun += 1

    monkeypatch.setattr(frozen_heads, "leave_out", leave_out)
    if has_model:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "earlier").touch()
    inbox: queue.Queue[object] = queue.Queue()
    worker = Worker(spec, NAME, load_images(spec, images[NAME]), tmp_path, inbox)
    sums = Participant(spec, NAME, load_images(spec, images[NAME]))
    totals = sums.contribute(NOTHING, broadcast, 1)[1].tensors
    digest, size = worker.store.put(encode_tensors({**broadcast, **totals}))
    final = Manifest(
        federation="steel",
        run=spec.run,
        round=1,
        node="coordinator",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    worker.deploy(final, counted=False)
    assert judging.wait(60)
    worker.close()
    assert begun < 1_000_000_000
    assert all(isinstance(each, Step) for each in inbox.queue)
    if has_model:
        assert [each.name for each in (tmp_path / "model").iterdir()] == ["earlier"]
    else:
        assert personal_model.load(tmp_path / "model").metadata.metrics == {}
