"""Client of a cell's gRPC service: dataclasses in and out."""

from __future__ import annotations

import time
from typing import Any

import grpc

from services.common.errors import TidegateError
from services.common.grpc import channel, error_from_status
from services.common.types import CellRole
from services.common.wire import ROLE_TO_PB, STATE_FROM_PB
from services.pb import cell_pb2, cell_pb2_grpc, records_pb2
from services.rollout.types import CellStatus, UpdateResult
from services.trainer.types import WeightManifest

_DRAIN_MARGIN_S = 15.0  # what the calls left at the deadline need to end
PUBLISH_TIMEOUT_S = 600.0


class CellClient:
    """Commands to one cell. Every method raises the ``TidegateError`` that the cell answered with."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = channel(address, token)
        self._stub = cell_pb2_grpc.CellServiceStub(self._channel)

    async def status(self) -> CellStatus:
        answer = await _ask(self._stub.GetStatus(cell_pb2.GetStatusRequest()))
        return CellStatus(
            cell_id=answer.cell_id,
            state=STATE_FROM_PB[answer.state],
            version=answer.version,
            admitting=answer.admitting,
            num_calls=answer.num_calls,
            slots=answer.slots,
            reason=answer.reason,
            generated_tokens=answer.generated_tokens,
            prompt_tokens=answer.prompt_tokens,
            rss_bytes=answer.rss_bytes,
        )

    async def admit(self) -> None:
        """Let the cell take calls (again)."""
        await _ask(self._stub.Admit(cell_pb2.AdmitRequest()))

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Let the cell take no new calls; returns how many finished and how many the deadline aborted."""
        request = cell_pb2.DrainRequest(timeout_s=timeout_s)
        answer = await _ask(self._stub.Drain(request, timeout=timeout_s + _DRAIN_MARGIN_S))
        return answer.num_finished, answer.num_aborted

    async def switch(self, role: CellRole, timeout_s: float) -> float:
        """Park or wake the rollout side for a role; returns the seconds it took."""
        started_s = time.monotonic()
        request = cell_pb2.SwitchRequest(role=ROLE_TO_PB[role])
        await _ask(self._stub.Switch(request, timeout=timeout_s + _DRAIN_MARGIN_S))
        return time.monotonic() - started_s

    async def publish(self, manifest: WeightManifest, timeout_s: float = PUBLISH_TIMEOUT_S) -> UpdateResult:
        """Have the cell pull and verify weights. A refusal is a result, not an error."""
        request = cell_pb2.PublishRequest(manifest=manifest_to_pb(manifest))
        answer = await _ask(self._stub.Publish(request, timeout=timeout_s))
        return UpdateResult(
            cell_id=answer.cell_id,
            version=answer.version,
            ok=answer.ok,
            reason=answer.reason,
            seconds=answer.seconds,
            size_bytes=answer.size_bytes,
            transport=answer.transport,
            canary_abs_diff_max=answer.canary_abs_diff_max,
        )

    async def close(self) -> None:
        await self._channel.close()


async def _ask(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        translated: TidegateError = error_from_status(error)
        raise translated from error


def manifest_to_pb(manifest: WeightManifest) -> records_pb2.WeightManifest:
    return records_pb2.WeightManifest(
        version=manifest.version,
        segment=manifest.segment,
        address=manifest.address,
        size_bytes=manifest.size_bytes,
        transport=manifest.transport,
        tensors=[
            records_pb2.TensorSlot(
                name=slot.name,
                shape=slot.shape,
                dtype=slot.dtype,
                offset_bytes=slot.offset_bytes,
                size_bytes=slot.size_bytes,
                checksum=slot.checksum,
            )
            for slot in manifest.tensors
        ],
        canary=records_pb2.Canary(token_ids=manifest.canary.token_ids, logprobs=manifest.canary.logprobs),
    )
