"""The gRPC face of a rollout cell: protobuf in and out, nothing else."""

from __future__ import annotations

import functools
import time
from typing import Protocol

import grpc

from services.common.errors import ConfigError
from services.common.grpc import errors_as_status, serve
from services.common.types import CellRole
from services.common.wire import ROLE_FROM_PB, STATE_TO_PB
from services.pb import cell_pb2, cell_pb2_grpc, records_pb2
from services.rollout.types import CellStatus, UpdateResult
from services.trainer.types import Canary, TensorSlot, WeightManifest

SERVICE_NAME = "tidegate.v1.CellService"

_PARKED = (CellRole.TO_TRAIN, CellRole.TRAIN)
_AWAKE = (CellRole.TO_ROLLOUT, CellRole.ROLLOUT)
_SWITCH_MARGIN_S = 1.0  # a switch must answer before its caller's deadline
_SWITCH_TIMEOUT_S = 30.0


class Cell(Protocol):
    """What the servicer needs of a cell."""

    async def status(self) -> CellStatus: ...
    async def admit(self) -> None: ...
    async def drain(self, timeout_s: float) -> tuple[int, int]: ...
    async def publish(self, manifest: WeightManifest) -> UpdateResult: ...


async def serve_cell(cell: Cell, host: str, token: str) -> tuple[grpc.aio.Server, str]:
    """Serve a cell on a free port of ``host``; returns the server and its address."""
    servicer = CellServicer(cell)  # type: ignore[abstract]  # the generated base answers UNIMPLEMENTED for the rest
    add = functools.partial(cell_pb2_grpc.add_CellServiceServicer_to_server, servicer)
    return await serve([add], [SERVICE_NAME], host=host, port=0, token=token)


class CellServicer(cell_pb2_grpc.CellServiceServicer):
    """``CellService`` of one cell. KV hand-off is not offered: those methods answer UNIMPLEMENTED."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    @errors_as_status
    async def GetStatus(  # noqa: N802
        self, request: cell_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> cell_pb2.GetStatusResponse:
        status = await self._cell.status()
        return cell_pb2.GetStatusResponse(
            cell_id=status.cell_id,
            state=STATE_TO_PB[status.state],
            version=status.version,
            admitting=status.admitting,
            num_calls=status.num_calls,
            slots=status.slots,
            reason=status.reason,
            generated_tokens=status.generated_tokens,
            prompt_tokens=status.prompt_tokens,
            rss_bytes=status.rss_bytes,
        )

    @errors_as_status
    async def Admit(  # noqa: N802
        self, request: cell_pb2.AdmitRequest, context: grpc.aio.ServicerContext
    ) -> cell_pb2.AdmitResponse:
        await self._cell.admit()
        return cell_pb2.AdmitResponse()

    @errors_as_status
    async def Drain(  # noqa: N802
        self, request: cell_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> cell_pb2.DrainResponse:
        num_finished, num_aborted = await self._cell.drain(request.timeout_s)
        return cell_pb2.DrainResponse(num_finished=num_finished, num_aborted=num_aborted)

    @errors_as_status
    async def Switch(  # noqa: N802
        self, request: cell_pb2.SwitchRequest, context: grpc.aio.ServicerContext
    ) -> cell_pb2.SwitchResponse:
        started_s = time.monotonic()
        role = ROLE_FROM_PB.get(request.role)
        if role in _PARKED:
            left_s = context.time_remaining()
            timeout_s = _SWITCH_TIMEOUT_S if left_s is None else max(left_s - _SWITCH_MARGIN_S, 0.0)
            await self._cell.drain(timeout_s)
        elif role in _AWAKE:
            await self._cell.admit()
        else:
            raise ConfigError("a cell can be switched to training or to rollout.", "Send one of those roles.")
        return cell_pb2.SwitchResponse(seconds=time.monotonic() - started_s)

    @errors_as_status
    async def Publish(  # noqa: N802
        self, request: cell_pb2.PublishRequest, context: grpc.aio.ServicerContext
    ) -> cell_pb2.PublishResponse:
        result = await self._cell.publish(manifest_from_pb(request.manifest))
        return cell_pb2.PublishResponse(
            cell_id=result.cell_id,
            version=result.version,
            ok=result.ok,
            reason=result.reason,
            seconds=result.seconds,
            size_bytes=result.size_bytes,
            transport=result.transport,
            canary_abs_diff_max=result.canary_abs_diff_max,
        )


def manifest_from_pb(message: records_pb2.WeightManifest) -> WeightManifest:
    return WeightManifest(
        version=message.version,
        segment=message.segment,
        address=message.address,
        size_bytes=message.size_bytes,
        transport=message.transport,
        tensors=tuple(
            TensorSlot(
                name=slot.name,
                shape=tuple(slot.shape),
                dtype=slot.dtype,
                offset_bytes=slot.offset_bytes,
                size_bytes=slot.size_bytes,
                checksum=slot.checksum,
            )
            for slot in message.tensors
        ),
        canary=Canary(tuple(message.canary.token_ids), tuple(message.canary.logprobs)),
    )
