from __future__ import annotations

import pytest

from services.common import wire
from services.common.types import CellKind, CellRole, CellState
from services.pb import common_pb2

MAPS = [
    (CellRole, wire.ROLE_TO_PB, wire.ROLE_FROM_PB, common_pb2.CellRole),
    (CellState, wire.STATE_TO_PB, wire.STATE_FROM_PB, common_pb2.CellState),
    (CellKind, wire.KIND_TO_PB, wire.KIND_FROM_PB, common_pb2.CellKind),
]


@pytest.mark.parametrize(("members", "to_pb", "from_pb", "message"), MAPS)
def test_every_member_has_the_number_of_its_name_and_none_is_unspecified(members, to_pb, from_pb, message) -> None:
    assert set(to_pb) == set(members)
    prefix = "".join("_" + letter if letter.isupper() else letter for letter in members.__name__).lstrip("_").upper()
    assert {message.Name(number): member.name for member, number in to_pb.items()} == {
        f"{prefix}_{member.name}": member.name for member in members
    }
    assert {from_pb[number] for number in to_pb.values()} == set(members)
    assert set(message.values()) - set(from_pb) == {0}, "only the unspecified number has no member"
