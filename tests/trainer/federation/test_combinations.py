"""What does not combine: every row of the table holds, and none is left out."""

from typing import Any

import pytest

from broker_config.protocol.errors import UsageError
from tests.support.combined_features import ASKED, CLASSES, having, plain, request
from trainer.federation.combinations import (
    EXCLUSIONS,
    OF_RUNS,
    ROWS,
    Exclusion,
    Wanted,
    check,
    of_spec,
)
from trainer.federation.server.spec import Participation, draft
from trainer.methods import METHODS


@pytest.fixture(scope="module")
def methods() -> dict[str, Wanted]:
    made: dict[str, Wanted] = {name: plain(name) for name in METHODS}
    relay: Any = object()  # methods of other packages can relay, and have models of their own
    method = made["fedavg"].method._replace(relay=relay, model="its_own")
    return {**made, "relaying": made["fedavg"]._replace(name="relaying", method=method)}


def excluded(row: Exclusion, methods: dict[str, Wanted]) -> list[str]:
    """The methods with which its two features, if they are asked for, are both there."""
    found = []
    for name, wanted in methods.items():
        asked = having(row.other, having(row.one, wanted))
        if row.one.find(asked) and row.other.find(asked):
            found.append(name)
    return found


def titled(row: Exclusion) -> str:
    return f"{row.one.title} and {row.other.title}"


@pytest.mark.parametrize("row", ROWS, ids=titled)
def test_what_does_not_combine_is_refused_by_both_names_and_with_a_remedy(
    row: Exclusion, methods: dict[str, Wanted]
) -> None:
    names = excluded(row, methods)
    assert names, "no method has it"
    for name in names:
        wanted = having(row.other, having(row.one, methods[name]))
        with pytest.raises(UsageError) as refused:
            check(wanted, (row,))
        for feature in (row.one, row.other):
            assert feature.find(wanted) in refused.value.what
        assert refused.value.remedy


@pytest.mark.parametrize("row", ROWS, ids=titled)
def test_each_of_the_two_is_possible_by_itself(row: Exclusion, methods: dict[str, Wanted]) -> None:
    """With some method; otherwise the row would be no exclusion of two."""
    for feature in (row.one, row.other):
        others = [
            having(feature, wanted._replace(rule=rule))
            for wanted in methods.values()
            for rule in (None, "multi_krum")
        ]
        alone = [each for each in others if feature.find(each)]
        passed = []
        for wanted in alone:
            try:
                check(wanted, (row,))
            except UsageError:
                continue
            passed.append(wanted.name)
        assert passed, feature.title


@pytest.mark.parametrize("row", EXCLUSIONS, ids=titled)
def test_no_such_federation_is_drafted(row: Exclusion, methods: dict[str, Wanted]) -> None:
    names = [name for name in excluded(row, methods) if name in METHODS]
    if not names:
        pytest.skip("no method that is registered has it")
    asked = request(names[0])
    participation = Participation()
    for feature in (row.one, row.other):
        if feature in ASKED:
            asked = asked._replace(**ASKED[feature].request)
            participation = max(participation, ASKED[feature].participation)
    with pytest.raises(UsageError) as refused:
        draft(asked, federation="steel", classes=CLASSES, nodes=5, participation=participation)
    assert "does not combine with" in refused.value.what


def test_a_node_checks_the_spec_that_it_is_sent_by_the_same_table(
    methods: dict[str, Wanted],
) -> None:
    for name in METHODS:
        wanted = methods[name]
        spec, first = draft(request(name), federation="steel", classes=CLASSES, nodes=5)
        assert of_spec(spec, wanted.method, first)._replace(rule=None) == wanted._replace(
            first=first
        ), "nothing is lost on the way"
        check(of_spec(spec, wanted.method, first), OF_RUNS)
