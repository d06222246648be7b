"""What the kernel knows of vertical federated learning: topics, who signs them, digests of specs,
checks.
"""

from pathlib import Path

import pytest

from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.federation_kinds import KINDS, kind_of_topic
from broker_config.security.one_time import digest_spec
from broker_config.security.signing import ForgedError
from edge.doctor import access_check, connection_check
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.messages import VflSpec
from tests.support.authority import Authority
from tests.support.changed_specs import changed
from tests.support.doctor_checks import configured, tried
from tests.support.vfl_models import settings

TOPICS = {
    vfl_topics.opened("steel"): "coordinator",
    vfl_topics.representation("steel"): "coordinator",
    vfl_topics.predictions("steel"): "coordinator",
    vfl_topics.gradients("steel", "plant-a"): "coordinator",
    vfl_topics.gradients("steel", "plant-b"): "coordinator",
    vfl_topics.embeddings("steel", "plant-a"): "plant-a",
    vfl_topics.embeddings("steel", "plant-b"): "plant-b",
    vfl_topics.products("steel", "plant-a"): "plant-a",
    vfl_topics.products("steel", "plant-b"): "plant-b",
}


def test_a_message_is_heard_on_its_own_topic_only_and_from_its_own_member_only() -> None:
    signers = Authority("steel").signers()
    others = (*TOPICS, topics.up("steel", "plant-a"), topics.down("steel", "plant-a"))
    for topic, who in TOPICS.items():
        for name, signer in signers.items():
            signed = signer.sign(topic, b"{}")
            for other in others:
                if (other, name) == (topic, who):
                    assert signers["plant-c"].verify(other, signed) == b"{}"
                else:
                    with pytest.raises(ForgedError):
                        signers["plant-c"].verify(other, signed)


def test_every_topic_has_its_signer() -> None:
    assert {topic: topics.expected_signer(topic) for topic in TOPICS} == TOPICS
    assert {*map(kind_of_topic, TOPICS)} == {"vfl"}


def test_everybody_may_write_and_read_what_the_protocol_says() -> None:
    """The whole specification; a broker is tried with it in test_access_list.py."""
    said = {}
    for each in KINDS["vfl"].topics:
        said[each.path] = each.writer, {*each.readers}
    assert said == {
        "opened": ("coordinator", {"node"}),
        "representation": ("coordinator", {"node"}),
        "predictions": ("coordinator", {"coordinator", "monitor"}),
        "+/embeddings": ("node", {"coordinator"}),
        "+/gradients": ("coordinator", {"node"}),
        "+/products": ("node", {"coordinator"}),
    }


def test_every_field_of_a_spec_changes_its_digest() -> None:
    spec = settings()
    digests = {digest_spec(spec)}
    names = set()
    for name, other in changed(spec):
        digests.add(digest_spec(other))
        names.add(name)
    assert names == set(spec.__struct_fields__)
    assert len(digests) == 1 + sum(1 for _ in changed(spec))


def test_the_topics_of_lines_are_tried_once_a_line_is_announced(tmp_path: Path) -> None:
    (tmp_path / "acl").write_text("topic readwrite edge-node/#\ntopic deny edge-node/v1/+/vfl/#\n")
    line = VflSpec(
        federation="press",
        run="0" * 16,
        software="",
        sensors=("a",),
        network="linear",
        classes=("x", "y"),
    )
    with (
        configured(tmp_path, f"acl_file {tmp_path / 'acl'}") as port,
        tried(f"mqtt://127.0.0.1:{port}") as context,
    ):
        assert connection_check.federations(context).found == "none is announced here yet"
        assert access_check.access(context).outcome == "ok"
        with context.connection("head") as head:
            assert not head.publish(topics.spec("press"), encode(line), retain=True)
        assert connection_check.federations(context).found == "press (1 sensor)"
        found = access_check.access(context)
    assert (found.outcome, found.found) == ("failure", "plant-a may not write embeddings, products")
