"""Configuration of the trajectory store."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator


class RetentionConfig(BaseModel):
    """Which calls are deleted. Only groups that no resumed job can need are, the oldest first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_age_days: float | None = Field(default=None, gt=0)
    """Calls of groups that ended longer ago are deleted. None: kept."""
    max_size_bytes: int | None = Field(default=None, ge=0)
    """Most bytes of stored calls of one shard, objects included. None: no limit."""


class StoreConfig(BaseModel):
    """Where runs are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = ""
    """Empty: SQLite files in the job's folder. `sqlite:///FOLDER`, or `postgresql://USER@HOST/DATABASE`."""
    blob_url: str = ""
    """Objects with the calls of ended attempts. Empty: the folder `blobs` in the job's store folder. `file:///FOLDER`,
    or `s3://BUCKET/PREFIX`, with `?region=...` or `?endpoint_override=HOST:PORT&scheme=http`."""
    commit_interval_ms: float = Field(default=4.0, ge=0)
    """A commit takes in what arrives during so long, if more is waiting. A single call waits for nobody."""
    reconnect_timeout_s: float = Field(default=20.0, gt=0)
    """A database that went away is waited for so long before what is being written fails."""
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    """When calls are deleted."""

    @field_validator("url")
    @classmethod
    def _names_a_database(cls, url: str) -> str:
        if url and not url.startswith(("sqlite:///", "postgresql://", "postgres://", "postgresql+psycopg://")):
            raise ValueError("give sqlite:///FOLDER or postgresql://USER@HOST/DATABASE")
        return url

    @field_validator("blob_url")
    @classmethod
    def _names_a_place(cls, url: str) -> str:
        if url and not url.startswith(("file:///", "s3://")):
            raise ValueError("give file:///FOLDER or s3://BUCKET/PREFIX")
        return url
