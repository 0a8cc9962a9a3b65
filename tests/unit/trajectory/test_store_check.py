from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import ConfigError, MachineError
from services.trajectory.store import StoreConfig
from services.trajectory.store.check import check_store, describe_store
from tests.services import PostgresServer, S3Server


def test_a_store_that_can_be_used_passes_and_nothing_is_written(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    folder = tmp_path / "not" / "yet"
    for url in ("", f"sqlite:///{folder}", postgres.new_database()):
        for blob_url in ("", folder.as_uri(), s3.url):
            check_store(StoreConfig(url=url, blob_url=blob_url))
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_away_or_refuses_is_told_before_a_job_starts(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with pytest.raises(MachineError, match="cannot be reached"):
        check_store(StoreConfig(url=f"postgresql://me@/runs?host={tmp_path}"))
    with pytest.raises(MachineError, match="does not exist"):
        check_store(StoreConfig(url=postgres.url("nowhere")))


def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trajectory\.store\.url: .* cannot be written"):
        check_store(StoreConfig(url=f"sqlite:///{tmp_path / 'file' / 'runs'}"))
    with pytest.raises(ConfigError, match=r"trajectory\.store\.blob_url: .* cannot be written"):
        check_store(StoreConfig(blob_url=(tmp_path / "file").as_uri()))


def test_a_bucket_that_does_not_exist_is_told(s3: S3Server) -> None:
    url = s3.url.replace("s3://", "s3://no-", 1)
    with pytest.raises(ConfigError, match="no bucket"):
        check_store(StoreConfig(blob_url=url))


@pytest.mark.parametrize("field", [{"url": "sqlite:///runs"}, {"blob_url": "s3://"}, {"blob_url": "s3:///calls"}])
def test_a_place_that_names_no_place_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StoreConfig(**field)


def test_the_plan_names_the_store_without_its_options() -> None:
    assert describe_store(StoreConfig()) == "SQLite in the job's folder"
    config = StoreConfig(url="postgresql://me@db/runs", blob_url="s3://bucket/calls?region=eu")
    assert describe_store(config) == "PostgreSQL runs at db, objects in s3://bucket/calls"
