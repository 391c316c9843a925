"""Mutation: one operator or constant is flipped at a time, and the nearest tests must notice.

    make mutate                                    60 flips over all modules, in some minutes
    python scripts/mutate.py --sample 20 --modules plan timeline --seed 3
    python scripts/mutate.py --flips plan:210 bounds:88:14      every flip of a line, or the one at a column

The package and its tests are copied to a folder of their own, one flip is made there, and the tests of the module run
until one fails, in a fork of this process: libraries are loaded once. A flip that survives is printed with its line;
flips that change no behaviour (another hash constant, a bound that cannot be reached) survive rightly and are named in
`EQUIVALENT` with the reason. Text of error messages is not flipped. The exit code is 1 if less than `--least` of the
flips that are not equivalent were noticed.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  # what tests import is loaded before the first fork
import numpy  # noqa: F401
import pytest
import torch
import torch.distributed.tensor
import torch.utils.checkpoint

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("octopipe", "tests", "scripts", "benchmarks", "examples", "docs", "pyproject.toml", "README.md", "Makefile")
PRICES = ("tests/costs/test_costs_golden.py", "tests/costs/test_analytic.py")
STAGES = (
    "tests/runtime/test_stage.py",
    "tests/runtime/test_stage_again.py",
    "tests/runtime/test_rerun.py",
    "tests/runtime/test_wgrad.py",
    "tests/runtime/test_stage_values.py",
)
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "plan": ("octopipe/plans/plan.py", ("tests/plans/test_plan_rules.py", "tests/plans/test_plan.py")),
    "plan_rules": ("octopipe/plans/rules.py", ("tests/plans/test_plan_rules.py", "tests/plans/test_plan.py")),
    "lowering": (
        "octopipe/simulation/lowering.py",
        ("tests/simulation/test_lower_by_hand.py", "tests/simulation/test_lower.py"),
    ),
    "blocking": ("octopipe/simulation/blocking.py", ("tests/simulation/test_lower_by_hand.py",)),
    "price": ("octopipe/plans/price.py", ("tests/plans/test_price.py",)),
    "simulator": ("octopipe/simulation/simulator.py", ("tests/simulation/test_simulate_by_hand.py",)),
    "timeline": ("octopipe/simulation/timeline.py", ("tests/simulation/test_timeline.py",)),
    "bounds": ("octopipe/simulation/bounds/bounds.py", ("tests/simulation/test_bounds_by_hand.py",)),
    "analytic": ("octopipe/costs/analytic/table.py", PRICES),
    "flops": ("octopipe/costs/analytic/flops.py", PRICES),
    "layer_pricing": ("octopipe/costs/analytic/layer_pricing.py", PRICES),
    "traffic": ("octopipe/costs/analytic/traffic.py", PRICES),
    "footprint": ("octopipe/costs/analytic/footprint.py", PRICES),
    "stage": ("octopipe/runtime/stages/stage.py", STAGES),
    "run": ("octopipe/runtime/stages/run.py", STAGES),
    "graph": ("octopipe/runtime/stages/graph.py", STAGES),
    "slots": ("octopipe/runtime/slots.py", ("tests/runtime/test_slots.py",)),
    "wgrad_ops": (
        "octopipe/runtime/stages/wgrad_ops.py",
        ("tests/runtime/test_wgrad_ops.py", "tests/runtime/test_wgrad.py"),
    ),
}
"""Name: the file, and the tests nearest to it, the quickest to notice first."""
EQUIVALENT: dict[tuple[str, str], str] = {
    ("plan", "@dataclass(frozen=True, slots=True, kw_only=True)"): "how records are made, not what they hold",
    ("bounds", "best = 0.0"): "the first round sets it",
    ("bounds", "first = int(kind_of[0]) if even else -1"): "any negative number says that it is not known",
    (
        "bounds",
        "kinds, kind_of, counts = np.unique(np.round(work, 9), return_inverse=True, return_counts=True)",
    ): "sums that differ by rounding alone are one kind, to nine digits or ten",
    ("plan", "_table: OpTable | None = field(default=None, init=False, repr=False, compare=False)"): "repr is our own",
    (
        "plan",
        "_preds: NDArray[np.int32] | None = field(default=None, init=False, repr=False, compare=False)",
    ): "repr is our own",
    ("bounds", "_MAX_STATES = 60_000"): "a budget: one more or less",
    ("bounds", "_MAX_DEALS = 40_000_000"): "a budget: one more or less",
    ("bounds", "low, high = high, high * 1.04"): "how fast the interval grows that the search halves",
    ("bounds", "while high - low > 1e-5 * high:"): "the search stops a little sooner or later; its bound holds",
    ("wgrad_ops", "if len(layout[0] if layout else param.shape) == 2:"): "a view has as many strides as sizes",
    ("wgrad_ops", "and param.ndim == len(layout[0])"): "a view has as many strides as sizes",
    (
        "wgrad_ops",
        "gb = _rows(g).sum(0) if len(ctx.bias_shape) == 1 else g.sum_to_size(ctx.bias_shape)",
    ): "the same sum of the same numbers",
    ("stage", "seed_all(mix(seed, -1))"): "another number that no layer has",
    ("graph", "_run_on_host(roots, gradients, False, False, (), True, True)"): "nothing is unreachable without inputs",
    (
        "graph",
        "_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)",
    ): "nothing is unreachable without inputs",
    (
        "run",
        "rng = None if start is None or self._seed is not None else rng_state()",
    ): "a state more is kept; what is repeated draws by its seed",
    ("blocking", "running[r] = -1"): "any negative number is no op",
    (
        "lowering",
        "crossing = (data >= 0) & (t.rank[np.maximum(data, 0)] != t.rank[:, None])",
    ): "op 0 is a forward: op 1 is on the same rank",
    ("blocking", "running = np.full(ranks, -1, np.int32)"): "any negative number is no op",
    (
        "blocking",
        "active = running[k] >= 0 or head[k] < offsets[k + 1] or count[k] > 0",
    ): "op 0 is a forward: its rank has more to run",
    (
        "blocking",
        "if waiting[peer] or (running[peer] < 0 and head[peer] == offsets[peer + 1] and clock[peer] <= now):",
    ): "op 0 is a forward: its rank has more to run",
    ("flops", "collectives: float = 0.0"): "every kind of layer says how many it has",
    ("simulator", "recomputes = t.index[R][cell] >= 0"): "op 0 is a forward, never a recomputation",
    (
        "slots",
        "cell = Cell(s, m, at == 0, at == len(route) - 1, bool(again[s, m] >= 0), before=previous)",
    ): "op 0 is a forward, never a recomputation",
    (
        "slots",
        'clocks = np.zeros((t.rank.size + 1, plan.num_ranks), np.int32)  # the last row stays zero: "no predecessor"',
    ): "one more row that stays zero",
    ("slots", "number: int = -1"): "only ops are asked for it, and theirs is set",
    ("slots", "@dataclass(slots=True, eq=False)"): "how records are made, not what they hold",
    ("slots", "@dataclass(frozen=True, slots=True, kw_only=True)"): "how records are made, not what they hold",
    ("lowering", "@dataclass(frozen=True, slots=True, kw_only=True, eq=False)"): "how records are made",
    ("timeline", "@dataclass(frozen=True, kw_only=True, eq=False)"): "how records are made, not what they hold",
    ("flops", "@dataclass(frozen=True, slots=True, kw_only=True)"): "how records are made, not what they hold",
    ("layer_pricing", "@dataclass(frozen=True, slots=True, kw_only=True)"): "how records are made, not what they hold",
    ("analytic", "if setup.dp > 1 and total > 0:"): "without gradients both branches add nothing",
}
"""Module and stripped line: why no flip of it changes a result."""
FLIPS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One place of a module with another text."""

    module: str
    line: int
    """From 1."""
    column: int
    """From 0, in characters."""
    old: str
    new: str

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        row = lines[self.line - 1]
        assert row[self.column :].startswith(self.old), (self, row)
        lines[self.line - 1] = f"{row[: self.column]}{self.new}{row[self.column + len(self.old) :]}"
        return "".join(lines)


