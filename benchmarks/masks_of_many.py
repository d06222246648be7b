"""Cost of one round's masks to one node of many: bytes of its messages, both ways,
and processor time.

    python -m benchmarks.masks_of_many --nodes 100 200 500 1000

For each number of nodes as it is (up to 200 share their secrets with all others, more with some),
and for up to 500 once more as if all shared with all. The other nodes are there as far as this one
hears of them: their keys are checked, their shares are read, nobody is lost. Masking is of one
model's words, MobileNetV2's, on one core.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from broker_config.protocol.codec import encode
from broker_config.protocol.messages import AnyMessage, MaskingAnswer, MaskingStep, PublicKeys
from broker_config.security import mask_keys
from broker_config.security.mask_keys import RoundSecrets, Scope
from broker_config.security.signing import SigningKey, verify
from trainer.federation.masking import (
    count_neighbours,
    least_neighbours,
    least_threshold,
    member_state,
    shares_needed,
)
from trainer.federation.masking.masks import apply_masks
from trainer.federation.masking.member_state import Answer, Member, Record
from trainer.federation.masking.step_parts import split

RUN = SESSION = "f" * 16
SCOPE = Scope("steel", RUN, 1, "e" * 64)
WORDS = 2_280_000  # of MobileNetV2's encoder
MOST_WITH_ALL = 500  # nodes; shares for more do not fit into one message


class Round(NamedTuple):
    """The cohort, as it comes to be known, and what its nodes know of themselves."""

    members: dict[str, Member]
    secrets: dict[str, RoundSecrets]
    cohort: dict[str, PublicKeys]
    record: Record  # of the node that is measured


class Cost:
    """What has been spent so far."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def send(self, message: AnyMessage) -> None:
        """Count a message, in parts if it is long."""
        parts = split(message) if isinstance(message, MaskingStep) else [message]
        self.bytes += sum(len(encode(each)) for each in parts)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the processor's time."""
        start = time.process_time()
        yield
        self.seconds += time.process_time() - start


def sign(key: SigningKey, context: str, statement: bytes) -> str:
    """A node's signature, as it is told."""
    return key.sign(context, statement).hex()


def gather(nodes: int, neighbours: int) -> Round:
    """Nodes that have begun a round."""
    names = [f"plant-{number:03}" for number in range(nodes)]
    keys = {name: SigningKey.generate() for name in names}

    def check(name: str, context: str, statement: bytes, signature: str) -> None:
        verify(keys[name].public, context, statement, bytes.fromhex(signature))

    members = {
        name: Member(
            SCOPE.federation,
            RUN,
            name,
            SCOPE.spec,
            nodes,
            least_threshold(nodes),
            neighbours,
            (),
            lambda _: False,
            partial(sign, key),
            check,
        )
        for name, key in keys.items()
    }
    records = {name: member_state.begin(member, None, 1) for name, member in members.items()}
    return Round(
        members,
        {
            name: RoundSecrets(bytes.fromhex(each.root), SCOPE, name)
            for name, each in records.items()
        },
        {name: member_state.public_keys(members[name], each) for name, each in records.items()},
        records[names[0]],
    )


def shares_for(name: str, round_: Round, neighbours: int) -> dict[str, str]:
    """What all others that have chosen a node encrypt for it."""
    nodes = len(round_.cohort)
    needed, count = (
        shares_needed(least_threshold(nodes), neighbours, nodes),
        count_neighbours(neighbours, nodes),
    )
    found = dict[str, str]()
    for other, own in round_.secrets.items():
        if other != name and name in own.neighbours(round_.cohort, count):
            found |= {
                other: own.encrypt_shares(
                    round_.cohort, own.shares_for([name], round_.cohort, needed)
                )[name]
            }
    return found


def measure(nodes: int, neighbours: int) -> str:
    """One node's round, but for its training."""
    round_ = gather(nodes, neighbours)
    names, (name, member) = tuple(sorted(round_.members)), next(iter(round_.members.items()))
    up, down, masking, record = Cost(), Cost(), Cost(), round_.record

    def answer(step: MaskingStep, record: Record) -> Record:
        down.send(step)
        with up.spent():
            record, answers = member_state.advance(member, record, step)
        for each in answers:
            up.send(as_message(each))
        return record

    up.send(as_message(Answer(keys=round_.cohort[name])))
    record = answer(MaskingStep(run=RUN, round=1, members=round_.cohort), record)
    shares = shares_for(name, round_, neighbours)
    record = answer(MaskingStep(run=RUN, round=1, counted=names, shares=shares), record)
    with masking.spent():
        seeds = member_state.mask_seeds(member, record)
        apply_masks({"a": np.zeros(WORDS, np.uint32)}, seeds)
    record = answer(MaskingStep(run=RUN, round=1, survivors=names), record)
    statement = mask_keys.survivors_statement(SCOPE, round_.cohort, names, names)
    signed = {
        each: round_.members[each].sign(mask_keys.SURVIVORS, statement)
        for each in names[: least_threshold(nodes)]
    }
    answer(MaskingStep(run=RUN, round=1, signatures=signed), record)
    return (
        f"{nodes} nodes, shares for {count_neighbours(neighbours, nodes)}, masks with "
        f"{len(seeds) - 1}: {up.bytes / 1e3:.0f} kB up, {down.bytes / 1e3:.0f} kB down; keys and "
        f"shares {up.seconds:.2f} s, masking {masking.seconds:.1f} s"
    )


def as_message(answer: Answer) -> MaskingAnswer:
    """As the node sends it."""
    return MaskingAnswer(
        session=SESSION,
        run=RUN,
        round=1,
        keys=answer.keys,
        shares=dict(answer.shares),
        signature=answer.signature,
        revealed=dict(answer.revealed),
    )


def main() -> None:
    """Print a line for each number of nodes and way of sharing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 200, 500, 1000])
    for nodes in parser.parse_args().nodes:
        ways = {least_neighbours(nodes)} | ({0} if nodes <= MOST_WITH_ALL else set())
        for neighbours in sorted(ways):
            print(measure(nodes, neighbours), flush=True)


if __name__ == "__main__":
    main()
