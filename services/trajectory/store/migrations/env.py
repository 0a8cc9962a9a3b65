"""Run by alembic: migrates the store on the connection that ``services.trajectory.store.migrate`` gives it."""

from __future__ import annotations

from alembic import context

from services.trajectory.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
