"""Keys are made where they are used: `edge-node request` at a member,
`provision --request`, `request --accept`.
"""

import base64
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import ssl
import stat
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import AttributeOID

from broker_config.protocol.errors import UsageError
from broker_config.security import (
    certificate_authority,
    certificate_request,
    enrolment,
    kit,
    member_list,
    trust,
)
from broker_config.security.enrolment import Enrolment
from broker_config.security.kit import Keys
from broker_config.security.member_registry import ChangeRequest
from broker_config.security.message_signing import MessageSigner
from broker_config.security.provisioning import kits, provision
from broker_config.security.signing import SigningKey
from broker_config.storage import disk
from tests.support.enrolled_members import Administration, Plant
from tests.support.paths import REPOSITORY
from tests.support.plants import here
from tests.support.provisioned_federation import Members, meet

DAY = timedelta(days=1)
PLANTS = ("plant-a", "plant-b", "plant-c")


@pytest.fixture(scope="module", autouse=True)
def cheap() -> Iterator[None]:
    """Here kits are opened by the hundred: their passphrases cost next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "_COST", 2)
        yield


class Steel:
    """A federation of three plants with keys of their own, whose answers they have accepted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.plants = {name: Plant(folder, name) for name in PLANTS}
        self.operator = Administration(folder / "steel")
        self.registry = self.operator.found(*self.plants.values())
        self.kits = {
            name: plant.accept(self.operator.answer(name)) for name, plant in self.plants.items()
        }

    def copy(self, to: Path) -> "Steel":
        """To change something."""
        shutil.copytree(self.folder, to, dirs_exist_ok=True)
        again = Steel.__new__(Steel)
        again.folder, again.registry, again.kits = to, self.registry, self.kits
        again.operator = Administration(to / "steel")
        again.plants = {name: Plant(to, name) for name in PLANTS}
        return again

    @property
    def members(self) -> Members:
        """As `meet` wants it."""
        return Members(self.operator.folder, self.registry, {})


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Steel:
    return Steel(tmp_path_factory.mktemp("steel"))


@pytest.fixture
def steel(untouched: Steel, tmp_path: Path) -> Steel:
    return untouched.copy(tmp_path)


# Whose keys are where


def test_no_private_key_of_a_plant_is_in_what_it_sends_or_the_operator_has(
    untouched: Steel,
) -> None:
    """Neither in PEM, nor raw, hexadecimal or base64,
    and none that the operator could make a kit of.
    """
    theirs = [path for path in untouched.operator.folder.rglob("*") if path.is_file()]
    sent = [plant.place.request for plant in untouched.plants.values()]
    content = b"\n".join(path.read_bytes() for path in (*theirs, *sent))
    assert len(theirs) > 15
    for its in untouched.kits.values():
        tls = (
            certificate_authority.load_private(its.key).private_numbers().private_value.to_bytes(32)
        )
        for secret in (its.signing, tls):
            forms = (
                secret,
                secret.hex().encode(),
                base64.b64encode(secret)[:-4],
                its.key.splitlines()[1].encode(),
            )
            assert not [form for form in forms if form in content]
    assert {each.name for each in kits(untouched.registry)} == {"coordinator", "monitor"}
    assert {path.stem for path in (untouched.operator.folder / "kits").iterdir()} == {
        "coordinator",
        "monitor",
    }
    assert set((untouched.operator.folder / "passphrases.txt").read_text().split()[::2]) == {
        "coordinator",
        "monitor",
    }


def test_an_answer_makes_a_kit_that_the_broker_admits_and_the_others_believe(
    untouched: Steel,
) -> None:
    for name, its in untouched.kits.items():
        assert (its.federation, its.name, its.broker) == ("steel", name, "mqtts://127.0.0.1:8883")
        assert meet(untouched.members, its) == "TLSv1.3"
        assert its.members().key(name) == SigningKey(its.signing).public
        assert MessageSigner(its).members == its.members()
        place = untouched.plants[name].place
        assert kit.read(place.kit, untouched.plants[name].passphrase) == its
        assert (
            place.trust.read_bytes()
            == (untouched.operator.folder / "trust" / f"{name}.trust").read_bytes()
        )
        assert trust.read(place.trust).node == name


