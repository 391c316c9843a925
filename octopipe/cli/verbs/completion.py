"""`octopipe completion bash|zsh|fish`: prints a script that completes verbs, flags, models and systems in a shell.

Knows: the three shells, and that everything completed is taken from the verbs' own parsers. Does not know: any flag.

    source <(octopipe completion bash)                                  # in ~/.bashrc
    source <(octopipe completion zsh)                                   # in ~/.zshrc
    octopipe completion fish > ~/.config/fish/completions/octopipe.fish
"""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")
EPILOG = """activate it:
  bash   echo 'source <(octopipe completion bash)' >> ~/.bashrc
  zsh    echo 'source <(octopipe completion zsh)' >> ~/.zshrc
  fish   octopipe completion fish > ~/.config/fish/completions/octopipe.fish"""


class Flag(NamedTuple):
    """One spelling of a flag, the values it may have (if they are a fixed set), and whether it takes one."""

    name: str
    values: tuple[str, ...]
    takes_value: bool
    help: str


class Verb(NamedTuple):
    """A verb's flags, and the words that its positional argument accepts besides files."""

    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    write = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell]
    print(write(described()), end="")
    return 0


def described() -> dict[str, Verb]:
    """Return all verbs as their own parsers describe them."""
    from octopipe.cli import MODULES, VERBS, parser_of
    from octopipe.models.zoo import names
    from octopipe.search.systems.registry import systems

    models, policies = tuple(names()), tuple(systems())
    out = {}
    for verb in VERBS:
        parser = parser_of(verb, importlib.import_module(f"octopipe.cli.verbs.{MODULES.get(verb, verb)}"))
        flags: list[Flag] = []
        words: tuple[str, ...] = ()
        for action in parser._actions:
            if not action.option_strings:
                words = models if action.dest == "model" else tuple(map(str, action.choices or ()))
                continue
            values = tuple(map(str, action.choices or ()))
            if action.dest in ("system", "systems"):
                values = policies
            elif action.dest == "model":
                values = models
            help_ = " ".join((action.help or "").split())
            flags += [Flag(name, values, action.nargs != 0, help_) for name in action.option_strings]
        out[verb] = Verb(tuple(flags), words)
    return out


def bash(verbs: dict[str, Verb]) -> str:
    lines = [
        "# octopipe: completion for bash",
        "_octopipe() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" verb="${COMP_WORDS[1]}"',
        '  local words="" files=1',
        "  COMPREPLY=()",
        "  if [ \"$COMP_CWORD\" -eq 1 ]; then",
        f'    COMPREPLY=( $(compgen -W "{" ".join(verbs)} --help --version" -- "$word") )',
        "    return",
        "  fi",
        '  case "$verb $before" in',
    ]  # fmt: skip
    for name, verb in verbs.items():
        for flag in verb.flags:
            if flag.values:
                lines.append(f'    "{name} {flag.name}") words="{" ".join(flag.values)}"; files=0 ;;')
    lines += ["  esac", '  if [ -z "$words" ]; then', '    case "$verb" in']
    for name, verb in verbs.items():
        flags = " ".join(flag.name for flag in verb.flags)
        lines.append(f'      {name}) if [[ "$word" == -* ]]; then words="{flags}"; files=0;')
        lines.append(f'        else words="{" ".join(verb.words)}"; fi ;;')
    lines += [
        "    esac",
        "  fi",
        '  COMPREPLY=( $(compgen -W "$words" -- "$word") )',
        '  if [ "$files" -eq 1 ]; then COMPREPLY+=( $(compgen -f -- "$word") ); fi',
        "}",
        "complete -o filenames -F _octopipe octopipe",
    ]
    return "\n".join(lines) + "\n"


def zsh(verbs: dict[str, Verb]) -> str:
    """Return the bash script with a header that makes zsh emulate bash's completion."""
    start = "# octopipe: completion for zsh\nautoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
    return start + bash(verbs).split("\n", 1)[1]


def fish(verbs: dict[str, Verb]) -> str:
    from octopipe.cli import VERBS

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# octopipe: completion for fish"]
    for name, verb in verbs.items():
        lines.append(f"complete -c octopipe -f -n __fish_use_subcommand -a {name} -d {quoted(VERBS[name])}")
        here = f"-n '__fish_seen_subcommand_from {name}'"
        if verb.words:
            lines.append(f"complete -c octopipe {here} -a {quoted(' '.join(verb.words))}")
        for flag in verb.flags:
            kind = f"-l {flag.name[2:]}" if flag.name.startswith("--") else f"-s {flag.name[1:]}"
            value = f" -x -a {quoted(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
            lines.append(f"complete -c octopipe {here} {kind}{value} -d {quoted(flag.help[:60])}")
    return "\n".join(lines) + "\n"
