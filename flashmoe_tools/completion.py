"""``flashmoe completion SHELL``: what a shell needs to complete commands and options.

flashmoe completion bash > ~/.local/share/bash-completion/completions/flashmoe
flashmoe completion zsh > "${fpath[1]}/_flashmoe"
"""

from __future__ import annotations

import argparse
from importlib import import_module, util

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    import shtab

    command = import_module("flashmoe.__main__")
    # The commands of a checkout are named everywhere; their options are known in a checkout alone.
    known = {name for name, (module, _) in command.COMMANDS.items() if util.find_spec(module.partition(".")[0])}
    print(shtab.complete(command.make_parser(known), args.shell))
    return 0
