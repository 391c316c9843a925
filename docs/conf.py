"""How Sphinx builds the documentation site from these pages (`make docs`; the result is in `out/site`).

Knows: the extensions, and how pages and notebooks that live outside `docs/` become pages of the site. Does not know:
any content; that is in the Markdown pages, the docstrings and the notebooks under `examples/`.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import octopipe  # noqa: E402

project = "OctoPipe"
author = copyright = "The OctoPipe developers"
release = version = octopipe.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# Pages link to source files and folders of the repository, which are not pages of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

# The notebooks are executed when the site is built, so that what a reader sees is what this version prints.
nb_execution_mode = "auto"
nb_execution_timeout = 300
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}

default_role = "code"  # docstrings write `name`, as Markdown does
html_theme = "furo"
maximum_signature_line_length = 100
html_title = f"OctoPipe {release}"


def command_line_page() -> str:
    """Every verb with its flags, as `octopipe VERB --help` prints them."""
    import importlib
    import os

    from octopipe.cli import EXIT_CODES, MODULES, VERBS, parser_of

    os.environ["COLUMNS"] = "100"
    parts = ["# Command line\n", "Every verb prints its flags with `--help`; `octopipe --help` lists the verbs.\n"]
    for verb in VERBS:
        module = importlib.import_module(f"octopipe.cli.verbs.{MODULES.get(verb, verb)}")
        parts.append(f"## {verb}\n\n```text\n{parser_of(verb, module).format_help().rstrip()}\n```\n")
    parts.append("## Exit codes\n\n| code | meaning |\n|--:|:--|")
    parts += [f"| {code} | {text} |" for code, text in EXIT_CODES.items()]
    return "\n".join(parts) + "\n"


(HERE / "command-line.md").write_text(command_line_page())


def page_of(source: Path) -> str:
    """Return a page of the repository's root as one of the site: its links start at the root, the site's in `docs/`."""
    return re.sub(r"(?<=\]\()docs/", "", source.read_text())


# Sphinx reads only what is below this folder. The pages of the root are copied into it, and so are the notebooks, which
# live with the other examples.
for name in ("README", "CONTRIBUTING", "CHANGELOG"):
    (HERE / f"{name.lower()}.md").write_text(page_of(ROOT / f"{name}.md"))
for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
    target = HERE / "notebooks" / notebook.name
    target.parent.mkdir(exist_ok=True)
    if not target.exists() or target.read_bytes() != notebook.read_bytes():
        shutil.copyfile(notebook, target)


def _code_blocks(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Docstrings show code as an indented block, as Markdown does; Sphinx wants it announced."""
    for k in range(len(lines) - 1, 0, -1):
        indented, before = lines[k].startswith("    "), lines[k - 1]
        if indented and not before and k >= 2 and not lines[k - 2].startswith(("    ", "- ", ".. ", ":")):
            lines[k:k] = [".. code-block:: python", ""]


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", _code_blocks)  # type: ignore[attr-defined]
