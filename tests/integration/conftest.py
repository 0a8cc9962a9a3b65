"""One engine for all tests of the rollout side: starting one takes longer than all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration import stale_head
from tests.integration.calls import Pair, paired, tiny_config


@pytest.fixture(scope="session")
def stale_head_marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the engine of ``tied`` forgets to pack its head again."""
    return tmp_path_factory.mktemp("stale") / "marker"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied(tmp_path_factory: pytest.TempPathFactory, stale_head_marker: Path) -> AsyncIterator[Pair]:
    """The tiny model, whose embedding is also its head. Each test publishes what it needs, versions only rise."""
    from services.common.models import resolve_model

    model_path = resolve_model("tiny-qwen3", tmp_path_factory.mktemp("cache"))
    config = tiny_config(extra={"worker_extension_cls": stale_head.WORKER})
    async with paired(model_path, config, **{stale_head.MARKER_VARIABLE: str(stale_head_marker)}) as pair:
        yield pair
