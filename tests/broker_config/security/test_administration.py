"""A second administrator: signs without the first one's keys, and is withdrawn by the first one alone."""

import base64
import json
import random
import shutil
import ssl
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from broker_config.protocol.errors import BrokerError, UsageError
from broker_config.security import administration, delegation, enrolment, kit, member_list, trust
from broker_config.security.administration import AdministratorKeys
from broker_config.security.certificate_authority import create_authority
from broker_config.security.member_registry import Administrator, MemberRegistry
from broker_config.security.message_signing import MessageSigner
from broker_config.security.provisioning import kits as made_here
from broker_config.security.provisioning import request_administration
from broker_config.security.signing import SigningKey
from edge.bundle.bundle_format import BundleError
from edge.bundle.verification import Verifier
from tests.support.enrolled_members import Administration, Plant
from tests.support.federation_keys import FederationKeys
from tests.support.plants import here
from tests.support.ports import free_port
from tests.support.provisioned_federation import Guarded, Members, admitted, meet

DAY = timedelta(days=1)


@pytest.fixture(scope="module", autouse=True)
def cheap() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "_COST", 2)
        yield


class Two:
    """Anna has founded steel, and admitted Boris; plant-a has keys of its own, plant-b those that Anna has made."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.plant = Plant(folder, "plant-a")
        self.anna = Administration(folder / "anna")
        self.anna.found(self.plant, nodes=["plant-b"])
        self.kit = self.plant.accept(self.anna.answer("plant-a"))
        self.boris = self.anna.admit("boris", folder / "boris")

    def broker(self, by: Administration) -> Members:
        """The broker with the files of an administrator, beside the key that it has."""
        here = self.folder / f"broker-of-{by.folder.name}"
        shutil.copytree(self.anna.folder / "broker", here / "broker", dirs_exist_ok=True)
        shutil.copytree(by.folder / "broker", here / "broker", dirs_exist_ok=True)
        return Members(here, by.provision(), {})


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return Two(tmp_path_factory.mktemp("two"))


@pytest.fixture
def two(untouched: Two, tmp_path: Path) -> Two:
    shutil.copytree(untouched.folder, tmp_path, dirs_exist_ok=True)
    again = Two.__new__(Two)
    again.folder, again.kit = tmp_path, untouched.kit
    again.plant = Plant(tmp_path, "plant-a")
    again.anna, again.boris = Administration(tmp_path / "anna"), Administration(tmp_path / "boris")
    return again


# Who can sign


def test_no_private_key_is_shared(two: Two) -> None:
    anna, boris = two.anna.provision(), two.boris.provision()
    assert anna.key.public != boris.key.public
    held = {"anna": (anna.charter_key, anna.ca.key), "boris": (boris.charter_key, boris.ca.key)}
    held["anna"] += (anna.broker.key, anna.members["plant-b"].signing, anna.members["coordinator"].pair.key)
    for mine, other in ((two.anna, "boris"), (two.boris, "anna")):
        content = b"\n".join(path.read_bytes() for path in mine.folder.rglob("*") if path.is_file())
        for secret in held[other]:
            raw = secret if isinstance(secret, bytes) else secret.splitlines()[1].encode()
            assert not [form for form in (raw, raw.hex().encode(), base64.b64encode(raw)) if form in content]
    assert not (two.boris.folder / "broker" / "broker.key").exists()


def test_whom_the_second_one_certifies_the_broker_admits_and_the_others_believe(two: Two) -> None:
    new = Plant(two.folder, "plant-c")
    two.boris.provision(new, renew=["plant-a"])
    its, renewed = new.accept(two.boris.answer("plant-c")), two.plant.accept(two.boris.answer("plant-a"))
    assert its.authority == renewed.authority == two.kit.authority, "the authority that members know stays the same"
    broker = two.broker(two.boris)
    for each in (its, renewed, two.kit):
        assert meet(broker, each)
        assert MessageSigner(each)
    assert set(its.members().nodes) == {"plant-a", "plant-b", "plant-c"}
    two.anna.provision(register=two.boris.register)
    broker = two.broker(two.anna)
    for each in (its, renewed, two.kit):
        assert meet(broker, each)
    opened = kit.read(two.anna.folder / "kits" / "plant-b.kit", phrases(two.anna)["plant-b"])
    assert set(opened.members().nodes) == {"plant-a", "plant-b", "plant-c"}, "Anna's kits hold the newest list"


def phrases(by: Administration) -> dict[str, str]:
    return dict(line.split() for line in (by.folder / "passphrases.txt").read_text().splitlines())


def test_a_kit_that_the_first_one_has_made_is_renewed_by_the_second_one_with_an_answer(two: Two) -> None:
    passphrase = phrases(two.anna)["plant-b"]
    place = Plant(two.folder, "plant-b").place
    shutil.copy(two.anna.folder / "kits" / "plant-b.kit", place.kit)
    place.passphrase.write_text(passphrase)
    two.boris.provision(renew=["plant-b"], days=700)
    renewed = enrolment.accept(place, two.boris.answer("plant-b")).kit
    assert meet(two.broker(two.boris), renewed)
    registry = two.anna.provision(register=two.boris.register)
    assert kit.read(two.anna.folder / "kits" / "plant-b.kit", passphrase).certificate == renewed.certificate
    assert registry.members["plant-b"].passphrase == passphrase


def test_a_line_takes_a_newer_member_list_of_the_second_one_until_he_is_withdrawn(two: Two, tmp_path: Path) -> None:
    """Its trust file names the first one's key alone."""
    first, thief = trust.read(two.anna.folder / "trust" / "plant-a.trust"), SigningKey.generate()
    keys = FederationKeys("steel")
    keys.keys["plant-a"] = SigningKey(two.kit.signing)
    keys.keys["coordinator"] = SigningKey(two.anna.provision().members["coordinator"].signing)
    boris = two.boris.provision(Plant(two.folder, "plant-c"))
    with Verifier(first, tmp_path / "memory").admit(keys.bundle(tmp_path / "1", charter=boris.charter)):
        pass
    assert Verifier(first, tmp_path / "memory").newest
    two.anna.provision(register=two.boris.register)
    two.anna.provision(revoke=["boris"])
    listed = member_list.verify(boris.charter, boris.authority, "here")
    nodes = {**listed.nodes, "plant-a": replace(listed.nodes["plant-a"], key=thief.public)}
    forged = member_list.sign(replace(listed, version=1_000_000, nodes=nodes), boris.key, boris.grant)
    now = trust.read(two.anna.folder / "trust" / "plant-a.trust")
    bundle = keys.bundle(tmp_path / "2", key=thief, charter=forged)
    with pytest.raises(BundleError, match="is not signed by plant-a"), Verifier(now, tmp_path / "memory").admit(bundle):
        pass


