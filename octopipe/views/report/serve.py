"""The local page: a small server, using only the standard library, that tunes plans and shows them.

Knows: paths, headers and status codes. Does not know: searches (jobs.py) or the report (page.py).

By default it listens only on this machine. It then answers only requests whose Host header names this machine, so that
a foreign web page cannot reach it by DNS rebinding. Everybody who can reach the port can use it.
"""

from __future__ import annotations

import html
import ipaddress
import os
import re
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.asking import form_fields
from octopipe.costs.cluster.fields import Choice, GpuName, YesNo
from octopipe.costs.cluster.hardware import GPUS
from octopipe.costs.cluster.setup import DEFAULT_GPU
from octopipe.models.zoo import PRESETS
from octopipe.plans.file import plan_to_json
from octopipe.search.planner.splits import FIXABLE
from octopipe.search.systems import systems
from octopipe.views.report.cluster import STYLE, THEME, panel
from octopipe.views.report.jobs import Job, Jobs, Tune, parse_request
from octopipe.views.report.page import asset, embed, fill, script

MAX_BODY = 1 << 16
MAX_ANSWER = 64 << 20
"""The most bytes of a saved answer that is opened again; it contains the plan."""
ANSWER = "octopipe.cluster-answer/1"
Planner = Callable[[Mapping[str, Any], Callable[[], bool]], Mapping[str, Any]]
"""(the form's fields as names and strings; whether to stop) -> the record that `cluster.panel` draws."""
_JOB = re.compile(r"/api/jobs/(\d{1,9})/(events|data|cancel|plan\.json|report\.html)")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


class Server(ThreadingHTTPServer):
    """The HTTP server and its searches; `url` is the address to open in a browser."""

    daemon_threads = True

    def __init__(self, host: str, port: int, jobs: Jobs, planner: Planner | None = None):
        self.jobs, self.planner = jobs, planner
        self.planning = threading.Lock()
        self.closing = threading.Event()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise OctoPipeError(f"cannot listen on {host}:{port} ({why}); give another --port or --host") from None
        self.hosts = {host, "localhost", "127.0.0.1", "::1"} if _is_loopback(host) else None

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects during an answer, and report every other error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self.closing.set()
        self.jobs.close()
        super().server_close()


def make_server(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    files: Sequence[str] = (),
    tune: Tune | None = None,
    planner: Planner | None = None,
) -> Server:
    """Return a server that is bound but not yet serving; `files` (layer times or configs) are offered beside the
    presets.

    `planner` answers the form of the page /plan; without one there is no such page.
    """
    models = {name: name for name in PRESETS}
    for file in files:
        if not os.path.exists(file):
            raise OctoPipeError(f"{file}: no such file; check the path")
        models[f"{Path(file).stem} (file)"] = str(file)
    if tune is None:
        from octopipe.search.tuner import tune as search

        tune = search
    return Server(host, port, Jobs(models, tune), planner)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def page(models: Mapping[str, str]) -> str:
    """Return the page for tuning, with the form's choices in it."""
    names = list(models)
    choices = {
        "models": names,
        "model": next((n for n in names if n.endswith("(file)")), "nemotron-h-8b"),
        "setup": setup_inputs(),
        "systems": [{"name": s.name, "title": s.title} for s in systems().values()],
        "checked": ["1f1b"],
    }
    parts = {"style": asset("report.css"), "choices": embed(choices), "script": script("serve.js")}
    return fill(asset("serve.html"), parts)


def setup_inputs() -> list[dict[str, Any]]:
    """Return descriptions of the form's inputs for the set-up."""
    out = []
    for name, how in form_fields().items():
        choices: Sequence[str] = ()
        if isinstance(how.kind, GpuName):
            choices = list(GPUS)
        elif isinstance(how.kind, Choice):
            choices = how.kind.words
        elif isinstance(how.kind, YesNo):
            choices = ("yes", "no")
        chosen = DEFAULT_GPU if isinstance(how.kind, GpuName) else ""
        field = {"name": name, "label": how.words, "choices": list(choices) or None, "chosen": chosen}
        out.append({**field, "empty": how.unless_given, "first": how.on_page})
    return out


