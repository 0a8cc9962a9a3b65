"""Servers of a test's own: PostgreSQL and an S3 that lives in this process. Both listen on nothing but this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tests.waiting import wait_until

_ACCOUNT = "postgres"


@functools.cache
def _postgres_folder() -> Path:
    """The programs of the newest PostgreSQL here."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise RuntimeError("PostgreSQL is not installed; `make debian` (or apt-get install postgresql) installs it")
    return found[-1].parent if found else Path(str(on_path)).parent


class PostgresServer:
    """A private server on a socket in a folder of its own, with ``fsync`` on."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-postgres-"))
        is_root = os.geteuid() == 0  # the server refuses to run as root
        self._account = {"user": _ACCOUNT, "group": _ACCOUNT, "extra_groups": []} if is_root else {}
        if is_root:
            shutil.chown(self.folder, _ACCOUNT, _ACCOUNT)
        self._run("initdb", "--no-sync", "--auth=trust", f"--username={_ACCOUNT}", "-D", str(self.folder / "data"))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        settings = [f"unix_socket_directories={self.folder}", "listen_addresses=", "fsync=on", "max_connections=40"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    _postgres_folder() / "postgres",
                    "-D",
                    self.folder / "data",
                    *(part for one in settings for part in ("-c", one)),
                ],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                **self._account,  # type: ignore[arg-type]
            )
        wait_until(self._answers, 30, lambda: (self.folder / "log").read_text())

    def stop(self, stop_signal: signal.Signals = signal.SIGINT) -> None:
        """End the server; ``SIGINT`` is its fast shutdown, ``SIGQUIT`` a crash."""
        if self.process is not None:
            self.process.send_signal(stop_signal)
            self.process.wait(30)
            self.process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{_ACCOUNT}@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"t{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str) -> None:
        """Run a statement as the server's owner."""
        with self._engine().connect() as connection:
            connection.exec_driver_sql(statement)

    def _engine(self) -> sa.Engine:
        url = sa.make_url(self.url()).set(drivername="postgresql+psycopg")
        return sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            self.execute("SELECT 1")
        except sa.exc.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [_postgres_folder() / program, *arguments],
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
            **self._account,  # type: ignore[call-overload]
        )


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 with one bucket."""

    port: int
    bucket: str = "runs"

    @property
    def url(self) -> str:
        """Root for objects, as ``trajectory.store.blob_url``."""
        server = f"region=us-east-1&endpoint_override=127.0.0.1:{self.port}&scheme=http&allow_bucket_creation=true"
        return f"s3://{self.bucket}/calls?{server}"


@contextlib.contextmanager
def s3_server(port: int = 0) -> Iterator[S3Server]:
    """Run an S3 in a thread; its credentials are in the environment meanwhile."""
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        found = S3Server(server.get_host_and_port()[1])
        filesystem = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{found.port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        )
        filesystem.create_dir(found.bucket)
        yield found
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
