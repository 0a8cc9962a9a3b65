"""Rebuild ``services/pb`` from ``protos``. With ``--check``: fail if the committed code is not fresh."""

from __future__ import annotations

import argparse
import filecmp
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "services" / "pb"


def generate(target: Path) -> None:
    """Write messages, stubs and type hints of all protos flat into ``target``."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
        include = Path(grpc_tools.__file__).parent / "_proto"
        arguments = ["protoc", f"-I{PROTOS}", f"-I{include}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python")]
        arguments += [f"--{kind}_out=quiet:{scratch}" for kind in ("mypy", "mypy_grpc")]
        # protoc looks for plugins in PATH, where this interpreter's environment need not be
        scripts = sysconfig.get_path("scripts")
        arguments += [f"--plugin=protoc-gen-{kind}={scripts}/protoc-gen-{kind}" for kind in ("mypy", "mypy_grpc")]
        if protoc.main(arguments + sources) != 0:
            sys.exit("protoc failed; see its message above")
        target.mkdir(parents=True, exist_ok=True)
        (target / "__init__.py").write_text('"""Generated from protos/ by `make proto`. Do not edit."""\n')
        for path in sorted((Path(scratch) / "tidegate" / "v1").iterdir()):
            text = path.read_text()
            text = text.replace("from tidegate.v1 import", "from services.pb import")
            text = (
                text.replace("import tidegate.v1.", "import services.pb.").replace("tidegate.v1.", "services.pb.")
                if path.suffix == ".pyi"
                else text
            )
            (target / path.name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(TARGET)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {path.name for path in Path(scratch).iterdir()}
        committed = {path.name for path in TARGET.iterdir() if path.is_file()}
        _, mismatch, errors = filecmp.cmpfiles(scratch, TARGET, fresh & committed, shallow=False)
        stale = sorted((fresh ^ committed) | set(mismatch) | set(errors))
        if stale:
            sys.exit(f"services/pb is not fresh ({', '.join(stale)}): run `make proto` and commit the result")


if __name__ == "__main__":
    main()
