"""`edge-node provision`: what is made for whom, for how long
(whom mosquitto admits: `test_broker_admission`).
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.security import certificate_authority as authority
from broker_config.security import kit, member_list, trust
from broker_config.security.member_registry import ChangeRequest
from broker_config.security.message_signing import MessageSigner
from broker_config.security.provisioning import provision
from broker_config.security.signing import SigningKey
from broker_config.storage import disk
from edge.status.provisioning_report import json_object, text_lines
from tests.support.plants import run
from tests.support.provisioned_federation import Members, make, meet

DAY = timedelta(days=1)
NOW = datetime.now(UTC)
ALL = {"coordinator", "monitor", "plant-a", "plant-b"}


@pytest.fixture(scope="module", autouse=True)
def cheap() -> Iterator[None]:
    """Here kits are opened by the hundred: their passphrases cost next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "_COST", 2)  # a parameter could weaken real ones
        yield


@pytest.fixture(scope="module")
def steel(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """For tests that change nothing."""
    return make(tmp_path_factory.mktemp("members") / "steel")


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file: when it was written, and what is in it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


# What is made


def test_there_is_a_kit_for_every_member_and_a_trust_file_for_every_node(steel: Members) -> None:
    assert {path.name for path in (steel.folder / "kits").iterdir()} == {
        f"{name}.kit" for name in ALL
    }
    assert {path.name for path in (steel.folder / "trust").iterdir()} == {
        "plant-a.trust",
        "plant-b.trust",
    }
    lines = (steel.folder / "passphrases.txt").read_text().splitlines()
    phrases = dict(line.split() for line in lines)
    assert phrases == {name: steel.passphrase(name) for name in ALL}
    assert len(set(phrases.values())) == len(ALL)


def test_a_kit_is_its_members_and_holds_all_that_it_needs(steel: Members) -> None:
    for name, its in steel.kits.items():
        assert (its.federation, its.name, its.broker) == ("steel", name, "mqtts://127.0.0.1:8883")
        assert meet(steel, its) == "TLSv1.3"
        members = its.members()
        assert set(members.nodes) == {"plant-a", "plant-b"}
        if name == "monitor":
            assert its.signing == b""
        else:
            assert members.key(name) == SigningKey(its.signing).public
        assert MessageSigner(its).members == members
    assert len({its.signing for its in steel.kits.values()}) == len(ALL)
    assert len({its.key for its in steel.kits.values()}) == len(ALL)


def test_the_charter_says_when_each_certificate_ends_and_outlives_them_all(steel: Members) -> None:
    members = steel.kits["plant-a"].members()
    ends = {name: member.expires for name, member in members.nodes.items()}
    assert ends == {name: steel.kits[name].expires() for name in ends}
    assert members.coordinator.expires == steel.kits["coordinator"].expires()
    assert members.expires == max(ends.values()) + 365 * DAY


def test_certificates_hold_from_yesterday_for_as_long_as_was_asked_and_end_with_the_authority(
    tmp_path: Path,
) -> None:
    short = make(tmp_path / "short", days=30)
    assert abs(short.kits["plant-a"].expires() - NOW - 30 * DAY) < DAY / 24
    old = make(tmp_path / "old", ago=authority.LIFETIME - 10 * DAY).change(
        renew=["plant-a", "broker"]
    )
    end = old.registry.ca.expires
    assert (
        old.kits["plant-a"].expires()
        == old.registry.broker.expires
        == old.kits["plant-a"].members().expires
        == end
    )
    assert end < NOW + 11 * DAY
    crl = x509.load_pem_x509_crl(old.registry.crl.encode())
    assert crl.next_update_utc == end, (
        "a broker whose list of revoked certificates is out of date admits nobody"
    )
    assert meet(old, old.kits["plant-a"])


def test_secrets_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make(tmp_path / "steel")
        made.change(nodes=["plant-c"])
    finally:
        os.umask(before)
    public = {
        "lock",
        "mosquitto.conf",
        "acl",
        "ca.pem",
        "broker.pem",
        "crl.pem",
        *(f"plant-{x}.trust" for x in "abc"),
    }
    for path in (made.folder, *made.folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.name not in public:
            assert mode == 0o600, path
        else:
            assert not {its.encode() for its in made.kits["plant-a"].key.splitlines()[1:2]} & set(
                path.read_bytes().splitlines()
            )


def test_no_secret_is_printed_with_the_register(steel: Members) -> None:
    shown = (
        repr(steel.registry)
        + repr(steel.registry.members)
        + repr(steel.registry.ca)
        + repr(steel.kits)
    )
    for secret in (steel.passphrase("plant-a"), "PRIVATE", steel.registry.charter_key.hex()):
        assert secret not in shown


def test_the_broker_is_told_where_its_folder_will_lie(tmp_path: Path) -> None:
    made = make(tmp_path / "steel")
    conf = made.folder / "broker" / "mosquitto.conf"
    assert f"cafile {made.folder}/broker/ca.pem" in conf.read_text()
    made.change(broker_folder="/etc/edge-node")
    made.change(port=1234)
    assert "cafile /etc/edge-node/ca.pem" in conf.read_text()
    assert "listener 1234" in conf.read_text()


def test_an_ipv6_address_or_a_name_may_be_the_brokers_and_several_hosts_stand_in_its_certificate(
    tmp_path: Path,
) -> None:
    registry = provision(
        tmp_path / "steel",
        "steel",
        ChangeRequest(nodes=["a"], hosts=["::1", "broker.local", "10.0.0.7"]),
        NOW,
    ).registry
    its = kit.read(tmp_path / "steel" / "kits" / "a.kit", registry.members["a"].passphrase)
    assert its.broker == "mqtts://[::1]:8883"
    assert Endpoint.from_kit(its).host == "::1"
    for host in registry.hosts:
        assert meet(
            Members(tmp_path / "steel", msgspec.structs.replace(registry, hosts=[host]), {}), its
        )


# Running it again


def test_running_it_again_changes_nothing(steel: Members) -> None:
    before = snapshot(steel.folder)
    done = provision(
        steel.folder,
        "steel",
        ChangeRequest(nodes=["plant-a"], hosts=["127.0.0.1"], renew_due=True),
        NOW,
    )
    assert done.changed == []
    assert snapshot(steel.folder) == before


def test_more_nodes_are_added_and_all_hear_of_it(tmp_path: Path) -> None:
    first = make(tmp_path / "steel", nodes=["plant-a"])
    second = first.change(nodes=["plant-b", "plant-a"])
    assert second.registry.version == first.registry.version + 1
    for name, its in first.kits.items():
        now = second.kits[name]
        assert set(now.members().nodes) == {"plant-a", "plant-b"}
        assert msgspec.structs.replace(now, charter=its.charter) == its
        assert second.passphrase(name) == first.passphrase(name)


def test_a_renewed_member_keeps_its_keys_and_passphrase_and_its_old_kit_goes_on(
    tmp_path: Path,
) -> None:
    first = make(tmp_path / "steel", days=50)
    second = first.change(renew=["plant-a"])
    old, new = first.kits["plant-a"], second.kits["plant-a"]
    assert new.expires() > old.expires() + 300 * DAY
    assert (new.signing, second.passphrase("plant-a")) == (old.signing, first.passphrase("plant-a"))
    assert second.kits["plant-b"].certificate == first.kits["plant-b"].certificate
    assert meet(second, old)
    assert meet(second, new)


def test_what_ends_within_90_days_is_renewed_when_asked_the_brokers_too(tmp_path: Path) -> None:
    first = make(tmp_path / "steel", ago=280 * DAY)
    second = first.change(nodes=["plant-c"])
    third = second.change(renew_due=True)
    renewed = {
        name for name in third.kits if third.kits[name].certificate != second.kits[name].certificate
    }
    assert renewed == ALL
    assert third.registry.broker.expires > NOW + 300 * DAY
    assert third.registry.broker.key == first.registry.broker.key
    assert third.change(renew_due=True).registry == third.registry


def test_a_revoked_node_is_out_with_every_certificate_that_it_ever_had(tmp_path: Path) -> None:
    first = make(tmp_path / "steel")
    second = first.change(renew=["plant-a"])
    third = second.change(revoke=["plant-a"])
    assert set(third.kits["plant-b"].members().nodes) == {"plant-b"}
    assert not (third.folder / "kits" / "plant-a.kit").exists()
    assert not (third.folder / "trust" / "plant-a.trust").exists()
    assert "plant-a" not in (third.folder / "passphrases.txt").read_text()
    for old in (first.kits["plant-a"], second.kits["plant-a"]):
        with pytest.raises(ssl.SSLError, match="revoked"):
            meet(third, old)
    assert meet(third, third.kits["plant-b"])
    assert third.change(revoke=["plant-a"]).registry == third.registry


def test_a_revoked_name_comes_back_with_new_keys_and_the_old_ones_stay_revoked(
    tmp_path: Path,
) -> None:
    first = make(tmp_path / "steel")
    again = first.change(revoke=["plant-a"], nodes=["plant-a"])
    assert again.kits["plant-a"].signing != first.kits["plant-a"].signing
    assert again.passphrase("plant-a") != first.passphrase("plant-a")
    assert meet(again, again.kits["plant-a"])
    with pytest.raises(ssl.SSLError, match="revoked"):
        meet(again, first.kits["plant-a"])
    old = msgspec.structs.replace(first.kits["plant-a"], charter=again.kits["plant-b"].charter)
    with pytest.raises(UsageError, match=r"no member.*'steel'"):
        MessageSigner(old)


def test_a_coordinator_or_monitor_is_revoked_by_new_keys(tmp_path: Path) -> None:
    first = make(tmp_path / "steel")
    second = first.change(revoke=["coordinator", "monitor"])
    for name in ("coordinator", "monitor"):
        assert meet(second, second.kits[name])
        with pytest.raises(ssl.SSLError, match="revoked"):
            meet(second, first.kits[name])
    assert (
        second.kits["plant-a"].members().coordinator.key
        == SigningKey(second.kits["coordinator"].signing).public
    )


def test_a_broker_that_moves_gets_another_certificate_and_kits_name_the_new_place(
    tmp_path: Path,
) -> None:
    first = make(tmp_path / "steel")
    second = first.change(hosts=["broker.local"], port=9999)
    assert second.kits["plant-a"].broker == "mqtts://broker.local:9999"
    assert meet(second, first.kits["plant-a"])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.1"):
        meet(Members(second.folder, first.registry, {}), second.kits["plant-a"])


def test_lost_and_damaged_files_are_made_again_from_the_register(tmp_path: Path) -> None:
    made = make(tmp_path / "steel")
    before = {name: content for name, (_, content) in snapshot(made.folder).items()}
    (made.folder / "kits" / "plant-a.kit").write_bytes(b"damaged")
    (made.folder / "passphrases.txt").unlink()
    shutil.rmtree(made.folder / "broker")
    again = made.change()
    assert again.kits == made.kits
    after = {name: content for name, (_, content) in snapshot(made.folder).items()}
    before.pop("kits/plant-a.kit")
    assert before.items() <= after.items()


def provision_until(step: int, folder: Path, change: ChangeRequest) -> None:
    """Like `provision`, but dies before it settles file number `step`."""
    steps, done = itertools.count(), disk.move_durably

    def mortal(scratch: Path, path: Path) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        done(scratch, path)

    disk.move_durably = mortal
    provision(folder, "steel", change, NOW)


@pytest.mark.slow
@pytest.mark.parametrize("founding", [True, False], ids=["founding", "changing"])
def test_killed_at_any_step_it_is_whole_after_the_next_run_and_no_member_was_without_a_kit(
    founding: bool, tmp_path: Path
) -> None:
    original = None if founding else make(tmp_path / "original", nodes=["plant-a", "plant-b"])
    change = ChangeRequest(nodes=["plant-a", "plant-c"], hosts=["127.0.0.1"])
    if original:
        change = msgspec.structs.replace(change, renew=["plant-a"], revoke=["plant-b"])
    for step in itertools.count():
        folder = tmp_path / f"{step}"
        if original:
            shutil.copytree(original.folder, folder)
        process = multiprocessing.get_context("fork").Process(
            target=provision_until, args=(step, folder, change)
        )
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        phrases = {}
        if (folder / "passphrases.txt").exists():
            phrases = dict(
                line.split() for line in (folder / "passphrases.txt").read_text().splitlines()
            )
        usable = [path.stem for path in (folder / "kits").glob("*.kit") if path.stem != "plant-b"]
        assert {"coordinator", "monitor", "plant-a"} <= set(usable) or founding
        for name in usable:
            assert kit.read(folder / "kits" / f"{name}.kit", phrases[name]).name == name
        registry = provision(folder, "steel", change, NOW).registry
        names = {"coordinator", "monitor", "plant-a", "plant-c"}
        assert (
            set(registry.members)
            == {path.stem for path in (folder / "kits").glob("*.kit")}
            == names
        )
        whole = Members(folder, registry, {})
        for name, member in registry.members.items():
            its = kit.read(folder / "kits" / f"{name}.kit", member.passphrase)
            assert its.members().version == registry.version
            assert meet(whole, its)
    assert step == (14 if founding else 11), (
        "register, passphrases, 4 kits, 2 trust files; all the broker's, or 3"
    )


# What cannot be


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ChangeRequest(hosts=["127.0.0.1"]), "--nodes plant-a,plant-b"),
        (ChangeRequest(nodes=["plant-a"]), "--host broker.local"),
        (ChangeRequest(nodes=["plant a"], hosts=["h"]), "'plant a' cannot be used"),
        (ChangeRequest(nodes=["coordinator"], hosts=["h"]), "a node cannot be called coordinator"),
        (ChangeRequest(nodes=["broker"], hosts=["h"]), "a node cannot be called broker"),
        (
            ChangeRequest(nodes=["plant-a"], hosts=["broker:8883"]),
            "'broker:8883' is neither a host name nor an address",
        ),
        (ChangeRequest(nodes=["plant-a"], hosts=["-x"]), "neither a host name nor an address"),
        (ChangeRequest(nodes=["plant-a"], hosts=["x" * 64]), "neither a host name nor an address"),
        (
            ChangeRequest(nodes=["plant-a"], hosts=["h"], renew=["plant-b"]),
            "did you mean 'plant-a'?",
        ),
    ],
)
def test_a_first_request_that_cannot_be_met_leaves_nothing_behind(
    change: ChangeRequest, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        provision(tmp_path / "steel", "steel", change, NOW)
    assert words in str(caught.value)
    assert caught.value.remedy
    assert not [
        path for path in (tmp_path / "steel").rglob("*") if path.is_file() and path.name != "lock"
    ]


def test_unknown_names_are_answered_with_those_that_there_are(steel: Members) -> None:
    for change in (ChangeRequest(revoke=["plant-c"]), ChangeRequest(renew=["plant-c"])):
        with pytest.raises(UsageError, match="'plant-c'") as caught:
            provision(steel.folder, "steel", change, NOW)
        assert "did you mean 'plant-" in caught.value.remedy
    with pytest.raises(UsageError, match="broker"):
        provision(steel.folder, "steel", ChangeRequest(revoke=["broker"]), NOW)


def test_a_folder_of_something_else_is_not_touched(steel: Members, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'steel'"):
        provision(steel.folder, "iron", ChangeRequest(nodes=["plant-c"]), NOW)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(UsageError, match="no federation"):
        provision(tmp_path, "steel", ChangeRequest(nodes=["plant-a"], hosts=["h"]), NOW)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_registry_that_is_lost_or_damaged_is_not_replaced_by_another_authority(
    tmp_path: Path,
) -> None:
    made = make(tmp_path / "steel")
    registry = made.folder / "authority" / "register.json"
    whole, rng = registry.read_bytes(), random.Random(5)
    for _ in range(20):
        where = rng.randrange(len(whole))
        registry.write_bytes(
            whole[:where] + bytes([whole[where] ^ 1 << rng.randrange(8)]) + whole[where + 1 :]
        )
        with pytest.raises(UsageError, match=r"register\.json.*damaged") as caught:
            made.change(nodes=["plant-c"])
        assert "backup" in caught.value.remedy
    registry.unlink()
    with pytest.raises(UsageError, match="no federation"):
        made.change(nodes=["plant-c"])
    assert (
        kit.read(made.folder / "kits" / "plant-a.kit", made.passphrase("plant-a"))
        == made.kits["plant-a"]
    )


def test_an_authority_that_has_ended_issues_nothing(tmp_path: Path) -> None:
    old = make(tmp_path / "steel", ago=authority.LIFETIME + DAY)
    with pytest.raises(UsageError, match="'steel' ended"):
        old.change(renew_due=True)


def test_two_at_a_time_do_not_mix(tmp_path: Path) -> None:
    made = make(tmp_path / "steel")
    with (
        disk.lock_folder(made.folder / "authority"),
        pytest.raises(UsageError, match=f"process {os.getpid()}"),
    ):
        made.change(nodes=["plant-c"])


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EdgeNodeError, match="cannot be a folder"):
        provision(
            tmp_path / "file" / "steel", "steel", ChangeRequest(nodes=["plant-a"], hosts=["h"]), NOW
        )


# Kits and trust files on their way


def test_a_wrong_passphrase_opens_nothing_but_spaces_around_it_do_no_harm(steel: Members) -> None:
    path = steel.folder / "kits" / "plant-a.kit"
    for wrong in (steel.passphrase("plant-b"), steel.passphrase("plant-a")[:-1], ""):
        with pytest.raises(UsageError, match="passphrase"):
            kit.read(path, wrong)
    for harmless in (f" {steel.passphrase('plant-a')}\n", steel.passphrase("plant-a").upper()):
        assert kit.read(path, harmless) == steel.kits["plant-a"]


def test_what_is_written_with_a_passphrase_of_ones_own_keeps_its_capitals(
    steel: Members, tmp_path: Path
) -> None:
    kit.write(tmp_path / "x.kit", steel.kits["plant-a"], "Correct Horse")
    assert kit.read(tmp_path / "x.kit", "Correct Horse") == steel.kits["plant-a"]
    with pytest.raises(kit.PassphraseError, match="passphrase") as caught:
        kit.read(tmp_path / "x.kit", "correct horse")
    assert caught.value.remedy.startswith("check the passphrase")


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_kit_is_refused_or_still_the_same(
    seed: int, steel: Members, tmp_path: Path
) -> None:
    rng, path = random.Random(seed), tmp_path / "plant-a.kit"
    whole = (steel.folder / "kits" / "plant-a.kit").read_bytes()
    refused = 0
    for _ in range(12):
        where = rng.randrange(len(whole))
        path.write_bytes(
            whole[:where] + bytes([whole[where] ^ 1 << rng.randrange(8)]) + whole[where + 1 :]
        )
        try:
            assert kit.read(path, steel.passphrase("plant-a")) == steel.kits["plant-a"]
        except UsageError as error:
            assert str(path) in error.what  # noqa: PT017
            refused += 1
    assert refused >= 10


def test_a_kit_cannot_be_passed_off_as_another_members(steel: Members, tmp_path: Path) -> None:
    content = json.loads((steel.folder / "kits" / "plant-a.kit").read_bytes())
    for field, other in (("name", "plant-b"), ("federation", "iron")):
        (tmp_path / "x.kit").write_text(json.dumps(content | {field: other}))
        with pytest.raises(UsageError, match="passphrase"):
            kit.read(tmp_path / "x.kit", steel.passphrase("plant-a"))


def test_what_is_no_kit_is_refused_with_a_remedy(steel: Members, tmp_path: Path) -> None:
    path, whole = tmp_path / "plant-a.kit", (steel.folder / "kits" / "plant-a.kit").read_bytes()
    newer = whole.replace(b'"edge_node_kit": 1', b'"edge_node_kit": 2')
    for content, words in (
        (whole[: len(whole) // 2], "is no kit"),
        (b"", "is no kit"),
        (b"{}", "is no kit"),
        (newer, "another version"),
        (whole.replace(b"plant", b"pl\xe1nt"), "is no kit"),
        (bytes((1 << 24) + 1), "too large"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=words) as caught:
            kit.read(path, "x")
        assert caught.value.remedy
    with pytest.raises(UsageError, match=r"none\.kit"):
        kit.read(tmp_path / "none.kit", "x")


def test_no_passphrase_is_asked_for_where_there_is_no_kit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.kit.*No such file"):
        kit.ask_passphrase(tmp_path / "none.kit")


def test_a_trust_file_names_the_node_and_whom_the_authority_vouches_for(
    steel: Members, tmp_path: Path
) -> None:
    path = steel.folder / "trust" / "plant-a.trust"
    believed = trust.read(path)
    assert (believed.federation, believed.node) == ("steel", "plant-a")
    assert (
        member_list.verify(believed.charter, believed.authority, "here")
        == steel.kits["plant-a"].members()
    )
    assert not any(secret.hex() in path.read_text() for secret in (steel.kits["plant-a"].signing,))
    assert trust.encode(believed) == path.read_bytes()


def test_a_charter_of_another_authority_or_an_old_one_is_not_believed(steel: Members) -> None:
    data, authority = steel.kits["plant-a"].charter, steel.registry.key
    with pytest.raises(
        member_list.MemberListError,
        match="another authority",
    ):
        member_list.verify(data, SigningKey.generate().public, "here")
    with pytest.raises(member_list.MemberListError, match="does not fit\n"):
        member_list.verify(data[:-5], authority.public, "here")
    ended = msgspec.structs.replace(steel.kits["plant-a"].members(), expires=NOW - DAY)
    with pytest.raises(member_list.MemberListError, match="has expired"):
        member_list.verify(member_list.sign(ended, authority), authority.public, "here")


def test_a_charter_with_a_grant_is_refused(steel: Members) -> None:
    """A second administrator's lists began with 0x02; the first one's had the grant's version."""
    key = steel.registry.key
    content = msgspec.json.decode(msgspec.json.encode(steel.kits["plant-a"].members()))
    without = key.sign_envelope("charter", msgspec.json.encode(content | {"grant": 0}))
    granted = key.sign_envelope("charter", msgspec.json.encode(content | {"grant": 1}))
    for data in (granted, b"\x02" + without):
        with pytest.raises(member_list.MemberListError, match="`grant`") as caught:
            member_list.verify(data, key.public, "here")
        assert "anew" in caught.value.remedy
    assert member_list.verify(without, key.public, "here") == steel.kits["plant-a"].members()


def test_a_registry_with_grants_is_refused_and_stays_as_it_is(steel: Members) -> None:
    path = steel.folder / "authority" / "register.json"
    before = path.read_bytes()

    def write(**changes: object) -> None:
        content = msgspec.json.encode(msgspec.json.decode(before)["register"] | changes)
        path.write_bytes(
            msgspec.json.encode(
                {"sha256": hashlib.sha256(content).hexdigest(), "register": msgspec.Raw(content)}
            )
        )

    try:
        write(grants=1, deputies={"boris": {"key": "0" * 64, "ca": ""}})
        with pytest.raises(UsageError, match="`grants`") as caught:
            steel.change()
        assert "anew" in caught.value.remedy
        write(grants=0, deputies={}, first=None)
        assert steel.change().registry == steel.registry
    finally:
        path.write_bytes(before)


def test_what_is_no_trust_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "plant-a.trust"
    no = "is no trust file"
    for content, words in (
        (b"", no),
        (b"{}", no),
        (b'{"\xe1"}', no),
        (bytes((1 << 24) + 1), "too large"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=words) as caught:
            trust.read(path)
        assert caught.value.remedy
    with pytest.raises(UsageError, match="/none"):
        trust.read(tmp_path / "none")


# The command


def test_the_command_says_what_goes_to_whom_and_tells_machines_the_same(tmp_path: Path) -> None:
    words = ("provision", "steel", "--out", tmp_path / "out")
    result = run(*words, "--nodes", "plant-a, plant-b", "--host", "broker.local", COLUMNS="200")
    assert result.returncode == 0, result.stderr
    for expected in (
        "kits/plant-a.kit",
        "passphrases.txt",
        "mosquitto",
        "join --kit plant-a.kit",
        "serve --trust",
    ):
        assert expected in result.stdout
    secrets = (tmp_path / "out" / "passphrases.txt").read_text().split()[1::2]
    assert not any(secret in result.stdout for secret in secrets)
    result = run(*words, "--revoke", "plant-b", "--json")
    facts = json.loads(result.stdout)
    assert [member["name"] for member in facts["members"]] == ["coordinator", "monitor", "plant-a"]
    assert "kits/plant-b.kit" in facts["changed"]
    assert facts["version"] == 2
    assert (facts["added"], facts["renewed"], facts["revoked"], facts["restored"]) == (
        [],
        [],
        ["plant-b"],
        [],
    )
    result = run(*words, "--renew", "plant-x")
    assert result.returncode == 2
    assert "no member 'plant-x'" in result.stderr
    assert "What to do:" in result.stderr


BROKER_STEP, COORDINATOR_STEP = (
    "copy steel/broker/",
    "give the coordinator steel/kits/coordinator.kit",
)
OTHERS_GO_ON = "all other kits stay valid"


@pytest.mark.parametrize(
    ("change", "said", "unsaid"),
    [
        (
            ChangeRequest(nodes=["c"]),
            {"new: c", COORDINATOR_STEP, "give c steel/kits/c.kit and", OTHERS_GO_ON},
            {BROKER_STEP},
        ),
        (
            ChangeRequest(revoke=["plant-b"]),
            {
                "revoked: plant-b; until mosquitto has its new files",
                f"1. {BROKER_STEP}",
                f"2. {COORDINATOR_STEP}",
            },
            {"passphrase,", "give plant-b"},
        ),
        (
            ChangeRequest(revoke=["plant-b"], nodes=["plant-b"]),
            {
                "new keys: plant-b; the old ones work until",
                BROKER_STEP,
                COORDINATOR_STEP,
                "plant-b.kit and, separately",
            },
            {"revoked: plant-b", "new: plant-b"},
        ),
        (
            ChangeRequest(renew=["plant-b"]),
            {
                "new certificate: plant-b; the old one holds until",
                "its passphrase is the same",
                OTHERS_GO_ON,
            },
            {BROKER_STEP, COORDINATOR_STEP},
        ),
        (
            ChangeRequest(renew=["broker"]),
            {BROKER_STEP, "reload mosquitto", OTHERS_GO_ON},
            {COORDINATOR_STEP, "restart"},
        ),
        (
            ChangeRequest(revoke=["coordinator"]),
            {
                BROKER_STEP,
                "coordinator.kit and, separately, its new passphrase, and start",
                "give all others",
            },
            {OTHERS_GO_ON},
        ),
        (
            ChangeRequest(revoke=["monitor"]),
            {BROKER_STEP, "give monitor", OTHERS_GO_ON},
            {COORDINATOR_STEP},
        ),
        (
            ChangeRequest(port=9999),
            {"address is mqtts://127.0.0.1:9999", BROKER_STEP, "give all others"},
            {OTHERS_GO_ON},
        ),
        (
            ChangeRequest(broker_folder="/etc/x"),
            {"belong in /etc/x", BROKER_STEP, OTHERS_GO_ON},
            {COORDINATOR_STEP},
        ),
        (
            ChangeRequest(),
            {"nothing has changed, nothing needs to be done"},
            {"next:", OTHERS_GO_ON},
        ),
    ],
)
def test_a_run_says_what_it_has_changed_and_what_is_next_and_no_more(
    change: ChangeRequest,
    said: set[str],
    unsaid: set[str],
    steel: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(steel.folder, folder := tmp_path / "steel")
    provision(folder, "steel", ChangeRequest(), NOW)  # mosquitto.conf names the folder
    monkeypatch.chdir(tmp_path)
    text = "\n".join(text_lines(Path("steel"), provision(Path("steel"), "steel", change, NOW)))
    assert {words for words in said if words not in text} == set(), text
    assert {words for words in unsaid if words in text} == set(), text


def test_root_is_told_steps_that_root_can_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mosquitto gives up root's rights, and then cannot read a folder that is its owner's alone."""
    monkeypatch.chdir(tmp_path)
    folder, there = Path("steel"), tmp_path / "etc"
    founded = provision(folder, "steel", ChangeRequest(nodes=["a"], hosts=["broker.local"]), NOW)
    text = "\n".join(text_lines(folder, founded, as_root=True))
    assert "1. edge-node provision steel --out steel --broker-folder /etc/edge-node/broker" in text
    assert "mosquitto -c" not in text
    moved = provision(folder, "steel", ChangeRequest(broker_folder=str(there)), NOW)
    text = "\n".join(text_lines(folder, moved, as_root=True))
    copied = f"mkdir -p {there} && cp -a steel/broker/. {there} && chown -R mosquitto: {there}"
    assert f"restart mosquitto: {copied}; mosquitto -c {there}/mosquitto.conf" in text


def test_files_that_were_lost_are_named_and_nothing_else_is_asked_for(
    steel: Members, tmp_path: Path
) -> None:
    shutil.copytree(steel.folder, folder := tmp_path / "steel")
    provision(folder, "steel", ChangeRequest(), NOW)
    (folder / "kits" / "plant-a.kit").unlink()
    (folder / "passphrases.txt").write_text("")
    done = provision(folder, "steel", ChangeRequest(), NOW)
    text = "\n".join(text_lines(folder, done))
    assert "passphrases.txt, kits/plant-a.kit" in text
    assert "next:" not in text
    assert json_object(folder, done)["restored"] == ["passphrases.txt", "kits/plant-a.kit"]