ASKED_FIRST = ("gpu", "seq", "precision")
"""Fields of the set-up that the template of the page for clusters already contains."""
SEARCHED = {"pp": "pipeline ranks", "vp": "stages per pipeline rank"}
"""Sizes of a split that are not keywords of a set-up."""
PLANNED_FOR = ("any", "megatron", "torchtitan", "torch", "deepspeed", "octopipe")


def plan_page(models: Mapping[str, str]) -> str:
    """Return the page that plans a cluster."""

    def options(names: Sequence[str], chosen: str) -> str:
        return "".join(f"<option{' selected' * (n == chosen)}>{html.escape(n)}</option>" for n in names)

    def inputs() -> str:
        """Return inputs for all other fields of a set-up, as `octopipe plan` has flags for them."""
        out = []
        for field in setup_inputs():
            if field["name"] in (*ASKED_FIRST, "p2p_ms", "speeds", "memory_gib"):
                continue
            name, words = html.escape(field["name"]), html.escape(field["label"])
            if field["choices"]:
                box = f'<select name="{name}"><option value=""></option>{options(field["choices"], "")}</select>'
            else:
                usual = "searched" if name in FIXABLE else field["empty"]
                box = f'<input name="{name}" placeholder="{html.escape(usual)}">'
            out.append(f'<label title="{words}">{name.replace("_", " ")} {box}</label>')
        for name, words in SEARCHED.items():
            out.append(f'<label title="{words}">{name} <input name="{name}" placeholder="searched"></label>')
        return "".join(out)

    precision = next(field["choices"] for field in setup_inputs() if field["name"] == "precision")
    parts = {
        "style": asset("report.css") + STYLE,
        "models": options(list(models), "llama3-70b"),
        "gpus": options(list(GPUS), "h100"),
        "precisions": options(precision, "bf16"),
        "runtimes": options(PLANNED_FOR, "any"),
        "more": inputs(),
        "theme": THEME,
        "compare": asset("compare.js"),
    }
    return fill(asset("plan.html"), parts)


