#!/usr/bin/env python3
"""Make examples/tasks: file and shell tasks that one command solves, with partial credit for a part of the work.

usage: make_tasks.py [FOLDER] [--check]

The same seed gives the same folders; --check only tells whether FOLDER holds exactly them. Training and held-out tasks
come from the same kinds and share no file name.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SEED = 20
TRAIN_PER_KIND = 3
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "examples" / "tasks"

NAMES = """
animal bird boat book box bread bus car cat chair cheese city cloud coat coin color cow cup day desk dish dog door dress
drink farm fish flag flower food fruit game garden gift girl glass guest hat home horse island jar job key king lake
lamp leaf letter lunch map meal milk month moon mouse music night number ocean office paper park pen person phone
picture pilot place planet plant plate poem queen rain river road room school season shape ship shirt shoe snack snow
song sport star store street sun table teacher team ticket tool town toy train travel tree truck wall water weather
week wind window winner year
"""
WORDS = """
amber apple autumn banana blue bronze butter cherry chicken circle copper coral corn cotton dance dragon eagle earth
forest friday friend frost golden grape green happy honey iron ivory jungle lemon lion lucky maple march melon metal
monday mountain north olive orange panda peach pepper piano pink plum purple quiet red rose salmon sand silver simple
smile south spring square stone storm sugar summer sunny sweet tiger tomato tulip turtle velvet violet warm west white
winter wood yellow zebra
"""


@dataclass(frozen=True)
class Check:
    """A reward and the shell condition under which it is given; the first that holds counts."""

    reward: float
    condition: str
    meaning: str


@dataclass(frozen=True)
class Draft:
    """A task before it is written."""

    instruction: str
    solution: str
    checks: tuple[Check, ...]
    files: dict[str, str] = field(default_factory=dict)


def holds(path: str, text: str) -> str:
    """The condition that a file's content is exactly ``text``, but for line ends at its end."""
    return f'[ -f {path} ] && [ "$(cat {path})" = {text} ]'


def write_word(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}.txt"
    return Draft(
        f"Create a file named {path} that contains the word {word}.",
        f"echo {word} > {path}",
        (
            Check(1.0, holds(path, word), "the file holds the word"),
            Check(0.5, f"[ -f {path} ] && grep -qi {word} {path}", "the word and something else"),
            Check(0.2, f"[ -f {path} ]", "the file, without the word"),
        ),
    )


def write_two_words(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}.txt"
    return Draft(
        f"Write the words {word} {another} to the file {path}.",
        f"echo {word} {another} > {path}",
        (
            Check(1.0, holds(path, f"'{word} {another}'"), "both words, in order"),
            Check(0.5, f"[ -f {path} ] && grep -qi -e {word} -e {another} {path}", "one word, or both and more"),
            Check(0.2, f"[ -f {path} ]", "the file, without the words"),
        ),
    )


def make_directory(name: str, other: str, word: str, another: str) -> Draft:
    return Draft(
        f"Create a directory named {name}.",
        f"mkdir {name}",
        (
            Check(1.0, f"[ -d {name} ]", "the directory"),
            Check(0.2, f"[ -e {name} ] || ls -d {name}* */{name} >/dev/null 2>&1", "a file, or a similar name"),
        ),
    )


def file_in_directory(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}/{other}.txt"
    return Draft(
        f"Create a directory named {name} and an empty file named {other}.txt in it.",
        f"mkdir {name} && touch {path}",
        (
            Check(1.0, f"[ -f {path} ]", "the file in the directory"),
            Check(0.4, f"[ -d {name} ]", "only the directory"),
            Check(0.2, f"[ -f {other}.txt ]", "only the file, elsewhere"),
        ),
    )


def empty_file(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}.txt"
    return Draft(
        f"Create an empty file named {path}.",
        f"touch {path}",
        (
            Check(1.0, f"[ -f {path} ] && [ ! -s {path} ]", "the file, empty"),
            Check(0.3, f"[ -f {path} ]", "the file, not empty"),
        ),
    )


def append_line(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}.txt"
    return Draft(
        f"Add the line {word} to the end of the file {path}.",
        f"echo {word} >> {path}",
        (
            Check(1.0, holds(path, f"$'{another}\\n{word}'"), "the new line below the old one"),
            Check(0.5, f"grep -q {another} {path} && grep -q {word} {path}", "both lines, otherwise placed"),
            Check(0.2, f"grep -q {word} {path}", "the new line, but the old one is lost"),
        ),
        {path: f"{another}\n"},
    )


def copy_file(name: str, other: str, word: str, another: str) -> Draft:
    source, target = f"{name}.txt", f"{other}.txt"
    return Draft(
        f"Copy the file {source} to {target}.",
        f"cp {source} {target}",
        (
            Check(1.0, f"{holds(target, word)} && {holds(source, word)}", "both files"),
            Check(0.5, holds(target, word), "the new file, but the old one is lost"),
            Check(0.2, f"[ -e {target} ]", "the new file, with other content"),
        ),
        {source: f"{word}\n"},
    )


def rename_file(name: str, other: str, word: str, another: str) -> Draft:
    source, target = f"{name}.txt", f"{other}.txt"
    return Draft(
        f"Rename the file {source} to {target}.",
        f"mv {source} {target}",
        (
            Check(1.0, f"{holds(target, word)} && [ ! -e {source} ]", "only the new name"),
            Check(0.5, holds(target, word), "the new name beside the old one"),
            Check(0.2, f"[ -e {target} ] || [ ! -e {source} ]", "the new name with other content, or the old one gone"),
        ),
        {source: f"{word}\n"},
    )


