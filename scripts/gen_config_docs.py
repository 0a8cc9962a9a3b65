"""Rebuild ``docs/configuration.md`` from the configuration models. With ``--check``: fail if it is not fresh."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
import textwrap
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.common.config import sections_of
from services.job.config import JobConfig

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEADER = """\
# Configuration

A job is one YAML file; `tidegate train FILE key.sub=value ...` overrides keys. Unknown keys are refused. This page is
made from the code by `scripts/gen_config_docs.py`.
"""


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field, inherited ones included."""
    docs: dict[str, str] = {}
    for base in model.__bases__:
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs |= field_docs(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    for statement, following in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def default_text(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value!r}`" if value != "" else "empty"


def type_text(annotation: object) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(repr(value) for value in typing.get_args(annotation))
    text = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    return text.replace("typing.", "").replace("NoneType", "None").replace("|", "\\|")


def section(model: type[BaseModel], prefix: str) -> list[str]:
    """A model's own keys as a table, then its sections."""
    docs, rows, below = field_docs(model), [], []
    for name, field in model.model_fields.items():
        inner = sections_of(field.annotation)
        if len(inner) == 1:
            below += section(inner[0], f"{prefix}{name}.")
        elif inner:
            key = str(field.discriminator)
            for choice in inner:
                kind = typing.get_args(choice.model_fields[key].annotation)[0]
                below += section(choice, f"{prefix}{name}.")
                index = max(i for i, line in enumerate(below) if line.startswith(f"## `{prefix}{name}`"))
                below[index] = f"## `{prefix}{name}` with `{key}: {kind}`"
        else:
            cells = (f"`{name}`", type_text(field.annotation), default_text(field), docs.get(name, ""))
            rows.append("| " + " | ".join(cells) + " |")
    title = f"## `{prefix.rstrip('.')}`" if prefix else "## Top level"
    lines = ["", title, "", inspect.getdoc(model) or ""]
    if rows:
        lines += ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
    return lines + below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = HEADER + "\n".join(section(JobConfig, "")) + "\n"
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        sys.exit("docs/configuration.md is not fresh: run `make config-docs` and commit the result")


if __name__ == "__main__":
    main()