def test_secrets_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        plant, operator = Plant(tmp_path, "plant-a"), Administration(tmp_path / "steel")
        operator.found(plant)
        plant.accept(operator.answer("plant-a"))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in plant.place.folder.iterdir()}
    public = ("plant-a.request", "plant-a.trust", "lock")
    assert {name for name, mode in modes.items() if mode != 0o600} <= set(public)
    assert {"plant-a.kit", "EDGE_NODE_PASSPHRASE", *public} == set(modes)
    assert stat.S_IMODE(plant.place.folder.stat().st_mode) == 0o700


def test_both_ends_show_the_same_fingerprints_and_other_keys_have_others(untouched: Steel) -> None:
    shown = {name: plant.fingerprint for name, plant in untouched.plants.items()}
    assert shown == {name: untouched.registry.members[name].fingerprint for name in PLANTS}
    assert len(set(shown.values())) == 3
    assert all(re.fullmatch(r"[a-z2-7]{5}(-[a-z2-7]{5}){4}", each) for each in shown.values())
    plant = untouched.plants["plant-a"]
    accepted = enrolment.accept(plant.place, untouched.operator.answer("plant-a"))
    assert accepted.authority == untouched.registry.fingerprint


def test_keys_are_never_overwritten(untouched: Steel, steel: Steel) -> None:
    place = steel.plants["plant-a"].place
    again = enrolment.request(place)
    assert (again.made, again.fingerprint) == (False, untouched.plants["plant-a"].fingerprint)
    assert kit.read(place.kit, steel.plants["plant-a"].passphrase) == untouched.kits["plant-a"]
    assert steel.operator.provision(steel.plants["plant-a"]) == steel.registry, (
        "the same request changes nothing"
    )


def test_without_its_answer_a_kit_is_no_kit_yet(tmp_path: Path) -> None:
    plant = Plant(tmp_path, "plant-a")
    assert isinstance(kit.read_keys(plant.place.kit, plant.passphrase), Keys)
    with pytest.raises(UsageError, match="no certificate") as caught:
        kit.read(plant.place.kit, plant.passphrase)
    assert "edge-node request steel plant-a --accept" in caught.value.remedy
    assert "PRIVATE" not in repr(kit.read_keys(plant.place.kit, plant.passphrase))