class _Finder(ast.NodeVisitor):
    """Every flip of a module."""

    def __init__(self, module: str, text: str):
        self.module, self.found = module, list[Flip]()
        self._lines = text.splitlines()

    def _column(self, line: int, offset: int) -> int:
        return len(self._lines[line - 1].encode()[:offset].decode())

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """The operator's text stands after the one operand and before the other, on one line or the next."""
        if type(operator) not in FLIPS:
            return
        old, new = FLIPS[type(operator)]
        line, at = left.end_lineno or 0, self._column(left.end_lineno or 0, left.end_col_offset or 0)
        while line <= right.lineno:
            end = self._column(line, right.col_offset) if line == right.lineno else len(self._lines[line - 1])
            place = self._lines[line - 1].find(old, at, end)
            if place >= 0:
                self.found.append(Flip(module=self.module, line=line, column=place, old=old, new=new))
                return
            line, at = line + 1, 0

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:]):
            self._between(left, right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self._between(left, right, operator)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) in (int, float, bool) and node.lineno == node.end_lineno:
            column = self._column(node.lineno, node.col_offset)
            old = self._lines[node.lineno - 1][column : self._column(node.lineno, node.end_col_offset or 0)]
            new = str(not node.value) if isinstance(node.value, bool) else f"({old} + 1)"
            self.found.append(Flip(module=self.module, line=node.lineno, column=column, old=old, new=new))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in NAMES and node.func.lineno == node.func.end_lineno:
            column = self._column(node.func.lineno, node.func.end_col_offset or 0) - len(name)
            self.found.append(Flip(module=self.module, line=node.func.lineno, column=column, old=name, new=NAMES[name]))
        self.generic_visit(node)

    # What is no behaviour, or only words.
    def visit_Raise(self, node: ast.Raise) -> None:
        return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        return

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None), *node.body):
            self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets):
            self.generic_visit(node)


