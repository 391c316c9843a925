"""`octopipe serve`: a local page to tune a model and look at the plans.

Knows: its flags. Does not know: the server (report/serve.py).
"""

from __future__ import annotations

import argparse

from octopipe.verbs.common import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="layer-times or config.json files to offer too")
    parser.add_argument("--port", type=_port, default=8765, help="default: 8765; 0 picks a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: this machine only; anyone who reaches another one can use it)",
    )


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from octopipe.report.serve import make_server

    out = console(stderr=True)
    with make_server(args.host, args.port, files=args.files) as server:
        out.print(f"OctoPipe is at {server.url} (stop it with Ctrl-C)", soft_wrap=True)
        if server.hosts is None:
            out.print("Listening beyond this machine: whoever can reach it can start searches.", style="yellow")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            out.print("stopped")
    return 0
