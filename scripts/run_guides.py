"""Run every block of README, guides and documentation pages as a newcomer would, and print a table.

    python scripts/run_guides.py                           a fresh clone, an environment made as README says, all pages
    python scripts/run_guides.py --env /path/to/venv       in an environment that has octopipe and torch already
    python scripts/run_guides.py docs/guides/profiles.md   some pages

Knows: how blocks stand in Markdown, and the directives that pages carry in comments that no reader sees. Does not know:
what any command means. Every page gets an empty folder, every command its own time limit, and the caches are empty.

A directive is an HTML comment `<!-- block: ... -->`. Before a block it says how that block is run; those marked (alone)
stand by themselves. Without one, `sh` and `console` blocks run line by line, `python` blocks as a script, and blocks of
other languages are pictures of text.

    install              the lines that make the environment; run first, in one shell, in the checkout
    skip, REASON         not run, and why
    file NAME            written to NAME: what later commands of the page read
    in checkout          run in the checkout, not in the page's folder
    interrupt SECONDS    runs until Ctrl-C, which comes after so many seconds
    within N             lines of a reader's script: the comment's own lines go around them, in the place of its line
                         `...` (or before them), and N ranks run it under torchrun
    given (alone)        the comment's lines, a Python script, make what the reader has; or `given FILE of PAGE`: the
                         block of that page that begins with `# FILE`
    check (alone)        the comment's lines, shell commands, try what the text around them says
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ".venv"
"""The folder of the environment that README's first block makes."""