def test_a_passphrase_that_was_moved_away_is_asked_for(
    steel: Steel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = steel.plants["plant-a"]
    phrase = plant.passphrase
    plant.place.passphrase.unlink()
    with pytest.raises(UsageError, match="passphrase"):
        plant.accept(steel.operator.answer("plant-a"))
    monkeypatch.setenv("EDGE_NODE_PASSPHRASE", phrase)
    assert plant.accept(steel.operator.answer("plant-a")) == steel.kits["plant-a"]
    assert not plant.place.passphrase.exists()


def test_coordinator_and_monitor_may_make_their_own_keys_too(tmp_path: Path) -> None:
    plants = [Plant(tmp_path, name) for name in ("coordinator", "monitor", "plant-a")]
    operator = Administration(tmp_path / "steel")
    registry = operator.found(*plants)
    assert list(kits(registry)) == []
    made = {plant.place.name: plant.accept(operator.answer(plant.place.name)) for plant in plants}
    for its in made.values():
        assert meet(Members(operator.folder, registry, {}), its)
        assert MessageSigner(its)
    assert set(made["plant-a"].members().nodes) == {"plant-a"}
    assert (
        made["plant-a"].members().coordinator.key == SigningKey(made["coordinator"].signing).public
    )
    unsigned = MessageSigner(made["monitor"]).sign("edge-node/v1/steel/status", b"{}")
    assert unsigned == b"{}", "a monitor signs nothing"
    assert not plants[1].place.trust.exists()


def killed(step: int, folder: Path, answer: Path | None) -> None:
    """Request or accept, but die before file number `step` is settled."""
    done, settled = disk.move_durably, 0

    def mortal(scratch: Path, path: Path) -> None:
        nonlocal settled
        if settled == step:
            os.kill(os.getpid(), signal.SIGKILL)
        settled += 1
        done(scratch, path)

    disk.move_durably = mortal
    place = Enrolment(folder / "plant-a-kit", "steel", "plant-a")
    if answer:
        enrolment.accept(place, answer)
    else:
        enrolment.request(place)


@pytest.mark.parametrize(("accepting", "steps"), [(False, 3), (True, 2)], ids=["request", "accept"])
def test_killed_at_any_step_it_is_whole_after_the_next_run(
    accepting: bool, steps: int, untouched: Steel, tmp_path: Path
) -> None:
    """Passphrase, keys, request; kit, trust file."""
    for step in range(steps + 1):
        folder = tmp_path / f"{step}"
        if accepting:
            plant, operator = Plant(folder, "plant-a"), Administration(folder / "steel")
            operator.found(plant)
        answer = operator.answer("plant-a") if accepting else None
        process = multiprocessing.get_context("fork").Process(
            target=killed, args=(step, folder, answer)
        )
        process.start()
        process.join(60)
        assert process.exitcode == (0 if step == steps else -signal.SIGKILL)
        place = Enrolment(folder / "plant-a-kit", "steel", "plant-a")
        enrolment.request(place)
        if answer:
            enrolment.accept(place, answer)
            assert kit.read(place.kit, place.passphrase.read_text()).name == "plant-a"
            assert place.trust.exists()
        else:
            assert certificate_request.read(place.request).name == "plant-a"


# Requests that prove nothing


def write_request(
    path: Path,
    first: object = None,
    second: object = None,
    names: tuple[str, str] = ("plant-a", "plant-a"),
    named: tuple[bytes, bytes] | None = None,
) -> Path:
    """A request of two halves with these keys and names."""
    keys = (
        first or ec.generate_private_key(ec.SECP256R1()),
        second or ed25519.Ed25519PrivateKey.generate(),
    )
    digests = named or tuple(
        certificate_request._digest(key.public_key()) for key in reversed(keys)
    )  # type: ignore[attr-defined]
    halves = []
    for key, name, digest in zip(keys, names, digests, strict=True):
        builder = x509.CertificateSigningRequestBuilder().subject_name(
            certificate_authority.subject("steel", name)
        )
        builder = builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, digest)
        algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
        halves.append(builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM))  # type: ignore[arg-type]
    path.write_bytes(b"".join(halves))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first": rsa.generate_private_key(65537, 2048)}, "not one of the curve P-256"),
        ({"first": ec.generate_private_key(ec.SECP384R1())}, "not one of the curve P-256"),
        ({"first": ed25519.Ed25519PrivateKey.generate()}, "not one of the curve P-256"),
        ({"second": ec.generate_private_key(ec.SECP256R1())}, "not one of Ed25519"),
        ({"names": ("plant-a", "plant-b")}, "not the same plain name"),
        ({"named": (b"0" * 64, b"0" * 64)}, "do not belong together"),
    ],
)
def test_a_request_of_other_keys_or_of_two_halves_is_refused(
    change: dict[str, object], words: str, tmp_path: Path
) -> None:
    assert certificate_request.read(write_request(tmp_path / "whole.request")).name == "plant-a"
    path = write_request(tmp_path / "x.request", **change)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words) as caught:
        certificate_request.read(path)
    assert str(path) in caught.value.what
    assert caught.value.remedy


def test_halves_of_two_requests_do_not_make_one(untouched: Steel, tmp_path: Path) -> None:
    one, other = (untouched.plants[name].place.request.read_text() for name in PLANTS[:2])
    cut = one.index("-----END") + len("-----END CERTIFICATE REQUEST-----\n")
    (tmp_path / "x.request").write_text(one[:cut] + other[other.index("-----BEGIN", 1) :])
    with pytest.raises(UsageError, match="two halves"):
        certificate_request.read(tmp_path / "x.request")


def pem(der: bytes) -> str:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{text}-----END CERTIFICATE REQUEST-----\n"


@pytest.mark.parametrize("half", [0, 1], ids=["TLS", "signing"])
def test_who_has_not_the_private_keys_can_ask_for_nothing(
    half: int, untouched: Steel, tmp_path: Path
) -> None:
    """A public key is no secret: another's, with a signature that is not its owner's."""
    text = untouched.plants["plant-a"].place.request.read_bytes()
    halves = [
        each.public_bytes(serialization.Encoding.DER)
        for each in map(x509.load_pem_x509_csr, split(text))
    ]
    halves[half] = halves[half][:-1] + bytes([halves[half][-1] ^ 1])  # the signature's last byte
    (tmp_path / "x.request").write_text("".join(map(pem, halves)))
    with pytest.raises(UsageError, match="not signed"):
        certificate_request.read(tmp_path / "x.request")


def split(request: bytes) -> list[bytes]:
    end = b"-----END CERTIFICATE REQUEST-----\n"
    return [each + end for each in request.split(end)[:2]]


