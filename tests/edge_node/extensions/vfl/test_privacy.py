"""Protection of embeddings: the noise, and the account of what it hides."""

from contextlib import closing
from math import exp, inf, log, sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import REVISION
from edge_node.extensions.vfl.channel_noise import Array
from edge_node.extensions.vfl.client.sensor_trainer import SensorTrainer
from edge_node.extensions.vfl.client.session import take_part
from edge_node.extensions.vfl.frames import Opened
from edge_node.extensions.vfl.line.sensor_rows import RowFile
from edge_node.extensions.vfl.messages import (
    Channel,
    Denoising,
    Privacy,
    VflHello,
    VflSpec,
    Window,
)
from edge_node.extensions.vfl.networks import ClipNorm
from edge_node.extensions.vfl.privacy import (
    ProtectionAccount,
    count_releases,
    describe_spent,
    load_secret,
    needed_revision,
    open_protection,
    protect,
    run_secret,
    spent_epsilon,
)
from edge_node.extensions.vfl.server.journal import ClosedRound, Journal, resume_or_begin
from edge_node.extensions.vfl.server.spec import check_combinations
from edge_node.extensions.vfl.simulation import release, simulate
from tests.support.changed_specs import changed
from tests.support.vfl_models import settings as vfl_settings
from tests.support.vfl_simulation import simulation
from trainer import progress
from trainer.federation.server.membership import Membership
from trainer.privacy.epsilon import DELTA, noise_delta
from trainer.privacy.epsilon import spent_epsilon as epsilon_of_distance

SECRET = b"0123456789abcdef"
PRIVACY = Privacy(clip=2, multiplier=1.5)


def embedding(seed: int = 0, products: int = 500) -> Array:
    return np.random.default_rng(seed).normal(0, 2, (products, 16)).astype(np.float32)


def cut(values: Array) -> Array:
    return values * np.minimum(1, 2 / np.linalg.norm(values, axis=1, keepdims=True))


# The noise.


def test_embeddings_are_cut_and_get_noise_of_the_strength_asked() -> None:
    noise = protect(PRIVACY, embedding(), SECRET) - cut(embedding())
    assert noise.std() == pytest.approx(3, rel=0.03)
    assert abs(noise.mean()) < 0.1
    tails = np.abs(noise) > 2 * 3
    assert tails.mean() == pytest.approx(0.0455, abs=0.01)
    products = (noise - noise.mean(0)) / noise.std(0)
    # of one number tells nothing of another
    assert np.abs(products.T @ products / 500 - np.eye(16)).max() < 0.2
    assert abs(np.corrcoef(noise[:250].ravel(), noise[250:].ravel())[0, 1]) < 0.08


def test_without_protection_nothing_changes() -> None:
    assert protect(Privacy(), embedding(), b"") is not None
    assert np.array_equal(protect(Privacy(), embedding(), b""), embedding())


def test_the_same_embeddings_have_the_same_noise_and_others_have_none_in_common() -> None:
    """Replays say nothing new, and a difference of two releases does not show that of two
    embeddings.
    """
    first = protect(PRIVACY, embedding(), SECRET)
    assert np.array_equal(first, protect(PRIVACY, embedding(), SECRET))
    changed = embedding()
    changed[:, 0] += 1e-3
    for second in (
        protect(PRIVACY, changed, SECRET),
        protect(PRIVACY, embedding(), b"another secret!!"),
        protect(PRIVACY, embedding(), SECRET, copy=1),
    ):
        assert (first - second).std() == pytest.approx(sqrt(2) * 3, rel=0.05)


def test_who_asks_for_other_products_besides_gets_no_other_noise() -> None:
    one = protect(PRIVACY, embedding(), SECRET)
    assert np.array_equal(one[100:], protect(PRIVACY, embedding()[100:], SECRET))
    changed = embedding()
    changed[0, 0] += 1e-3
    other = protect(PRIVACY, changed, SECRET)
    assert np.array_equal(one[1:], other[1:])
    assert np.abs(one[0] - other[0]).max() > 0.1


def test_equal_embeddings_are_not_told_by_their_noise() -> None:
    twice = np.concatenate([embedding(), embedding()])
    first, second = np.split(protect(PRIVACY, twice, SECRET), 2)
    assert (first - second).std() == pytest.approx(sqrt(2) * 3, rel=0.05)
    assert np.array_equal(first, protect(PRIVACY, embedding(), SECRET))


