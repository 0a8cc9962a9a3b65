"""How a user's command finds the scheduler of a running job: its address, its token and its id."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import AccessError, ConfigError, MachineError, NotFoundError
from services.scheduler.client import SchedulerClient

LATEST = Path("runs/latest")
"""The job that is meant where none is named."""
DEADLINE_S = 15.0
"""How long a call may take."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where a job's scheduler is, and what it wants to hear."""

    address: str
    token: str = field(repr=False)
    job_id: str = ""
    """Empty: whatever job answers at the address."""
    folder: Path | None = None
    """The job's folder, where one was read."""

    def unreachable(self, why: str) -> NotFoundError:
        """The error for a scheduler that does not answer."""
        if self.folder is None:
            return NotFoundError(
                f"the job is over or not reachable at {self.address}: {why}",
                "Check the address, and that this machine may connect to it.",
            )
        status = _status_of_summary(self.folder)
        if status:
            return NotFoundError(
                f"the job of {self.folder} is over ({status}), or not reachable at {self.address}.",
                f"See {self.folder / 'summary.json'}; `tidegate runs list --job {self.folder}` lists its runs.",
            )
        return NotFoundError(
            f"the job of {self.folder} is over or not reachable at {self.address}: {why}",
            "On another machine than the job's, forward its port and name it with --address; `tidegate train CONFIG "
            "--resume` goes on with a job that died.",
        )


def find_access(job: Path | None = None, address: str = "", token: str = "") -> Access:
    """The scheduler of a job's folder (None: ``runs/latest``); ``address`` and ``token`` win over what stands there.

    An address without a folder needs its token with it: that of ``runs/latest`` goes to no other place. Raises
    ``NotFoundError`` (no job, or none that can be asked), ``AccessError`` (the token's file cannot be read) and
    ``ConfigError``.
    """
    if address and job is None:
        if not token:
            hint = "Set TIDEGATE_TOKEN or give --token, or name the job's folder too: that of runs/latest is not sent."
            raise ConfigError("--address needs a token.", hint)
        return Access(address, _checked(token))
    folder = job or LATEST
    if not folder.is_dir():
        hint = "Name a job's folder, as runs/NAME-DATE-TIME-ID, or --address with TIDEGATE_TOKEN."
        raise NotFoundError(f"there is no folder {folder}.", hint)
    job_id = _job_id(folder)
    address = address or _read(folder, "grpc-address")
    return Access(address, _checked(token or _read(folder, "grpc-token")), job_id, folder)


@contextlib.asynccontextmanager
async def connected(access: Access, deadline_s: float = DEADLINE_S) -> AsyncIterator[SchedulerClient]:
    """A client for as long as it is needed. No answer is a ``NotFoundError`` that says what to do."""
    client = SchedulerClient(access.address, access.token, access.job_id, deadline_s)
    try:
        yield client
    except MachineError as error:
        raise access.unreachable(error.message) from error
    except AccessError as error:
        hint = "Was it taken from TIDEGATE_TOKEN, or is it another job's?"
        raise AccessError(f"{access.address} refused the token.", hint) from error
    finally:
        await client.close()


def _job_id(folder: Path) -> str:
    try:
        return str(json.loads((folder / "job.json").read_text(encoding="utf-8"))["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise NotFoundError(
            f"{folder} is not the folder of a job: it has no job.json that can be read.",
            "Name a job's folder, as runs/NAME-DATE-TIME-ID.",
        ) from None


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise NotFoundError(
            f"the job of {folder} cannot be asked yet: it has no {name}.",
            "It is written when the cells are being started; a job that failed before has none.",
        ) from None
    except OSError as error:
        raise AccessError(
            f"cannot read {folder / name}: {error.strerror}.",
            "Only the user who started the job may; ask for its token and set TIDEGATE_TOKEN.",
        ) from None


def _checked(token: str) -> str:
    """A token as it can stand in a header. The message never holds it."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError("the token is empty or has characters that no token has.", "Is TIDEGATE_TOKEN whole?")
    return token


def _status_of_summary(folder: Path) -> str:
    try:
        return str(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