def flips(module: str, root: Path = ROOT) -> list[Flip]:
    """All flips of a module, in the order of the text, none twice."""
    text = (root / MODULES[module][0]).read_text()
    finder = _Finder(module, text)
    finder.visit(ast.parse(text))
    return sorted(set(finder.found), key=lambda f: (f.line, f.column))


def _run_tests(home: Path, tests: list[str], told: int) -> None:
    """In a fork: the tests on the copy; never returns."""
    code = 3
    try:
        os.setsid()
        os.dup2(told, 1)
        os.dup2(told, 2)
        os.chdir(home)
        os.environ |= {"PYTHONPATH": str(home), "HOME": str(home)}
        sys.path[:] = [str(home), *(p for p in sys.path if Path(p).resolve() != ROOT)]
        sys.dont_write_bytecode = True
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def noticed(flip: Flip | None, module: str, home: Path, limit_s: float) -> tuple[str, float]:
    """ "killed", "timeout" or "survived", and how long that took; without a flip whether the tests pass as they are."""
    file, tests = MODULES[module]
    original = (ROOT / file).read_text()
    (home / file).write_text(original if flip is None else flip.applied(original))
    began = time.monotonic()
    with tempfile.TemporaryFile() as told:
        sys.stdout.flush()
        process = os.fork()  # the libraries are loaded once, the package in every fork
        if process == 0:
            _run_tests(home, [t for t in tests if (home / t).exists()], told.fileno())
        ended, status = 0, 0
        while not ended and time.monotonic() - began < limit_s:
            time.sleep(0.02)
            ended, status = os.waitpid(process, os.WNOHANG)
        result = "timeout" if not ended else "survived" if status == 0 else "killed"
        with contextlib.suppress(ProcessLookupError):  # ranks that its tests have started, too
            os.killpg(process, signal.SIGKILL)
        if not ended:
            os.waitpid(process, 0)
        (home / file).write_text(original)
        if flip is None and result != "survived":
            told.seek(0)
            print(told.read().decode(errors="replace")[-3000:], file=sys.stderr)
    return result, time.monotonic() - began


def chosen(args: argparse.Namespace) -> Iterator[Flip]:
    if args.flips:
        for word in args.flips:
            module, line, *column = word.split(":")
            for flip in flips(module):
                if flip.line == int(line) and (not column or flip.column == int(column[0])):
                    yield flip
        return
    rng = random.Random(args.seed)
    every = [flip for module in args.modules for flip in flips(module)]
    yield from sorted(rng.sample(every, min(args.sample, len(every))), key=lambda f: (f.module, f.line, f.column))


def main() -> int:
    parser = argparse.ArgumentParser(description="Flip one operator at a time; the nearest tests must notice.")
    parser.add_argument("--modules", nargs="+", choices=sorted(MODULES), default=list(MODULES))
    parser.add_argument("--sample", type=int, default=60, help="flips in all (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", nargs="+", metavar="MODULE:LINE[:COLUMN]", help="these, instead of a sample")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one flip's tests (default: 600)")
    parser.add_argument("--least", type=float, default=0.9, help="share that must be noticed (default: 0.9)")
    parser.add_argument("--list", action="store_true", help="print the flips and stop")
    args = parser.parse_args()
    picked = list(chosen(args))
    if args.list:
        for flip in picked:
            print(f"{flip.module}:{flip.line}:{flip.column}  {flip.old} -> {flip.new}")
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="octopipe-mutate-") as name:
        home = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, home / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, home / part)
        compileall.compile_dir(home / "octopipe", quiet=1)
        for module in MODULES:  # a flip of the same length within the same second must not meet the old byte code
            file = home / MODULES[module][0]
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        for module in dict.fromkeys(flip.module for flip in picked):  # compiles kernels, and shows that tests pass
            result, took = noticed(None, module, home, 10 * args.limit_s)
            print(f"{module}: its tests {'pass' if result == 'survived' else 'fail'} in {took:.0f} s", flush=True)
            if result != "survived":
                return 2
        counts = {"killed": 0, "timeout": 0, "survived": 0, "equivalent": 0}
        for number, flip in enumerate(picked, 1):
            result, took = noticed(flip, flip.module, home, args.limit_s)
            row = (ROOT / MODULES[flip.module][0]).read_text().splitlines()[flip.line - 1].strip()
            if result == "survived" and (flip.module, row) in EQUIVALENT:
                result = "equivalent"
            counts[result] += 1
            print(
                f"{number}/{len(picked)} {result:10} {flip.module}:{flip.line}:{flip.column} "
                f"{flip.old} -> {flip.new}  {took:.0f} s    {row}",
                flush=True,
            )
    seen = counts["killed"] + counts["timeout"]
    share = seen / max(1, seen + counts["survived"])
    print(f"{seen} of {seen + counts['survived']} noticed ({share:.0%}), {counts['equivalent']} change nothing")
    return int(share < args.least)


if __name__ == "__main__":
    sys.exit(main())
