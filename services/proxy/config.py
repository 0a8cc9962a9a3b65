"""Configuration of the proxy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ProxyConfig(BaseModel):
    """The model server that the harnesses see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address to bind. A public one needs ``admin_token``."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one."""
    num_replicas: int = Field(default=1, ge=1)
    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Larger requests are refused (413)."""
    call_timeout_s: float = Field(default=600, gt=0)
    """A call that no cell could finish by then fails (503 with retry-after)."""
    admin_token: str = ""
    """Must be set, and not to a known default, before ``host`` may be anything but a loopback address."""
    public_url: str = ""
    """How harness sandboxes on other nodes reach the proxy; empty: ``http://host:port``."""