def test_either_revokes_and_the_other_takes_it_over(two: Two) -> None:
    new = Plant(two.folder, "plant-c")
    two.boris.provision(new)
    its = new.accept(two.boris.answer("plant-c"))
    two.anna.provision(register=two.boris.register)
    registry = two.anna.provision(revoke=["plant-c", "plant-b"])
    assert (
        "plant-c"
        not in kit.read(two.anna.folder / "kits" / "coordinator.kit", phrases(two.anna)["coordinator"]).members().nodes
    )
    assert "user plant-c\ntopic deny #" in (two.anna.folder / "broker" / "acl").read_text(), (
        "at once, whoever issued it"
    )
    assert meet(two.broker(two.anna), its), "only Boris can list what he has issued"
    two.boris.provision(register=two.anna.register)
    with pytest.raises(ssl.SSLError, match="revoked"):
        meet(two.broker(two.boris), its)
    assert two.anna.provision(register=two.boris.register).version == registry.version, "and Anna's files have his list"
    with pytest.raises(ssl.SSLError, match="revoked"):
        meet(two.broker(two.anna), its)


def test_nobody_is_taken_off_a_revocation_list_by_an_older_copy_of_it(two: Two) -> None:
    """Boris has not heard yet that Clara has listed what she issued."""
    clara, new = two.anna.admit("clara", two.folder / "clara"), Plant(two.folder, "plant-c")
    clara.provision(new)
    its = new.accept(clara.answer("plant-c"))
    two.anna.provision(register=clara.register)
    two.anna.provision(revoke=["plant-c"])
    two.boris.provision(register=two.anna.register)
    clara.provision(register=two.anna.register)
    for other in (clara, two.boris):
        two.anna.provision(register=other.register)
        with pytest.raises(ssl.SSLError, match="revoked"):
            meet(two.broker(two.anna), its)


def test_the_second_one_replaces_lost_keys_and_what_the_old_ones_sign_is_believed_by_nobody(two: Two) -> None:
    again = Plant(two.folder / "new", "plant-a")
    two.boris.provision(again, revoke=["plant-a"])
    new = again.accept(two.boris.answer("plant-a"))
    assert meet(two.broker(two.boris), new)
    assert new.members().key("plant-a") == SigningKey(new.signing).public != SigningKey(two.kit.signing).public
    two.anna.provision(register=two.boris.register)
    with pytest.raises(ssl.SSLError, match="revoked"):
        meet(two.broker(two.anna), two.kit)