def test_what_a_spec_says_does_not_suffice_to_take_the_noise_off() -> None:
    """All of a spec is public, its seed too."""
    made = simulation(privacy=PRIVACY)
    sensor, samples = made.sensors[0], made.stream.samples[0][:40]
    said = release(made.spec, sensor, samples, 1).received
    sensor.secret = SECRET
    assert (said - release(made.spec, sensor, samples, 1).received).std().item() == pytest.approx(
        sqrt(2) * 3, rel=0.1
    )


def test_who_has_no_secret_cannot_protect() -> None:
    with pytest.raises(ValueError, match="secret"):
        protect(PRIVACY, embedding(), b"")


def test_the_cut_is_part_of_the_model_so_that_training_knows_of_it() -> None:
    made = simulation("conv", privacy=Privacy(clip=0.5, multiplier=0.01))
    embedded = made.sensors[0].embed(made.stream.samples[0])
    assert embedded.norm(dim=1).max() <= 0.5 * (1 + 1e-6)
    assert np.allclose(protect(Privacy(clip=0.5), embedded.numpy(), SECRET), embedded.numpy())
    values = torch.tensor(
        [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64, requires_grad=True
    )
    assert torch.allclose(
        ClipNorm(1.0)(values), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0, 0]], dtype=torch.float64)
    )
    assert torch.autograd.gradcheck(ClipNorm(1.0), values)


def test_a_protected_federation_learns() -> None:
    closed = list(
        simulate(simulation("conv", privacy=Privacy(clip=2, multiplier=0.02)), 20, lambda _: (3, 3))
    )
    assert np.mean([each.loss for each in closed[-5:]]) < closed[0].loss - 0.1


def test_a_second_copy_is_protected_too_by_noise_of_its_own() -> None:
    made = simulation(
        privacy=Privacy(clip=5, multiplier=0.05), denoising=Denoising(rounds=2, target="noisy")
    )
    samples = made.stream.samples[0][:40]
    received, second = release(made.spec, made.sensors[0], samples, 1)
    assert second is not None
    clean = made.sensors[0].embed(samples)
    for copy in (received, second):
        assert (copy - clean).std().item() == pytest.approx(0.25, rel=0.2)
    assert (received - second).std().item() == pytest.approx(0.25 * sqrt(2), rel=0.2)


def test_predictions_go_by_protected_embeddings_as_well() -> None:
    made = simulation(privacy=Privacy(clip=1, multiplier=100.0))
    bare = simulation()
    samples = [each[:40] for each in made.stream.samples]
    assert made.predict(samples).std() > 10 * bare.predict(samples).std()


# The account.


def test_no_test_tells_two_embeddings_apart_better_than_the_account_says() -> None:
    """The best one (Neyman and Pearson) on what `protected` gives in three releases;
    it is reached.
    """
    random, times, clip, multiplier = np.random.default_rng(0), 3, 1.0, 4.0
    one = np.zeros((20_000, 8), np.float32)
    one[:, 0] = clip
    scores = []
    for sign in (1, -1):
        said = [
            protect(Privacy(clip=clip, multiplier=multiplier), sign * one, random.bytes(32))
            for _ in range(times)
        ]
        scores.append(np.sum(said, 0)[:, 0])
    for epsilon in (0.1, 0.5, 1.0):
        # Where the likelihoods' ratio is above e^epsilon.
        threshold = epsilon * (multiplier * clip) ** 2 / (2 * clip)
        delta = (scores[0] > threshold).mean() - exp(epsilon) * (scores[1] > threshold).mean()
        assert delta == pytest.approx(noise_delta(2 * sqrt(times) / multiplier, epsilon), abs=0.02)


