"""``flashmoe completion SHELL``: prints the script that a shell needs to complete commands and options.

flashmoe completion bash > ~/.local/share/bash-completion/completions/flashmoe
flashmoe completion zsh > "${fpath[1]}/_flashmoe"
"""

import argparse
from importlib import import_module

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    import shtab

    command = import_module("flashmoe.__main__")
    print(shtab.complete(command.make_parser(command.all_commands()), args.shell))
    return 0