def test_mosquitto_admits_whom_either_has_certified_until_the_one_is_withdrawn(tmp_path: Path) -> None:
    plant, new = Plant(tmp_path, "plant-a"), Plant(tmp_path, "plant-c")
    with tempfile.TemporaryDirectory() as passable:  # pytest's folders are closed to the user mosquitto
        Path(passable).chmod(0o711)
        anna = Administration(Path(passable) / "anna")
        registry = anna.found(plant, port=free_port())
        boris = anna.admit("boris", tmp_path / "boris")
        boris.provision(new)
        kits = [plant.accept(anna.answer("plant-a")), new.accept(boris.answer("plant-c"))]
        anna.provision(register=boris.register)
        broker = Guarded(Members(anna.folder, registry, {each.name: each for each in made_here(registry)}))
        broker.start()
        try:
            assert all(admitted(its) for its in kits)
            anna.provision(revoke=["boris"])
            kits.append(new.accept(anna.answer("plant-c")))
            broker.restart()
            assert admitted(kits[0])
            assert admitted(kits[2])
            with pytest.raises(BrokerError, match="another authority has issued it"):
                admitted(kits[1])
        finally:
            broker.stop()


# Withdrawn


def test_a_withdrawn_administrator_is_out_with_all_that_he_has_issued_and_those_members_go_on(two: Two) -> None:
    new, thief = Plant(two.folder, "plant-c"), Plant(two.folder, "plant-x")
    two.boris.provision(new, renew=["plant-a"])
    old = new.accept(two.boris.answer("plant-c"))
    two.anna.provision(register=two.boris.register)
    registry = two.anna.provision(revoke=["boris"])
    two.boris.provision(thief)  # he goes on, with his old register
    stolen = thief.accept(two.boris.answer("plant-x"))
    broker = two.broker(two.anna)
    for its in (old, stolen):
        with pytest.raises(ssl.SSLError):
            meet(broker, its)
    renewed = new.accept(two.anna.answer("plant-c"))
    assert (renewed.key, renewed.signing) == (old.key, old.signing)
    for its in (renewed, two.plant.accept(two.anna.answer("plant-a")), two.kit):
        assert meet(broker, its)
    assert two.boris.folder.name not in registry.deputies
    with pytest.raises(UsageError, match="is older than"):
        new.accept(two.boris.answer("plant-c"))
    with pytest.raises(UsageError, match="is older than this folder's"):
        two.anna.provision(register=two.boris.register)


def test_no_member_list_of_a_withdrawn_administrator_is_newer_than_one_without_him(two: Two) -> None:
    """However high a version he gives it."""
    boris = two.boris.provision()
    two.anna.provision(revoke=["boris"])
    now = member_list.verify(trust.read(two.anna.folder / "trust" / "plant-a.trust").charter, boris.authority, "here")
    mine = member_list.verify(boris.charter, boris.authority, "here")
    high = replace(mine, version=1_000_000)
    signed = member_list.sign(high, boris.key, boris.grant)
    assert member_list.verify(signed, boris.authority, "here").rank < now.rank
    with pytest.raises(member_list.MemberListError, match="its grant is another than it says"):
        member_list.verify(member_list.sign(replace(high, grant=9), boris.key, boris.grant), boris.authority, "here")


def test_the_withdrawn_one_hears_of_it_and_can_be_admitted_again(two: Two) -> None:
    two.anna.provision(revoke=["boris"])
    with pytest.raises(UsageError, match="lets this folder's administrator sign no more"):
        two.boris.provision(Plant(two.folder, "plant-c"), register=two.anna.register)
    two.anna.provision(administrators=[administration.read_request(two.boris.folder / "boris.administrator", "steel")])
    two.boris.provision(Plant(two.folder, "plant-d"), register=two.anna.register)


@pytest.mark.parametrize("change", ["admit", "withdraw"])
def test_only_the_first_one_admits_and_withdraws(change: str, two: Two) -> None:
    path, _ = request_administration(two.folder / "clara", "steel", "clara", datetime.now(UTC))
    clara = administration.read_request(path, "steel")
    request = {"administrators": [clara]} if change == "admit" else {"revoke": ["boris"]}
    with pytest.raises(UsageError, match="only the first administrator admits and withdraws"):
        two.boris.provision(**request)


