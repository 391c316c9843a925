"""Searches that run behind the local page: one at a time, with progress, cancellation and downloads.

Knows: how a request becomes a search, and what can be done with it while it runs. Does not know: HTTP (serve.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from octopipe.base.errors import DoesNotFitError, NotApplicableError, OctoPipeError, StoppedError
from octopipe.costs.cluster.asking import keyword_fields
from octopipe.costs.cluster.fields import of_text
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.setting import carried
from octopipe.search.systems import build_plan, get_system
from octopipe.simulation.simulator import simulate
from octopipe.views.report.entry import Entry
from octopipe.views.report.page import report_data, report_html

MAX_RANKS, MAX_MICRO_BATCHES, MAX_BUDGET_S, KEPT = 128, 1024, 3600.0, 20
STOP_S = 2.0
"""Seconds that a stopped search may take to return its best plan; afterwards the best plan it reported last is used."""
ABANDONED_S = 15.0
"""A search whose page was closed this long ago gives way to the next one; reloading a page does not take so long."""
Tune = Callable[..., Any]


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of the form other than the set-up."""

    model: str
    pp: int
    micro_batches: int
    budget_s: float = 10.0
    systems: list[str] = []

    def check(self, models: Mapping[str, str]) -> None:
        if self.model not in models:
            raise OctoPipeError(f"unknown model {self.model[:60]!r}; pick one from the list")
        for name, value, most in (
            ("pipeline ranks", self.pp, MAX_RANKS),
            ("micro-batches", self.micro_batches, MAX_MICRO_BATCHES),
        ):
            if not 1 <= value <= most:
                raise OctoPipeError(f"{name}: {value}; give a whole number from 1 to {most}")
        if not 0 < self.budget_s <= MAX_BUDGET_S:
            raise OctoPipeError(f"seconds to search: {self.budget_s:g}; give a number up to {MAX_BUDGET_S:g}")

    def setup(self) -> dict[str, Any]:
        """Return the keywords of `resolve_costs` that were filled in, parsed, since a form's inputs are text."""
        out = {}
        for name, how in keyword_fields().items():
            value = getattr(self, name)
            if isinstance(value, str):
                value = of_text(name, how, value)
            if value is not None:
                out[name] = value
        return out


Request = msgspec.defstruct(
    "Request",
    [(name, object, None) for name in keyword_fields()],  # every field checks its own value
    bases=(Asked,),
    kw_only=True,
    forbid_unknown_fields=True,
)
"""All fields of the form: `Asked` with every keyword of the set-up."""


def parse_request(data: bytes) -> Asked:
    """Return the request in the form's JSON; raise OctoPipeError with one line that says what is wrong with it."""
    try:
        found: Any = msgspec.json.decode(data, type=Request)
        return cast(Asked, found)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        words = " ".join(str(error).split()).replace("`", "").replace(" - at $.", ": ")
        raise OctoPipeError(f"the form is not valid ({words[:160]})") from None


