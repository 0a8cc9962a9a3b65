"""Enumerations as protobuf and back: the one place for what several services send. Only servicers and clients use it.

The maps to protobuf hold every member. Those from it hold no unspecified or unknown number: a servicer looks numbers
of a request up with ``get``.
"""

from __future__ import annotations

from services.common.types import CellKind, CellRole, CellState
from services.pb import common_pb2

ROLE_TO_PB: dict[CellRole, common_pb2.CellRole.ValueType] = {
    CellRole.ROLLOUT: common_pb2.CELL_ROLE_ROLLOUT,
    CellRole.TO_TRAIN: common_pb2.CELL_ROLE_TO_TRAIN,
    CellRole.TRAIN: common_pb2.CELL_ROLE_TRAIN,
    CellRole.TO_ROLLOUT: common_pb2.CELL_ROLE_TO_ROLLOUT,
    CellRole.DOWN: common_pb2.CELL_ROLE_DOWN,
}
STATE_TO_PB: dict[CellState, common_pb2.CellState.ValueType] = {
    CellState.SERVING: common_pb2.CELL_STATE_SERVING,
    CellState.UPDATING: common_pb2.CELL_STATE_UPDATING,
    CellState.STALE: common_pb2.CELL_STATE_STALE,
}
KIND_TO_PB: dict[CellKind, common_pb2.CellKind.ValueType] = {
    CellKind.CORE: common_pb2.CELL_KIND_CORE,
    CellKind.SATELLITE: common_pb2.CELL_KIND_SATELLITE,
    CellKind.STANDALONE: common_pb2.CELL_KIND_STANDALONE,
}
ROLE_FROM_PB: dict[int, CellRole] = {number: role for role, number in ROLE_TO_PB.items()}
STATE_FROM_PB: dict[int, CellState] = {number: state for state, number in STATE_TO_PB.items()}
KIND_FROM_PB: dict[int, CellKind] = {number: kind for kind, number in KIND_TO_PB.items()}