_PART = re.compile(r"^<!-- block: (?P<directive>.*?)-->\n|^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$", re.S | re.M)
_BEFORE = ("install", "skip", "file", "in", "interrupt", "within")
_ALONE = ("given", "check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block, or a directive that stands alone, with what is to be done with it."""

    page: str
    line: int
    language: str
    code: str
    directive: str = ""
    argument: str = ""
    body: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one command."""

    place: str
    command: str
    result: str
    seconds: float = 0.0
    output: str = ""

    @property
    def failed(self) -> bool:
        return not self.result.startswith(("ran", "skipped", "written"))


def pages(root: Path = ROOT) -> list[str]:
    """All pages that may hold commands, README first."""
    found = [
        root / "README.md",
        *sorted((root / "docs" / "guides").glob("*.md")),
        *sorted((root / "docs").glob("*.md")),
    ]
    return [str(path.relative_to(root)) for path in found]


def blocks(page: str, root: Path = ROOT) -> list[Block]:
    """The page's blocks in their order. A directive that is unknown, or that no block follows, is an error."""
    text = (root / page).read_text()
    out: list[Block] = []
    pending: tuple[str, str, str] | None = None
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["directive"] is None:
            directive, argument, body = pending or ("", "", "")
            pending = None
            out.append(
                Block(
                    page=page,
                    line=line,
                    language=part["language"],
                    code=part["code"],
                    directive=directive,
                    argument=argument,
                    body=body,
                )
            )
            continue
        if pending:
            raise ValueError(f"{page}:{line}: no block stands between this directive and the one before")
        first, _, body = part["directive"].partition("\n")
        word, _, argument = first.strip().replace(",", " ", 1).partition(" ")
        if word in _ALONE:
            language = "python" if word == "given" else "sh"
            out.append(
                Block(page=page, line=line, language=language, code=body, directive=word, argument=argument.strip())
            )
        elif word in _BEFORE and (argument.strip() or word == "install"):
            pending = (word, argument.strip(), body)
        else:
            raise ValueError(f"{page}:{line}: {first.strip()!r} is not a directive; scripts/run_guides.py lists them")
    if pending:
        raise ValueError(f"{page}: no block follows the directive {pending[0]!r}")
    return out


def commands(block: Block) -> list[str]:
    """The shell commands of a block, one each, prompts removed and continued lines joined."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.strip() and not line.lstrip().startswith("#")]


def script_of(block: Block) -> str:
    """The Python script of a block, with the lines that its directive puts around it."""
    if block.directive != "within":
        return block.code
    before, mark, after = block.body.partition("...\n")
    if not mark:
        return block.body + block.code
    indent = before.rpartition("\n")[2]
    inside = "".join(indent + line if line.strip() else line for line in block.code.splitlines(keepends=True))
    return before.removesuffix(indent) + inside + after


class Runner:
    """Runs the blocks of pages in one environment."""

    def __init__(self, checkout: Path, environment: Path, work: Path, limit: float) -> None:
        self.checkout, self.environment, self.work, self.limit = checkout, environment, work, limit
        home = work / "home"
        home.mkdir(parents=True, exist_ok=True)
        kept = {
            key: os.environ[key] for key in ("LANG", "TMPDIR", "PIP_CONFIG_FILE", "PIP_CACHE_DIR") if key in os.environ
        }
        self.variables = {
            **kept,
            "PATH": f"{environment}/bin:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(environment),
            "HOME": str(home),  # empty: no cache of an earlier run
            "OCTOPIPE_CHECKOUT": str(checkout),
            "COLUMNS": "100",
        }

    def page(self, page: str) -> Iterator[Outcome]:
        folder = self.work / page.replace("/", "-").removesuffix(".md")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, block in enumerate(blocks(page, self.checkout)):
            yield from self._block(block, number, folder)

    def _block(self, block: Block, number: int, folder: Path) -> Iterator[Outcome]:
        place = f"{block.page}:{block.line}"
        title = next(iter(block.code.strip().splitlines()), "")
        if block.directive == "skip":
            yield Outcome(place=place, command=title, result=f"skipped: {block.argument}")
            return
        if block.directive == "install":
            yield Outcome(place=place, command=title, result="skipped: the environment is there")
            return
        if block.directive == "file":
            (folder / block.argument).write_text(block.code)
            yield Outcome(place=place, command=title, result=f"written to {block.argument}")
            return
        where = self.checkout if block.directive == "in" else folder
        if block.language in ("sh", "console"):
            interrupt = float(block.argument) if block.directive == "interrupt" else None
            for command in commands(block):
                yield self._run(place, command, ["bash", "-c", command], where, interrupt)
        elif block.language == "python":
            if block.directive == "given" and block.argument:
                name, _, page = block.argument.partition(" of ")
                block = next(b for b in blocks(page, self.checkout) if b.code.startswith(f"# {name}\n"))
                title = f"# {name} of {page}"
            path = folder / f"block-{number}.py"
            path.write_text(script_of(block))
            ranks = int(block.argument) if block.directive == "within" else 1
            words = ["python", path.name]
            if ranks > 1:
                words = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), path.name]
            yield self._run(place, title, words, folder, None)
        else:
            yield Outcome(place=place, command=title, result="skipped: not a command")

    def _run(self, place: str, command: str, words: list[str], where: Path, interrupt: float | None) -> Outcome:
        begin = time.perf_counter()
        with subprocess.Popen(
            words,
            cwd=where,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            # A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as process:
            try:
                output, _ = process.communicate(timeout=interrupt or self.limit)
                result = "ran" if process.returncode == 0 else f"exit {process.returncode}"
                if interrupt and process.returncode == 0:
                    result = "exit 0 before it was stopped"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT if interrupt else signal.SIGTERM)
                try:
                    output, _ = process.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    output, _ = process.communicate()
                stopped = interrupt is not None and process.returncode in (0, 130)
                result = "ran until Ctrl-C" if stopped else f"still running after {interrupt or self.limit:g} s"
        if result == "ran" and "Traceback (most recent call last)" in output:
            result = "printed a traceback"
        return Outcome(place=place, command=command, result=result, seconds=time.perf_counter() - begin, output=output)


def install(checkout: Path, runner: Runner) -> Iterator[Outcome]:
    """README's lines that install, in one shell: they depend on each other."""
    first = next(b for b in blocks("README.md", checkout) if b.directive == "install")
    script = "set -e\n" + first.code
    yield runner._run(f"README.md:{first.line}", "the lines that install", ["bash", "-c", script], checkout, None)


def table(outcomes: list[Outcome]) -> str:
    lines = ["| where | command | result | s |", "|---|---|---|---:|"]
    for o in outcomes:
        command = o.command if len(o.command) <= 90 else o.command[:87] + "..."
        lines.append(f"| {o.place} | `{command.replace('|', chr(92) + '|')}` | {o.result} | {o.seconds:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="pages to run (default: all)")
    parser.add_argument(
        "--env", type=Path, help="an environment with octopipe and torch (default: made as README says)"
    )
    parser.add_argument("--work", type=Path, help="folder to work in (default: a temporary one)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one command (default: 900)")
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="octopipe-guides-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    checkout = work / "checkout"
    if not checkout.exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    environment = (arguments.env or checkout / ENVIRONMENT).absolute()
    runner = Runner(checkout, environment, work, arguments.limit)
    outcomes: list[Outcome] = []

    def keep(found: Iterator[Outcome]) -> None:
        for outcome in found:
            outcomes.append(outcome)
            print(f"{outcome.place}  {outcome.result}  ({outcome.seconds:.1f} s)  {outcome.command}", flush=True)
            if outcome.failed:
                print("    " + "\n    ".join(outcome.output.strip().splitlines()[-30:]), flush=True)

    if not (environment / "bin" / "python").exists():
        keep(install(checkout, runner))
    for page in arguments.pages or pages(checkout):
        keep(runner.page(page))
    failed = [o for o in outcomes if o.failed]
    print("\n" + table(outcomes))
    ran = sum(o.result.startswith("ran") for o in outcomes)
    left = len(outcomes) - ran - len(failed)
    print(f"\n{ran} ran, {len(failed)} failed, {left} not run; folder: {shlex.quote(str(work))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