def test_the_second_one_leaves_the_brokers_certificate_to_renew_due_of_the_first_one(two: Two) -> None:
    """Kits from before he was admitted would not trust a broker whose certificate is his."""
    registry = two.boris.provision(renew_due=True, ago=-300 * DAY)
    assert registry.broker.expires < registry.members["plant-a"].pair.expires
    assert meet(two.broker(two.boris), two.kit)


def test_a_broker_that_the_second_one_has_certified_needs_new_kits_and_the_command_says_so(two: Two) -> None:
    words = ("provision", "steel", "--out", two.boris.folder, "--renew", "broker")
    assert "give all others their new kits or answers too" in here(*words).stdout
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(two.broker(two.boris), two.kit)
    assert meet(two.broker(two.boris), two.plant.accept(two.boris.answer("plant-a")))


# What is not taken over


def forge(two: Two, change: Callable[[MemberRegistry], MemberRegistry]) -> Path:
    """A register of Boris's that he has changed to his liking; all that can be signed by him is."""
    path = two.folder / "forged.register"
    boris = two.boris.provision()
    content = administration.encode_register(boris)
    file = json.loads(content)
    shared = msgspec.json.decode(
        delegation.open_signed(file["key"], "register", base64.b64decode(file["signed"])).content, type=MemberRegistry
    )
    signed = delegation.sign(boris.key, boris.grant, "register", msgspec.json.encode(change(shared)))
    path.write_text(json.dumps(file | {"signed": base64.b64encode(signed).decode()}))
    return path


STRANGERS = "its administrators are not those whom the first one has admitted"


def friend() -> Administrator:
    ca = create_authority("steel", datetime.now(UTC), "friend")
    return Administrator(key=SigningKey.generate().public, ca=ca.certificate)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: replace(it, deputies={**it.deputies, "friend": friend()}), STRANGERS),
        (lambda it: replace(it, first=replace(it.first, ca=friend().ca)), STRANGERS),
        (lambda it: replace(it, deputies={}), STRANGERS),
        (lambda it: replace(it, grants=7), STRANGERS),
        (lambda it: replace(it, grant=b""), "it is not signed"),
        (lambda it: replace(it, federation="iron"), STRANGERS),
        (lambda it: replace(it, history=["0" * 64]), "have been changed at the same time"),
        (lambda it: replace(it, history=[]), "is older than this folder's"),
        (
            lambda it: replace(it, issued=[replace(each, revoked=None) for each in it.issued]),
            "does not know that plant-b was revoked",
        ),
    ],
)  # fmt: skip
def test_a_register_in_which_the_second_one_gives_himself_more_rights_is_refused(
    change: Callable[[MemberRegistry], MemberRegistry], words: str, two: Two
) -> None:
    two.anna.provision(revoke=["plant-b"])
    two.boris.provision(register=two.anna.register)
    before = two.anna.provision()
    with pytest.raises(UsageError, match=words) as caught:
        two.anna.provision(register=forge(two, change))
    assert caught.value.remedy
    assert two.anna.provision() == before
    assert two.anna.provision(register=forge(two, lambda it: it)).version == before.version


def test_two_changes_at_the_same_time_are_noticed(two: Two) -> None:
    two.anna.provision(renew=["plant-a"])
    two.boris.provision(renew=["plant-a"])
    for mine, other in ((two.anna, two.boris), (two.boris, two.anna)):
        with pytest.raises(UsageError, match="have been changed at the same time") as caught:
            mine.provision(register=other.register)
        assert "repeats the change" in caught.value.remedy


def test_an_older_register_is_refused_and_the_same_one_changes_nothing(two: Two) -> None:
    old = shutil.copy(two.anna.register, two.folder / "old.register")
    registry = two.anna.provision(renew=["plant-a"])
    two.boris.provision(register=two.anna.register)
    with pytest.raises(UsageError, match="is older than this folder's: of version"):
        two.boris.provision(register=Path(old))
    assert two.boris.provision(register=two.anna.register).version == registry.version


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_register_or_request_is_refused(seed: int, two: Two) -> None:
    rng = random.Random(seed)
    request = two.boris.folder / "boris.administrator"
    for source, read in (
        (two.anna.register, lambda path: two.boris.provision(register=path)),
        (request, lambda path: administration.read_request(path, "steel")),
    ):
        whole, path = source.read_bytes(), two.folder / "damaged"
        expected, refused = read(source), 0
        for _ in range(15):
            where = rng.randrange(len(whole))
            path.write_bytes(whole[:where] + bytes([whole[where] ^ 1 << rng.randrange(8)]) + whole[where + 1 :])
            try:
                assert read(path) == expected
            except UsageError as error:
                assert str(path) in error.what  # noqa: PT017
                refused += 1
        assert refused >= 12