@settings(max_examples=200)
@given(st.floats(0.05, 1000), st.integers(1, 10_000), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_epsilon_is_what_delta_leaves_and_below_the_bound_of_renyi(
    multiplier: float, times: int, delta: float
) -> None:
    distance = 2 * sqrt(times) / multiplier
    epsilon = spent_epsilon(Privacy(clip=1, multiplier=multiplier), times, delta)
    renyi = distance**2 / 2 + distance * sqrt(2 * log(1 / delta))
    assert 0 <= epsilon <= renyi * (1 + 1e-6)
    assert noise_delta(distance, epsilon) <= delta
    if epsilon > 1e-6:
        assert noise_delta(distance, epsilon * (1 - 1e-6)) > delta * (1 - 1e-4)


def test_figures_that_others_have_published() -> None:
    """Balle and Wang 2018: sensitivity 1 and noise 1 give epsilon 4.3777 at 1e-5
    (with a clip of 1/2, multiplier 2).
    """
    assert spent_epsilon(Privacy(clip=0.5, multiplier=2), 1, 1e-5) == pytest.approx(
        4.3777, abs=1e-3
    )


def test_n_releases_count_as_one_with_noise_smaller_by_the_root_of_n() -> None:
    assert spent_epsilon(Privacy(clip=3, multiplier=8), 16, 1e-5) == pytest.approx(
        spent_epsilon(Privacy(clip=3, multiplier=2), 1, 1e-5)
    )


def test_nothing_said_costs_nothing_and_without_noise_everything_is_said() -> None:
    assert spent_epsilon(PRIVACY, 0, 1e-5) == 0
    assert spent_epsilon(Privacy(), 1, 1e-5) == inf
    assert spent_epsilon(Privacy(clip=1), 1, 1e-5) == inf


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(0, 90),
    st.integers(1, 25),
    st.integers(0, 9),
    st.booleans(),
)
def test_releases_are_counted_for_the_product_that_weighs_longest(
    start: int, chunk: int, size: int, rounds: int, learning: int, noisy: bool
) -> None:
    window = Window(start=start, chunk=chunk, size=size)
    denoising = Denoising(rounds=learning, target="noisy" if noisy else "clean")
    made = made_spec(window=window, denoising=denoising)
    said: dict[int, int] = {}
    for round_ in range(1, rounds + 1):
        for position in range(*window.span(round_)):
            said[position] = said.get(position, 0) + (2 if noisy and round_ <= learning else 1)
    assert max(said.values()) <= count_releases(made, rounds)
    if rounds * chunk > size + chunk and (size % chunk == 0 or not size) and start >= chunk:
        assert max(said.values()) == count_releases(made, rounds)


# What must not be together.


def made_spec(
    channel: Channel = Channel(),  # noqa: B008
    denoising: Denoising = Denoising(),  # noqa: B008
    privacy: Privacy = Privacy(),  # noqa: B008
    window: Window = Window(),  # noqa: B008
) -> VflSpec:
    return VflSpec(
        federation="plant",
        run="0" * 16,
        software="",
        sensors=("a", "b"),
        network="dense",
        classes=("good", "bad"),
        window=window,
        channel=channel,
        denoising=denoising,
        privacy=privacy,
    )


NOISY = Denoising(rounds=3, target="noisy")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (made_spec(privacy=Privacy(clip=1)), "one of them is 0"),
        (made_spec(privacy=Privacy(multiplier=1)), "one of them is 0"),
        (made_spec(privacy=PRIVACY, denoising=Denoising(rounds=1)), "asks for them as they are"),
        (made_spec(Channel(levels=3), NOISY), "rounds both alike"),
        (made_spec(Channel(levels=3, sigma=1), NOISY), "rounds both alike"),
        (made_spec(Channel(), NOISY), "both are the same"),
        (made_spec(Channel(loss=0.1), NOISY), "both are the same"),
    ],
)
def test_settings_that_contradict_one_another_are_refused_with_the_reason(
    made: VflSpec, why: str
) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        check_combinations(made)
    assert refused.value.remedy


@pytest.mark.parametrize(
    "made",
    [
        made_spec(),
        made_spec(Channel(levels=3), Denoising(rounds=3)),
        made_spec(Channel(levels=3, dither=True), NOISY),
        made_spec(Channel(sigma=1, loss=0.1), NOISY),
        made_spec(denoising=NOISY, privacy=PRIVACY),
    ],
)
def test_the_rest_may_be(made: VflSpec) -> None:
    check_combinations(made)


def test_what_a_product_has_spent_is_told_where_it_is_protected() -> None:
    protected_ = simulation(privacy=PRIVACY, window=Window(start=10, chunk=5, size=20)).spec
    assert describe_spent(simulation().spec, 7) == ""
    epsilon = spent_epsilon(PRIVACY, 4, 1e-5)
    assert f"after 7 rounds a product has spent epsilon {epsilon:.3g}" in describe_spent(
        protected_, 7
    )
    assert "epsilon inf" in describe_spent(simulation(privacy=Privacy(clip=1)).spec, 7)


# Several runs


