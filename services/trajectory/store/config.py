"""Configuration of the trajectory store."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

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
    """Empty: SQLite files in the job's folder. `sqlite:////FULL/PATH` (a folder in which each job gets its own), or
    `postgresql://USER@HOST/DATABASE` (its password comes from `~/.pgpass` or `PGPASSWORD`)."""
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
            raise ValueError("give sqlite:////FULL/PATH or postgresql://USER@HOST/DATABASE")
        if url.startswith("sqlite:") and not url.startswith("sqlite:////"):
            raise ValueError("write the whole path of the folder, as sqlite:////FULL/PATH (four slashes)")
        return _without_secret(url, "put it into ~/.pgpass or PGPASSWORD")

    @field_validator("blob_url")
    @classmethod
    def _names_a_place(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and not url.startswith("file:///") and not (parts.scheme == "s3" and parts.hostname):
            raise ValueError("give file:///FOLDER or s3://BUCKET/PREFIX")
        return _without_secret(url, "put it into AWS_SECRET_ACCESS_KEY, or give the machine a role")


def _without_secret(url: str, where: str) -> str:
    """The URL; ``ValueError`` if it holds a secret, for configurations are kept and sent on."""
    parts = urlsplit(url)
    if parts.password is not None or "password" in parse_qs(parts.query) or "secret_key" in parse_qs(parts.query):
        raise ValueError(f"leave the password out of the URL, for a job's configuration is kept; {where}")
    return url