def shown_answer(record: Mapping[str, Any], plan: str | None) -> dict[str, Any]:
    """Return an answer in the form the page needs: the panel, the plan file, and a file to share and open again.

    The file is text, because a browser that writes JSON itself changes numbers (0.0 becomes 0). The panel is drawn from
    that text, so that opening the file shows the same panel.
    """
    kept = msgspec.json.encode({"format": ANSWER, "record": record, "plan": plan})
    return {"html": panel(msgspec.json.decode(kept)["record"]), "plan": plan, "answer": kept.decode()}


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "octopipe"
    sys_version = ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: users watch the page, not the log."""

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def _answered(self, answer: Callable[[], None]) -> None:
        """Answer the request even if handling it fails with an internal error."""
        try:
            answer()
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            self.close_connection = True
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._problem(HTTPStatus.INTERNAL_SERVER_ERROR, f"{why}: an internal error of octopipe; please report it")

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if not self._welcome():
            return
        if path == "/":
            self._send(HTTPStatus.OK, page(self.server.jobs.models).encode(), "text/html; charset=utf-8")
            return
        if path == "/plan" and self.server.planner is not None:
            self._send(HTTPStatus.OK, plan_page(self.server.jobs.models).encode(), "text/html; charset=utf-8")
            return
        job, what = self._job(path)
        if job is None or what == "cancel":
            self._problem(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:80]}")
            return
        try:
            match what:
                case "events":
                    self._events(job)
                case "data":
                    self._send(HTTPStatus.OK, msgspec.json.encode(job.data()), "application/json")
                case "plan.json":
                    name = f"{job.costs.model}-pp{job.request.pp}.json"
                    self._send(HTTPStatus.OK, plan_to_json(job.saved_plan()), "application/json", name)
                case _:
                    name = f"{job.costs.model}-pp{job.request.pp}.html"
                    self._send(HTTPStatus.OK, job.report().encode(), "text/html; charset=utf-8", name)
        except OctoPipeError as error:
            self._problem(HTTPStatus.CONFLICT, str(error))

    def _post(self) -> None:
        path = self.path.partition("?")[0]
        body = self._body(MAX_ANSWER if path == "/api/answer" else MAX_BODY)
        if body is None or not self._welcome():
            return
        job, what = self._job(path)
        if path == "/api/jobs":
            try:
                started = self.server.jobs.start(parse_request(body))
            except OctoPipeError as error:
                self._problem(HTTPStatus.BAD_REQUEST, str(error))
                return
            self._json(HTTPStatus.CREATED, {"id": started.number})
        elif path == "/api/plan" and self.server.planner is not None:
            self._plan(body, self.server.planner)
        elif path == "/api/answer" and self.server.planner is not None:
            self._answer(body)
        elif job is not None and what == "cancel":
            job.cancel()
            self._json(HTTPStatus.OK, job.status())
        else:
            self._problem(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:80]}")

    def _plan(self, body: bytes, planner: Planner) -> None:
        """Plan a cluster and send the panel's HTML; only one search runs at a time."""
        if not self.server.planning.acquire(blocking=False):
            self._problem(HTTPStatus.CONFLICT, "another search is running; wait for its end")
            return
        try:
            asked = msgspec.json.decode(body, type=dict[str, str | int | float | None])
            if asked.get("model") not in self.server.jobs.models:
                raise OctoPipeError("no such model on this page; choose one of the list")
            asked["model"] = self.server.jobs.models[str(asked["model"])]
            record = dict(planner(asked, self._is_unwanted))
            plan = record.pop("plan", None)
            status, answer = HTTPStatus.OK, shown_answer(record, plan)
        except (OctoPipeError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        finally:
            self.server.planning.release()
        # Sent after the release, so that the client may start another search immediately.
        self._json(status, answer)

    def _answer(self, body: bytes) -> None:
        """Show an answer that was saved to a file before."""
        try:
            kept = msgspec.json.decode(body, type=dict[str, Any])
            if kept.get("format") != ANSWER or not isinstance(kept.get("record"), dict):
                raise OctoPipeError(
                    f'this file is not an answer that this page saved (its "format" is not {ANSWER}); plan again'
                )
            plan = kept.get("plan")
            self._json(HTTPStatus.OK, shown_answer(kept["record"], plan if isinstance(plan, str) else None))
        except (OctoPipeError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._problem(HTTPStatus.BAD_REQUEST, str(error))

    def _is_unwanted(self) -> bool:
        """Whether the answer is no longer needed, because the server is closing or the client has disconnected."""
        if self.server.closing.is_set():
            return True
        try:
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def _body(self, most: int) -> bytes | None:
        """Return the request's body; if it is missing, too long or not JSON, answer with an error and return None."""
        length = self.headers.get("Content-Length", "")
        # Not isdigit(): "²" is a digit but not a number.
        if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > most:
            self.close_connection = True
            self._problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send a body of at most {most} bytes")
            return None
        body = self.rfile.read(int(length))
        # Browsers let foreign pages post forms, but not JSON.
        if self.headers.get_content_type() != "application/json":
            self._problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON (Content-Type: application/json)")
            return None
        return body

    def _welcome(self) -> bool:
        host = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]")
        if self.server.hosts is None or host in self.server.hosts:
            return True
        self._problem(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
        return False

    def _job(self, path: str) -> tuple[Job | None, str]:
        match = _JOB.fullmatch(path)
        return (self.server.jobs.get(int(match[1])), match[2]) if match else (None, "")

    def _events(self, job: Job) -> None:
        """Send server-sent events until the search has ended; the last one says how it ended."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with job.watched():
            while True:
                with job.changed:
                    now = job.status()
                try:
                    self.wfile.write(b"data: " + msgspec.json.encode(now) + b"\n\n")
                    self.wfile.flush()
                except OSError:
                    return  # the client has disconnected
                if now["state"] != "running":
                    return
                with job.changed:
                    if job.state == "running":
                        job.changed.wait(timeout=1.0)

    def _json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, msgspec.json.encode(value), "application/json")

    def _problem(self, status: HTTPStatus, words: str) -> None:
        self._json(status, {"error": words})

    def _send(self, status: HTTPStatus, data: bytes, kind: str, download: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind.startswith("text/html") and not download:
            self.send_header("Content-Security-Policy", _POLICY)
        if download:
            safe = re.sub(r"[^\w.-]+", "-", download, flags=re.ASCII)
            self.send_header("Content-Disposition", f'attachment; filename="{safe}"')
        self.end_headers()
        self.wfile.write(data)
