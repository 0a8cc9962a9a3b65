"""``python -m services.trajectory.store migrate FOLDER_OR_URL``: bring a store up to date that no job writes to."""

from __future__ import annotations

import sys

from services.common.errors import TidegateError
from services.trajectory.store.migrate import migrate_store
from services.trajectory.store.schema import SCHEMA_VERSION


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "migrate":
        print("usage: python -m services.trajectory.store migrate FOLDER_OR_URL", file=sys.stderr)
        return 2
    try:
        names = migrate_store(arguments[1])
    except TidegateError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name in names:
        print(f"{name} has the schema version {SCHEMA_VERSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