class Job:
    """One search: the plans it is compared with, the best plan so far, how it ended."""

    def __init__(self, number: int, request: Asked, model: str, tune: Tune):
        self.number, self.request = number, request
        setup = request.setup()
        self.costs: CostTable = resolve_costs(model, pp=request.pp, micro_batches=request.micro_batches, **setup)
        self.titles = {name: get_system(name).title for name in request.systems}
        self.notes: list[str] = []
        """Systems that do not apply to this request, each with its reason."""
        self.compared: list[Entry] = []
        self.state, self.error = "running", ""
        self.seconds, self.iterations, self.phase = 0.0, 0, ""
        self.best_ms: float | None = None
        self.lower_bound_ms: float | None = None
        self.plan: Plan | None = None
        self.version = 0
        """Increases whenever there is more to draw."""
        self.changed = threading.Condition()
        self._stop = False
        self._watchers, self._unwatched_since = 0, math.inf
        self._tune = tune
        self._setting = {"model": model, **setup}
        self._drawn: tuple[int, Any] | None = None

    def _compare(self) -> None:
        """Build the systems' plans one by one, since some of them run a solver and take a while."""
        for name, title in self.titles.items():
            if self._stop:
                return
            with self.changed:
                self.phase = title
                self.changed.notify_all()
            try:
                plan = build_plan(name, self.costs, self.request.pp, self.request.micro_batches)
            except (NotApplicableError, DoesNotFitError) as error:
                self.notes.append(f"{error}.")
                continue
            entry = Entry(timeline=simulate(plan, self.costs), plan=plan, costs=self.costs, label=title)
            with self.changed:
                self.compared.append(entry)
                self.version += 1
                self.changed.notify_all()

    def run(self) -> None:
        """Run the search; to be called on a thread of its own."""
        r = self.request
        try:
            self._compare()
            result = self._tune(self.costs, r.pp, r.micro_batches, budget_s=r.budget_s, progress=self._progress)
            with self.changed:
                if self.state != "running":  # it was stopped, and responded too late
                    return
                self.plan, self.best_ms = result.plan, float(result.step_ms)
                self.lower_bound_ms, self.seconds = float(result.lower_bound_ms), float(result.seconds)
                self.iterations = max(self.iterations, int(result.iterations))
                self.state = "stopped" if self._stop else "done"
        except StoppedError as error:
            self._end("stopped", str(error))
        except OctoPipeError as error:
            self._end("failed", str(error))
        except Exception as error:  # an internal error: show it on the page and keep the server running
            self._end("failed", f"the search failed: {type(error).__name__}: {error}"[:300])
        with self.changed:
            self.version += self.plan is not None
            self.changed.notify_all()

    def _end(self, state: str, words: str = "") -> None:
        """Record how the search ended; only the first call counts."""
        with self.changed:
            if self.state == "running":
                self.state, self.error = state, words
            self.changed.notify_all()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which the job counts as watched."""
        with self.changed:
            self._watchers += 1
        try:
            yield
        finally:
            with self.changed:
                self._watchers -= 1
                self._unwatched_since = time.monotonic()

    def is_abandoned(self) -> bool:
        """Whether the job was watched before, but not for the last `ABANDONED_S` seconds."""
        return self._watchers == 0 and time.monotonic() - self._unwatched_since > ABANDONED_S

    def _progress(self, seen: Any) -> bool:
        with self.changed:
            if self.state != "running":
                return True
            # Convert to Python numbers: a search may report numpy numbers, which JSON cannot encode.
            self.seconds, self.iterations, self.phase = float(seen.seconds), int(seen.iterations), str(seen.phase)
            self.best_ms = float(seen.best_ms) if math.isfinite(seen.best_ms) else None
            self.lower_bound_ms = float(seen.lower_bound_ms)
            plan = getattr(seen, "plan", None)
            if plan is not None and plan is not self.plan:
                self.plan = plan
                self.version += 1
            self.changed.notify_all()
        return self._stop

    def cancel(self) -> None:
        """Ask the search to stop. If it does not within `STOP_S` seconds, it counts as stopped anyway."""
        self._stop = True
        if self.state == "running":
            timer = threading.Timer(STOP_S, self._end, ["stopped"])
            timer.daemon = True
            timer.start()

    def wait(self, seconds: float) -> None:
        """Wait until the search has ended, but at most this many seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.state != "running", timeout=seconds)

    def status(self) -> dict[str, Any]:
        """Return the data of the page's progress panel."""
        return {
            "state": self.state,
            "error": self.error,
            "seconds": self.seconds,
            "budget_s": self.request.budget_s,
            "iterations": self.iterations,
            "phase": self.phase,
            "best_ms": self.best_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "version": self.version,
            "notes": list(self.notes),
        }

    def entries(self) -> list[Entry]:
        """Return the systems' plans, then the best plan so far."""
        out = list(self.compared)
        plan = self.plan
        if plan is not None:
            out.append(Entry(timeline=simulate(plan, self.costs), plan=plan, costs=self.costs, label="OctoPipe"))
        return out

    def data(self) -> dict[str, Any]:
        """Return the report's data, computed again only if there is more to draw."""
        version = self.version
        if self._drawn is None or self._drawn[0] != version:
            head, columns = report_data(self.entries())
            self._drawn = (version, {"head": head, "columns": columns})
        return self._drawn[1]

    def report(self) -> str:
        return report_html(self.entries())

    def saved_plan(self) -> Plan:
        """Return the best plan with the setting from which its costs can be computed again."""
        if self.plan is None:
            raise OctoPipeError("there is no plan yet; wait for the first one")
        return self.plan.with_extra(**carried(self.costs, self._setting))


class Jobs:
    """All searches of a server; at most one runs at a time."""

    def __init__(self, models: Mapping[str, str], tune: Tune):
        self.models = models
        """The names that the form offers, and what each resolves to (a preset's name or a file)."""
        self._tune = tune
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._count = 0

    def start(self, request: Asked) -> Job:
        request.check(self.models)
        with self._lock:
            running = [job for job in self._jobs.values() if job.state == "running"]
            for job in [job for job in running if job.is_abandoned()]:
                job.cancel()
                job.wait(2 * STOP_S)
            if any(job.state == "running" for job in running):
                raise OctoPipeError("a search is running; stop it first")
            job = Job(self._count + 1, request, self.models[request.model], self._tune)
            self._count += 1
            self._jobs[job.number] = job
            for old in sorted(self._jobs)[:-KEPT]:
                del self._jobs[old]
        threading.Thread(target=job.run, name=f"tune-{job.number}", daemon=True).start()
        return job

    def get(self, number: int) -> Job | None:
        return self._jobs.get(number)

    def close(self) -> None:
        """Stop all searches."""
        for job in self._jobs.values():
            with contextlib.suppress(Exception):
                job.cancel()