def test_what_is_no_register_or_request_is_refused_with_a_remedy(two: Two) -> None:
    path = two.folder / "x"
    for content, words in ((b"", "is no register"), (b"{}", "is no register"), (bytes((1 << 24) + 1), "too large")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=words) as caught:
            two.boris.provision(register=path)
        assert caught.value.remedy
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        two.boris.provision(register=two.folder / "none")
    with pytest.raises(UsageError, match="asks to be an administrator of 'steel', not 'iron'"):
        administration.read_request(two.boris.folder / "boris.administrator", "iron")


def test_a_register_of_another_authority_is_refused(two: Two) -> None:
    other = Administration(two.folder / "other")
    other.found(nodes=["plant-a"])
    other.admit("clara", two.folder / "clara")
    with pytest.raises(UsageError, match="is of another authority than this folder"):
        two.boris.provision(register=other.register)
    iron = Administration(two.folder / "iron", "iron")
    iron.found(nodes=["plant-a"])
    iron.admit("clara", two.folder / "clara-of-iron")
    with pytest.raises(UsageError, match="is of federation 'iron', not 'steel'"):
        two.boris.provision(register=iron.register)


# Becoming one


def test_an_administrators_name_and_folder_are_his_alone(two: Two) -> None:
    again = Administration(two.folder / "again")
    now = datetime.now(UTC)
    path, mark = request_administration(again.folder, "steel", "boris", now)
    assert request_administration(again.folder, "steel", "boris", now)[1] == mark, "keys are made once"
    with pytest.raises(UsageError, match="is an administrator already, with other keys"):
        two.anna.provision(administrators=[administration.read_request(path, "steel")])
    for name, words in (("clara", "is the folder of boris"), ("cla ra", "cannot be used")):
        with pytest.raises(UsageError, match=words):
            request_administration(again.folder, "steel", name, now)
    with pytest.raises(UsageError, match="no register yet"):
        again.provision()
    with pytest.raises(UsageError, match="is an administrator's already"):
        request_administration(two.anna.folder, "steel", "boris", now)
    path, _ = request_administration(two.folder / "p", "steel", "plant-a", now)
    with pytest.raises(UsageError, match="plant-a is a member"):
        two.anna.provision(administrators=[administration.read_request(path, "steel")])
    with pytest.raises(UsageError, match="has no administrator's keys"):
        Administration(two.folder / "nobody").provision(register=two.anna.register)
    (again.folder / "authority" / "administrator.json").write_text("{}")
    with pytest.raises(UsageError, match="an administrator's keys cannot be read"):
        again.provision(register=two.anna.register)


def test_a_request_whose_certificate_is_of_another_key_is_refused(tmp_path: Path) -> None:
    """Nobody is admitted with the certificate of somebody else's authority."""
    now = datetime.now(UTC)
    keys = AdministratorKeys(
        federation="steel",
        name="boris",
        ca=create_authority("steel", now, "clara"),
        charter_key=SigningKey.generate().raw,
    )
    (tmp_path / "x").write_bytes(administration.encode_request(keys))
    with pytest.raises(UsageError, match="cannot be relied on: its certificate is somebody else's"):
        administration.read_request(tmp_path / "x", "steel")


def test_the_commands_lead_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def succeed(*words: object) -> str:
        done = here(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    succeed("provision", "steel", "--nodes", "plant-a", "--host", "127.0.0.1")
    asked = json.loads(succeed("provision", "steel", "--out", "boris", "--as", "boris", "--json"))
    text = succeed("provision", "steel", "--out", "boris", "--as", "boris")
    assert f"fingerprint: {asked['fingerprint']}" in text
    assert "send boris/boris.administrator to the first administrator of steel" in text
    text = succeed("provision", "steel", "--administrator", "boris/boris.administrator")
    assert f"administrator boris, with fingerprint {asked['fingerprint']}, may sign, too" in text
    assert "give them steel/steel.register, for --register" in text
    text = succeed("provision", "steel", "--out", "boris", "--register", "steel/steel.register")
    assert "the register is taken over" in text
    assert "copy boris/broker/ to the broker's machine, and restart mosquitto" in text
    text = succeed("provision", "steel", "--out", "boris", "--revoke", "plant-a")
    assert "another administrator has issued certificates of plant-a" in text
    assert "give the other administrators boris/steel.register, for --register" in text
    succeed("provision", "steel", "--register", "boris/steel.register")
    text = succeed("provision", "steel", "--revoke", "boris")
    assert "no administrator any more: boris" in text
    assert json.loads(succeed("provision", "steel", "--json"))["administrators"] == {}