def test_two_runs_of_a_sensor_never_share_noise() -> None:
    """Whoever tries two deviations could compute what both hide."""
    spec = vfl_settings(privacy=PRIVACY)
    noises = []
    for _, other in [("", spec), *changed(spec)]:
        if not other.privacy.clip * other.privacy.multiplier:
            continue
        said = protect(other.privacy, embedding(), run_secret(SECRET, other))
        noises.append((said - cut(embedding())) / other.privacy.multiplier)
    assert len(noises) > 20
    for noise in noises[1:]:
        assert abs(np.corrcoef(noise.ravel(), noises[0].ravel())[0, 1]) < 0.2


def test_the_same_row_has_other_noise_at_another_scale() -> None:
    """Also with one secret, as where a running model is replaced by one with other protection."""
    hidden = embedding()
    one = protect(Privacy(clip=1, multiplier=10), hidden, SECRET)
    other = protect(Privacy(clip=1, multiplier=8), hidden, SECRET)
    guess = (10 * other - 8 * one) / 2
    assert np.abs(guess - cut(hidden)).mean() > 1


def test_what_several_runs_have_told_adds_up(tmp_path: Path) -> None:
    first = vfl_settings(privacy=Privacy(clip=1, multiplier=4))
    second = vfl_settings(privacy=Privacy(clip=1, multiplier=2), run="f" * 16)
    account = ProtectionAccount(tmp_path)
    account.spend(first, 3)
    assert account.describe(first) == ""
    account.spend(second, 1)
    account.spend(second, 1)
    again = ProtectionAccount(tmp_path)
    again.spend(second, 2)
    # once a round was begun again
    times = [count_releases(first, 3), count_releases(second, 2) + 1]
    squared = 4 * times[0] / 4**2 + 4 * times[1] / 2**2
    epsilon = epsilon_of_distance(np.sqrt(squared), DELTA)
    assert f"epsilon {epsilon:.3g}" in again.describe(second)
    for path in tmp_path.glob("protection*"):
        path.write_bytes(b"{}")
    with pytest.raises(EdgeNodeError):
        ProtectionAccount(tmp_path)


def protected(**changes: Any) -> VflSpec:
    return vfl_settings(privacy=Privacy(clip=1, multiplier=4), revision=REVISION, **changes)


def test_a_sensor_has_one_secret_for_all_its_runs_and_none_without_protection(
    tmp_path: Path,
) -> None:
    open_protection(tmp_path, vfl_settings(), is_known=False)
    assert not any(tmp_path.iterdir())
    open_protection(tmp_path, protected(), is_known=False)
    secret = load_secret(tmp_path)
    open_protection(tmp_path, protected(), is_known=True)
    open_protection(tmp_path, protected(run="f" * 16), is_known=False)
    assert load_secret(tmp_path) == secret


@pytest.mark.parametrize("run", ["the same run", "another run"])
def test_a_lost_secret_is_not_replaced_while_the_account_knows_what_it_has_hidden(
    run: str, tmp_path: Path
) -> None:
    """With noise drawn anew the same embedding would leave twice, or the account be another's."""
    open_protection(tmp_path, protected(), is_known=False)
    ProtectionAccount(tmp_path).spend(protected(), 2)
    (tmp_path / "secret.json").unlink()
    is_same = run == "the same run"
    spec = protected() if is_same else protected(run="f" * 16)
    with pytest.raises(EdgeNodeError, match=r"secret\.json"):
        open_protection(tmp_path, spec, is_known=is_same)
    assert not (tmp_path / "secret.json").exists()


@pytest.mark.parametrize("lost", ["protection*", "*"])
def test_a_sensor_does_not_go_on_in_a_run_that_its_account_has_lost(
    lost: str, tmp_path: Path
) -> None:
    open_protection(tmp_path, protected(), is_known=False)
    ProtectionAccount(tmp_path).spend(protected(), 2)
    for path in tmp_path.glob(lost):
        path.unlink()
    with pytest.raises(EdgeNodeError, match=protected().run) as refused:
        open_protection(tmp_path, protected(), is_known=True)
    assert "protection.json" in str(refused.value)
    assert not list(tmp_path.glob("protection*"))


@pytest.mark.parametrize("file", ["protection.json", "protection-copy.json"])
@pytest.mark.parametrize("fault", ["older", "missing", "damaged"])
def test_what_becomes_of_one_file_of_the_account_makes_nothing_forgotten(
    fault: str, file: str, tmp_path: Path
) -> None:
    account = ProtectionAccount(tmp_path)
    account.spend(protected(), 1)
    path = tmp_path / file
    older = path.read_bytes()
    account.spend(protected(), 1)
    told = account.describe(protected())
    assert told
    if fault == "older":
        path.write_bytes(older)
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(older[:-20])
    assert ProtectionAccount(tmp_path).describe(protected()) == told


