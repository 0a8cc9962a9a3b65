"""Servers that tests share, each started with the first test that needs it; and how hypothesis is run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.services import PostgresServer, S3Server, s3_server

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair, not a fault
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL. Tests take databases or jobs of their own."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3. Tests take jobs of their own."""
    with s3_server() as server:
        yield server