def delete_file(name: str, other: str, word: str, another: str) -> Draft:
    path, kept = f"{name}.txt", f"{other}.txt"
    return Draft(
        f"Delete the file {path}.",
        f"rm {path}",
        (
            Check(1.0, f"[ ! -e {path} ] && {holds(kept, another)}", "this file and no other"),
            Check(0.3, f"[ ! -e {path} ]", "the other file too"),
        ),
        {path: f"{word}\n", kept: f"{another}\n"},
    )


def write_numbers(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}.txt"
    last = 3 + len(word) % 4
    lines = "\\n".join(str(number) for number in range(1, last + 1))
    return Draft(
        f"Write the numbers from 1 to {last} to the file {path}, one on each line.",
        f"seq 1 {last} > {path}",
        (
            Check(1.0, holds(path, f"$'{lines}'"), "the numbers, one on each line"),
            Check(0.5, f"[ -f {path} ] && grep -q 1 {path} && grep -q {last} {path}", "the numbers, otherwise placed"),
            Check(0.2, f"[ -f {path} ]", "the file, with other content"),
        ),
    )


def make_executable(name: str, other: str, word: str, another: str) -> Draft:
    path = f"{name}.sh"
    return Draft(
        f"Make the file {path} executable.",
        f"chmod +x {path}",
        (
            Check(1.0, f"[ -x {path} ] && grep -q {word} {path}", "executable, content kept"),
            Check(0.2, f"[ -x {path} ]", "executable, content lost"),
        ),
        {path: f"#!/bin/sh\necho {word}\n"},
    )


KINDS: dict[str, Callable[[str, str, str, str], Draft]] = {
    "write-word": write_word,
    "write-two-words": write_two_words,
    "make-directory": make_directory,
    "file-in-directory": file_in_directory,
    "empty-file": empty_file,
    "append-line": append_line,
    "copy-file": copy_file,
    "rename-file": rename_file,
    "delete-file": delete_file,
    "write-numbers": write_numbers,
    "make-executable": make_executable,
}
HELDOUT_KINDS = (
    "write-word",
    "write-two-words",
    "make-directory",
    "append-line",
    "copy-file",
    "rename-file",
    "delete-file",
    "make-executable",
)


def make_task_set() -> Iterator[tuple[str, str, Draft]]:
    """(set, task name, draft) of every task, in a fixed order."""
    rng = random.Random(SEED)
    names = sorted(NAMES.split())
    rng.shuffle(names)
    for kind, make in KINDS.items():
        for index in range(TRAIN_PER_KIND):
            word, another = rng.sample(WORDS.split(), 2)
            yield "train", f"{kind}-{index + 1}", make(names.pop(), names.pop(), word, another)
    for kind in HELDOUT_KINDS:
        word, another = rng.sample(WORDS.split(), 2)
        yield "heldout", f"{kind}-heldout", KINDS[kind](names.pop(), names.pop(), word, another)


def write_task(folder: Path, kind: str, draft: Draft) -> None:
    for part in ("tests", "solution", "environment"):
        (folder / part).mkdir(parents=True)
    (folder / "instruction.md").write_text(draft.instruction + "\n")
    (folder / "task.toml").write_text(
        f'version = "1.0"\n\n[metadata]\ncategory = "{kind}"\ndifficulty = "easy"\n\n[agent]\ntimeout_sec = 120.0\n\n'
        "[verifier]\ntimeout_sec = 20.0\n\n[environment]\nmemory_mb = 1024\n"
    )
    copy = "COPY files/ /app/\n" if draft.files else ""
    (folder / "environment" / "Dockerfile").write_text(f"FROM debian:12-slim\nWORKDIR /app\n{copy}")
    for name, text in draft.files.items():
        path = folder / "environment" / "files" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    script(folder / "solution" / "solve.sh", f"#!/bin/bash\n{draft.solution}\n")
    script(folder / "tests" / "test.sh", test_script(draft.checks))


def test_script(checks: tuple[Check, ...]) -> str:
    lines = ["#!/bin/bash", "# Writes the reward of what the agent left in the workspace.", 'cd "${APP_DIR:-/app}"']
    for index, check in enumerate(checks):
        lines.append(f"{'elif' if index else 'if'} {check.condition}; then")
        lines.append(f"    reward={check.reward:g} # {check.meaning}")
    lines += ["else", "    reward=0", "fi", 'echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"']
    return "\n".join(lines) + "\n"


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def write_all(folder: Path) -> int:
    """Replace the sets below ``folder``; the number of tasks written."""
    for name in ("train", "heldout"):
        shutil.rmtree(folder / name, ignore_errors=True)
    count = 0
    for name, task, draft in make_task_set():
        kind = task.removesuffix("-heldout").rstrip("0123456789").rstrip("-")
        write_task(folder / name / task, kind, draft)
        count += 1
    return count


def snapshot(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Content and executable bit of every file of both sets, by relative path."""
    paths = sorted(path for name in ("train", "heldout") for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in paths}


def is_fresh(folder: Path) -> bool:
    """Whether ``folder`` holds exactly what this script makes."""
    with tempfile.TemporaryDirectory() as scratch:
        write_all(Path(scratch))
        return snapshot(Path(scratch)) == snapshot(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the folder differs")
    options = parser.parse_args()
    if options.check:
        if not is_fresh(options.folder):
            sys.exit(f"{options.folder} is not what scripts/make_tasks.py makes. Run `make tasks`.")
        return
    print(f"{write_all(options.folder)} tasks in {options.folder}")


if __name__ == "__main__":
    main()