@pytest.mark.parametrize("seed", range(3))
def test_a_tampered_request_is_refused_or_still_the_same(
    seed: int, untouched: Steel, tmp_path: Path
) -> None:
    rng, path = random.Random(seed), tmp_path / "plant-a.request"
    whole = untouched.plants["plant-a"].place.request.read_bytes()
    expected, refused = certificate_request.read(untouched.plants["plant-a"].place.request), 0
    for _ in range(60):
        where = rng.randrange(len(whole))
        path.write_bytes(
            whole[:where] + bytes([whole[where] ^ 1 << rng.randrange(8)]) + whole[where + 1 :]
        )
        try:
            assert certificate_request.read(path).fingerprint == expected.fingerprint
        except UsageError as error:
            assert str(path) in error.what  # noqa: PT017
            assert error.remedy  # noqa: PT017
            refused += 1
    assert refused >= 50


def test_what_is_no_request_is_refused_with_a_remedy(untouched: Steel, tmp_path: Path) -> None:
    path, whole = tmp_path / "x.request", untouched.plants["plant-a"].place.request.read_bytes()
    for content, words in (
        (b"", "no request"),
        (whole[: len(whole) // 2], "no request"),
        (whole + whole, "no request"),
        (bytes((1 << 24) + 1), "too large"),
        (re.sub(rb"(?m)^[A-Za-z0-9+/=]+$", b"AAAA", whole), "cannot be relied on"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=words) as caught:
            certificate_request.read(path)
        assert caught.value.remedy
    with pytest.raises(UsageError, match=r"none\.request"):
        certificate_request.read(tmp_path / "none.request")


def test_openssl_reads_a_request(untouched: Steel) -> None:
    command = [
        "openssl",
        "req",
        "-in",
        str(untouched.plants["plant-a"].place.request),
        "-noout",
        "-verify",
        "-subject",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "verify OK" in shown.stdout + shown.stderr
    assert "plant-a" in shown.stdout


@pytest.mark.parametrize(
    ("name", "federation", "words"),
    [
        ("plant-a", "iron", "is for federation 'iron', not 'steel'"),
        ("broker", "steel", "a node cannot be called broker"),
        ("plant a", "steel", "'plant a' cannot be used"),
    ],
)
def test_a_request_whose_name_or_federation_does_not_fit_is_refused(
    name: str, federation: str, words: str, untouched: Steel, tmp_path: Path
) -> None:
    keys = Keys(
        federation=federation,
        name=name,
        key=certificate_authority.new_private(),
        signing=SigningKey.generate().raw,
    )
    path = tmp_path / "x.request"
    path.write_text(certificate_request.encode(keys))
    change = ChangeRequest(requests=[certificate_request.read(path)])
    with pytest.raises(UsageError, match=words):
        provision(untouched.operator.folder, "steel", change, datetime.now(UTC))


@pytest.mark.parametrize(
    "wrong", [("steel", "broker"), ("steel", "plant a"), ("doctor", "plant-a")]
)
def test_no_keys_are_made_for_a_name_that_a_member_cannot_have(
    wrong: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        enrolment.request(Enrolment(tmp_path / "x", *wrong))
    assert not (tmp_path / "x").exists()


# Keys that were revoked, and names that are another's


def keys_of(plant: Plant) -> Keys | kit.Kit:
    return kit.read_keys(plant.place.kit, plant.passphrase)


def request_of(folder: Path, keys: Keys | kit.Kit) -> certificate_request.CertificateRequest:
    path = folder / "x.request"
    path.write_text(certificate_request.encode(keys))
    return certificate_request.read(path)


def refuse_request(
    steel: Steel, request: certificate_request.CertificateRequest, words: str, **change: object
) -> None:
    """The request is refused with these words, and the folder stays as it was."""
    register = steel.operator.folder / "authority" / "register.json"
    before = register.read_bytes()
    wanted = ChangeRequest(**{**change, "requests": [request]})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words) as caught:
        provision(steel.operator.folder, "steel", wanted, datetime.now(UTC))
    assert request.source in caught.value.what
    assert caught.value.remedy
    assert register.read_bytes() == before


def test_a_revoked_key_is_never_certified_again(steel: Steel, tmp_path: Path) -> None:
    """Neither by its old request, nor half of it, nor under another name."""
    plant = steel.plants["plant-a"]
    old = certificate_request.read(plant.place.request)
    keys = keys_of(plant)
    steel.operator.provision(revoke=["plant-a"])
    other = Plant(tmp_path / "other", "plant-a")
    half_signing = msgspec.structs.replace(keys_of(other), signing=keys.signing)
    half_tls = msgspec.structs.replace(keys_of(other), key=keys.key)
    renamed = msgspec.structs.replace(keys, name="plant-z")
    refuse_request(steel, old, "revoked")
    for each in (half_signing, half_tls, renamed):
        refuse_request(steel, request_of(tmp_path, each), "revoked")
    steel.operator.provision(other)
    refuse_request(steel, old, "revoked", revoke=["plant-a"])
    registry = steel.operator.provision(nodes=["plant-d"])
    assert registry.members["plant-a"].fingerprint == other.fingerprint


def test_lost_keys_are_not_replaced_by_themselves(steel: Steel) -> None:
    plant = steel.plants["plant-b"]
    request = certificate_request.read(plant.place.request)
    refuse_request(steel, request, "revoked", revoke=["plant-b"])


def test_a_key_that_was_renewed_is_revoked_with_its_newer_ones(tmp_path: Path) -> None:
    """A kit that was made for a trial gets another TLS key with each renewal."""
    operator = Administration(tmp_path / "steel")
    registry = operator.found(nodes=["plant-a", "plant-b"])
    first = next(each for each in kits(registry) if each.name == "plant-a")
    operator.provision(renew=["plant-a"])
    operator.provision(revoke=["plant-a"])
    fresh = Plant(tmp_path / "fresh", "plant-a")
    stolen = msgspec.structs.replace(keys_of(fresh), key=first.key)
    with pytest.raises(UsageError, match="revoked"):
        provision(
            operator.folder,
            "steel",
            ChangeRequest(requests=[request_of(tmp_path, stolen)]),
            datetime.now(UTC),
        )


def test_keys_of_one_member_are_not_anothers_too(steel: Steel, tmp_path: Path) -> None:
    """Else they would be certified under the second name once the first is revoked."""
    keys = keys_of(steel.plants["plant-a"])
    fresh = keys_of(Plant(tmp_path / "fresh", "plant-z"))
    for each in (
        msgspec.structs.replace(keys, name="plant-z"),
        msgspec.structs.replace(fresh, signing=keys.signing),
        msgspec.structs.replace(fresh, key=keys.key),
    ):
        refuse_request(steel, request_of(tmp_path, each), "plant-a")


@pytest.mark.parametrize("name", ["Plant-C", "PLANT-A", "Coordinator", "MONITOR", "Broker"])
def test_names_differ_by_more_than_case(name: str, steel: Steel, tmp_path: Path) -> None:
    request = certificate_request.read(Plant(tmp_path / "other", name).place.request)
    refuse_request(steel, request, name)
    with pytest.raises(UsageError, match=name):
        steel.operator.provision(nodes=[name])
    steel.operator.provision(revoke=["plant-c"])
    refuse_request(steel, request, name)


def test_two_new_names_differ_by_more_than_case(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Plant-X"):
        Administration(tmp_path / "steel").found(nodes=["plant-x", "Plant-X"])


def test_a_registry_that_knows_no_keys_of_what_was_issued_still_opens(
    steel: Steel,
) -> None:
    """As version 0.1 has written it; whoever is revoked from now on is known by its keys."""
    register = steel.operator.folder / "authority" / "register.json"
    file = json.loads(register.read_bytes())
    for each in file["register"]["issued"]:
        each.pop("keys", None)
    content = msgspec.json.encode(file["register"])
    file["sha256"] = hashlib.sha256(content).hexdigest()
    register.write_bytes(
        msgspec.json.encode({"sha256": file["sha256"], "register": msgspec.Raw(content)})
    )
    old = certificate_request.read(steel.plants["plant-a"].place.request)
    steel.operator.provision(revoke=["plant-a"])
    refuse_request(steel, old, "revoked")


# Answers that are not ours


def refuse(plant: Plant, answer: Path, words: str) -> None:
    """The answer is refused with these words, and the kit stays as it was."""
    before = plant.place.kit.read_bytes() if plant.place.kit.exists() else b""
    with pytest.raises(UsageError, match=words) as caught:
        plant.accept(answer)
    assert str(answer) in caught.value.what or "no keys" in caught.value.what
    assert caught.value.remedy
    assert (plant.place.kit.read_bytes() if plant.place.kit.exists() else b"") == before


def test_a_swapped_answer_is_refused(steel: Steel) -> None:
    swapped = shutil.copy(steel.operator.answer("plant-b"), steel.folder / "plant-a.answer")
    refuse(
        steel.plants["plant-a"],
        Path(swapped),
        "is the answer for plant-b in federation 'steel', not for plant-a",
    )


def test_an_answer_to_a_request_that_was_replaced_on_its_way_is_refused(tmp_path: Path) -> None:
    """Somebody has sent the operator keys of his own under our name."""
    mine, thief = Plant(tmp_path / "mine", "plant-a"), Plant(tmp_path / "thief", "plant-a")
    operator = Administration(tmp_path / "steel")
    registry = operator.found(thief)
    assert registry.members["plant-a"].fingerprint == thief.fingerprint != mine.fingerprint
    refuse(mine, operator.answer("plant-a"), "does not belong to the keys")


def test_an_answer_whose_certificate_fits_but_not_its_signing_key_is_refused(
    tmp_path: Path,
) -> None:
    mine, operator = Plant(tmp_path, "plant-a"), Administration(tmp_path / "steel")
    keys = kit.read_keys(mine.place.kit, mine.passphrase)
    other = msgspec.structs.replace(keys, signing=SigningKey.generate().raw)
    half = write_request(
        tmp_path / "half.request",
        certificate_authority.load_private(keys.key),
        ed25519.Ed25519PrivateKey.from_private_bytes(other.signing),
    )
    change = ChangeRequest(requests=[certificate_request.read(half)], hosts=["127.0.0.1"])
    provision(operator.folder, "steel", change, datetime.now(UTC))
    refuse(mine, operator.answer("plant-a"), "does not belong to the keys")


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_answer_is_refused_or_still_the_same(seed: int, steel: Steel) -> None:
    rng, path, plant = random.Random(seed), steel.folder / "x.answer", steel.plants["plant-a"]
    whole, refused = steel.operator.answer("plant-a").read_bytes(), 0
    for _ in range(40):
        where = rng.randrange(len(whole))
        path.write_bytes(
            whole[:where] + bytes([whole[where] ^ 1 << rng.randrange(8)]) + whole[where + 1 :]
        )
        try:
            assert plant.accept(path) == steel.kits["plant-a"]
        except UsageError as error:
            assert str(path) in error.what  # noqa: PT017
            refused += 1
    assert refused >= 35


def test_what_is_no_answer_is_refused_with_a_remedy(steel: Steel) -> None:
    path, whole = steel.folder / "x.answer", steel.operator.answer("plant-a").read_bytes()
    newer = whole.replace(b'"edge_node_answer": 1', b'"edge_node_answer": 2')
    for content, words in (
        (b"", "is no answer"),
        (b"{}", "is no answer"),
        (b'{"\xe1"}', "is no answer"),
        (newer, "another version"),
        (bytes((1 << 24) + 1), "too large"),
        (steel.plants["plant-a"].place.request.read_bytes(), "is no answer"),
    ):
        path.write_bytes(content)
        refuse(steel.plants["plant-a"], path, words)
    refuse(steel.plants["plant-a"], steel.folder / "none.answer", "cannot be read")


def test_an_answer_in_which_somebody_has_put_another_broker_or_ca_is_refused(steel: Steel) -> None:
    """He who carries it cannot change a word of it, since the authority has signed all."""
    path, stranger = steel.folder / "x.answer", SigningKey.generate()
    file = json.loads(steel.operator.answer("plant-a").read_bytes())
    signed = base64.b64decode(file["signed"])
    for forged in (
        signed.replace(b"127.0.0.1", b"127.0.0.2"),
        stranger.sign_envelope("answer", signed[65:]),
        signed[:1] + signed[65:],
    ):
        path.write_text(json.dumps(file | {"signed": base64.b64encode(forged).decode()}))
        refuse(steel.plants["plant-a"], path, "cannot be relied on")
    mine = json.dumps(
        file
        | {
            "authority": stranger.public,
            "signed": base64.b64encode(stranger.sign_envelope("answer", signed[65:])).decode(),
        }
    )
    path.write_text(mine)
    refuse(
        steel.plants["plant-a"],
        path,
        "cannot be relied on: it is of another authority than it says",
    )


def test_an_answer_of_another_authority_or_an_older_one_does_not_change_a_kit(steel: Steel) -> None:
    plant = steel.plants["plant-a"]
    old = Path(shutil.copy(steel.operator.answer("plant-a"), steel.folder / "old.answer"))
    steel.operator.provision(renew=["plant-a"])
    plant.accept(steel.operator.answer("plant-a"))
    refuse(plant, old, "is older than .*: of version 1, and that is of version 2")
    other = Administration(steel.folder / "other")
    other.found(plant)
    refuse(plant, other.answer("plant-a"), "is of another authority than")


def test_an_answer_that_has_expired_is_refused(tmp_path: Path) -> None:
    plant, operator = Plant(tmp_path, "plant-a"), Administration(tmp_path / "steel")
    operator.found(plant, days=1, ago=2 * DAY)
    refuse(plant, operator.answer("plant-a"), "certificate in .* has expired")
    operator.provision(renew=["plant-a"])
    assert plant.accept(operator.answer("plant-a")).expires() > datetime.now(UTC) + 300 * DAY


def test_an_answer_where_there_are_no_keys_is_refused(steel: Steel) -> None:
    lost = steel.plants["plant-a"]
    lost.place.kit.unlink()
    refuse(lost, steel.operator.answer("plant-a"), "has no keys of plant-a")
    lost.place.kit.write_bytes(steel.plants["plant-b"].place.kit.read_bytes())
    shutil.copy(steel.plants["plant-b"].place.passphrase, lost.place.passphrase)
    with pytest.raises(UsageError, match=r"plant-b.*'steel'"):
        lost.accept(steel.operator.answer("plant-a"))


# Renewal, revocation, loss


def test_renewed_with_the_same_keys_old_and_new_kit_are_both_good(steel: Steel) -> None:
    steel.operator.provision(renew=["plant-a"], days=700)
    new, old = (
        steel.plants["plant-a"].accept(steel.operator.answer("plant-a")),
        steel.kits["plant-a"],
    )
    assert (new.key, new.signing) == (old.key, old.signing)
    assert new.expires() > old.expires() + 300 * DAY
    for its in (old, new):
        assert meet(steel.members, its)
        assert MessageSigner(its)


def test_what_ends_soon_is_renewed_by_renew_due_without_a_new_request(tmp_path: Path) -> None:
    plant, operator = Plant(tmp_path, "plant-a"), Administration(tmp_path / "steel")
    operator.found(plant, ago=300 * DAY)
    old = plant.accept(operator.answer("plant-a"))
    operator.provision(renew_due=True)
    assert plant.accept(operator.answer("plant-a")).expires() > old.expires() + 200 * DAY


def test_new_keys_under_an_old_name_are_refused_unless_the_old_ones_are_revoked(
    steel: Steel,
) -> None:
    """Whether they were lost or are only old: the operator asks,
    since anybody could have sent the request.
    """
    again = Plant(steel.folder / "new", "plant-a")
    with pytest.raises(UsageError, match=r"other keys.*plant-a") as caught:
        steel.operator.provision(again)
    assert "--revoke plant-a --request" in caught.value.remedy
    registry = steel.operator.provision(again, revoke=["plant-a"])
    new = again.accept(steel.operator.answer("plant-a"))
    changed = Members(steel.operator.folder, registry, {})
    assert meet(changed, new)
    assert MessageSigner(new)
    with pytest.raises(ssl.SSLError, match="revoked"):
        meet(changed, steel.kits["plant-a"])
    assert new.members().key("plant-a") != SigningKey(steel.kits["plant-a"].signing).public
    refuse(steel.plants["plant-a"], steel.operator.answer("plant-a"), "does not belong to the keys")
    assert meet(changed, steel.kits["plant-b"])


def test_a_revoked_plant_is_out_and_its_answer_gone(steel: Steel) -> None:
    steel.operator.provision(renew=["plant-b"])
    renewed = steel.plants["plant-b"].accept(steel.operator.answer("plant-b"))
    registry = steel.operator.provision(revoke=["plant-b"])
    assert not steel.operator.answer("plant-b").exists()
    for its in (steel.kits["plant-b"], renewed):
        with pytest.raises(ssl.SSLError, match="revoked"):
            meet(Members(steel.operator.folder, registry, {}), its)
    left = steel.plants["plant-a"].accept(steel.operator.answer("plant-a"))
    assert set(left.members().nodes) == {"plant-a", "plant-c"}
    assert "user plant-b\ntopic deny #" in (steel.operator.folder / "broker" / "acl").read_text()


def test_lost_answers_are_made_again_from_the_register(steel: Steel) -> None:
    whole = steel.operator.answer("plant-a").read_bytes()
    steel.operator.answer("plant-a").unlink()
    steel.operator.answer("plant-b").write_bytes(b"damaged")
    steel.operator.provision()
    assert steel.operator.answer("plant-a").read_bytes() == whole
    assert steel.plants["plant-b"].accept(steel.operator.answer("plant-b")) == steel.kits["plant-b"]


# Federations of before


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A folder that `edge-node provision` of version 0.1 has left, for ten years;
    plant-c was revoked.
    """
    shutil.unpack_archive(REPOSITORY / "tests" / "data" / "provisioned_0_1.tar.xz", tmp_path)
    return tmp_path / "steel"


def test_a_federation_of_version_0_1_goes_on_and_its_kits_are_still_good(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "_COST", 2**15)
    phrases = dict(line.split() for line in (before / "passphrases.txt").read_text().splitlines())
    old = {
        name: kit.read(before / "kits" / f"{name}.kit", phrase) for name, phrase in phrases.items()
    }
    assert set(old) == {"coordinator", "monitor", "plant-a", "plant-b"}
    registry = Administration(before).provision()
    assert registry.version == old["plant-a"].members().version
    for its in old.values():
        assert MessageSigner(its)
        assert meet(Members(before, registry, {}), its)
    assert {each.name: each for each in kits(registry)} == old
    believed = trust.read(before / "trust" / "plant-a.trust")
    assert (
        member_list.verify(believed.charter, believed.authority, "here") == old["plant-a"].members()
    )


def test_a_plant_of_a_kit_changes_to_keys_of_its_own(before: Path, tmp_path: Path) -> None:
    plant, operator = Plant(tmp_path, "plant-a"), Administration(before)
    registry = operator.provision(plant, revoke=["plant-a"])
    assert not (before / "kits" / "plant-a.kit").exists()
    assert meet(Members(before, registry, {}), plant.accept(operator.answer("plant-a")))
    assert [each.name for each in kits(registry)] == ["coordinator", "monitor", "plant-b"]


def test_a_kit_that_the_operator_has_made_asks_for_no_certificate_of_a_monitor(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrases = dict(line.split() for line in (before / "passphrases.txt").read_text().splitlines())
    place = Enrolment(tmp_path / "monitor-kit", "steel", "monitor")
    place.folder.mkdir()
    shutil.copy(before / "kits" / "monitor.kit", place.kit)
    place.passphrase.write_text(phrases["monitor"])
    monkeypatch.setattr(kit, "_COST", 2**15)
    with pytest.raises(UsageError, match="needs keys"):
        enrolment.request(place)


# The command


def test_the_commands_say_what_goes_to_whom_and_tell_machines_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def succeed(*words: object) -> str:
        done = here(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = json.loads(succeed("request", "steel", "plant-a", "--json"))
    assert asked["made"]
    text = succeed("request", "steel", "plant-a")
    assert f"fingerprint of the request: {asked['fingerprint']}" in text
    assert "plant-a-kit/plant-a.request" in text
    assert (tmp_path / "plant-a-kit" / "EDGE_NODE_PASSPHRASE").read_text() not in text
    text = succeed(
        "provision", "steel", "--request", "plant-a-kit/plant-a.request", "--host", "broker.local"
    )
    assert (
        f"if it reads out {asked['fingerprint']} as its request's fingerprint, give plant-a" in text
    )
    assert "for trials" not in text
    assert "edge-node join --kit plant-a-kit/plant-a.kit" in text
    assert "edge-node coordinate --kit coordinator.kit" in text, "provision has made that one"
    facts = json.loads(succeed("provision", "steel", "--json"))
    assert {each["name"]: each.get("answer") for each in facts["members"]}[
        "plant-a"
    ] == "answers/plant-a.answer"
    text = succeed("request", "steel", "plant-a", "--accept", "steel/answers/plant-a.answer")
    assert f"fingerprint of the authority: {facts['authority']}; compare it by telephone" in text
    assert "edge-node join --kit plant-a-kit/plant-a.kit" in text
    text = succeed("provision", "steel", "--renew", "plant-a")
    assert "new certificate: plant-a" in text
    facts = json.loads(
        succeed("request", "steel", "plant-a", "--accept", "steel/answers/plant-a.answer", "--json")
    )
    assert (facts["renewed"], facts["version"]) == (True, 2)
    text = succeed("provision", "steel", "--nodes", "plant-b")
    assert ("keys of plant-b") in text
    failed = here("provision", "steel", "--request", "nowhere.request")
    assert failed.returncode == 2
    assert "nowhere.request" in failed.stderr