def protected_sensor(folder: Path, window: Window) -> SensorTrainer:
    spec = vfl_settings(privacy=PRIVACY, window=window, commit=1)
    rows = folder / "rows.csv"
    if not rows.exists():
        random = np.random.default_rng(3)
        lines = [f"p{row},{random.normal()},{random.normal()}" for row in range(12)]
        rows.write_text("\n".join(["product,force,speed", *lines, ""]))
        open_protection(folder, spec, is_known=False)
    file = RowFile(rows, ("force", "speed"))
    return SensorTrainer(spec, "press", file, folder, pytest.fail, lambda *_, **__: None)


def play(sensor: SensorTrainer, round_: int, products: list[str]) -> None:
    first, last = sensor.spec.window.span(round_)
    frame = Opened(
        run=sensor.spec.run, attempt=0, round=round_, first=first, last=last, since=first,
        products=tuple(products),
    )  # fmt: skip
    sensor.samples.refresh()
    taken = sensor.get_samples(products)
    sensor.start_round(frame, products, taken, since=0, session="5" * 16, attempt=0)
    sensor.finish_round(round_)


@pytest.mark.parametrize("starts_again", [False, True])
def test_a_head_that_names_a_product_at_another_position_again_gets_nothing(
    starts_again: bool, tmp_path: Path
) -> None:
    """The account counts the rounds in whose window one position lies."""
    sensor = protected_sensor(tmp_path, Window(start=4, chunk=2, size=4))
    play(sensor, 1, ["p0", "p1", "p2", "p3"])
    play(sensor, 2, ["p2", "p3", "absent", "p5"])
    if starts_again:
        sensor = protected_sensor(tmp_path, sensor.spec.window)
    with pytest.raises(EdgeNodeError, match="p1"):
        play(sensor, 3, ["absent", "p5", "p6", "p1"])
    play(sensor, 3, ["p4", "p5", "p6", "p7"])  # a row that came late
    play(sensor, 2, ["p2", "p3", "p4", "p5"])  # again
    assert ProtectionAccount(tmp_path).knows(sensor.spec)


def test_where_the_set_grows_every_round_counts_for_every_product(tmp_path: Path) -> None:
    sensor = protected_sensor(tmp_path, Window(start=2, chunk=2))
    play(sensor, 1, ["p0", "p1"])
    play(sensor, 2, ["p2", "p3", "p0", "p1"])
    assert count_releases(sensor.spec, 2) == 2


def test_a_protected_run_of_an_earlier_version_is_refused_by_its_name(tmp_path: Path) -> None:
    """By a sensor, before it connects to anybody, and by its head."""
    old = protected(sensors=("press",))
    old = msgspec.structs.replace(old, revision=0)
    nobody = Endpoint.parse("mqtt://127.0.0.1:1")
    rows = RowFile(tmp_path / "press.csv", ("a",))
    with pytest.raises(UsageError, match=old.run):
        take_part(old, "press", rows, nobody, tmp_path / "state", report=progress.ignore)
    assert not (tmp_path / "state").exists()
    (tmp_path / "head").mkdir()
    with closing(Journal(tmp_path / "head")) as journal:
        journal.begin(old)
        closed = ClosedRound(
            round=1,
            attempt=1,
            first=0,
            last=1,
            iterations=(1,),
            loss=None,
            seconds=0,
            collection={},
            communication={},
            iteration={},
        )
        journal.close_rounds(old.run, [closed])
        new = msgspec.structs.replace(old, revision=REVISION, run="f" * 16)
        with pytest.raises(UsageError, match=old.run):
            resume_or_begin(journal, new, new=False)
        assert resume_or_begin(journal, new, new=True) == new


def test_a_sensor_of_an_earlier_version_is_not_let_into_a_protected_run() -> None:
    hello = VflHello(
        session="0" * 16,
        run="0" * 16,
        software="0.1.0",
        identity="1" * 16,
        incarnation=1,
        columns=1,
        round=0,
    )
    for spec, is_refused in ((protected(), True), (vfl_settings(), False)):
        objection = Membership(2, {}).find_objection(
            "press", hello, hello.run, present=False, needs_revision=needed_revision(spec)
        )
        assert (objection is not None) == is_refused
