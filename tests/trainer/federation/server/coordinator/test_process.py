"""The coordinator's process: every effect of its machines has a method that performs it."""

from typing import get_args

from tests.support.effect_tables import performed
from trainer.federation.server.coordinator import effects, events, process
from trainer.federation.server.coordinator.masking_machine import MaskingEffect
from trainer.federation.server.coordinator.round_machine import RoundEffect


def test_the_process_performs_each_effect_and_nothing_else() -> None:
    assert performed(process) == {each.__name__ for each in get_args(effects.Effect)}


def test_what_the_inner_machines_return_is_an_effect_a_finding_or_handed_on() -> None:
    known = {*get_args(effects.Effect), *get_args(effects.Finding), events.Narrowed}
    assert {*get_args(RoundEffect), *get_args(MaskingEffect)} <= known


def test_each_thing_that_happens_has_one_name() -> None:
    names = [each.__name__ for each in (*get_args(events.Event), *get_args(effects.Effect))]
    assert len(names) == len({*names})
