"""Options that programs have in common."""

import argparse
from pathlib import Path


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option of every program that measures."""
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of programs that ask a server which runs already."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of programs that start a mesh of processes of their own."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    add_out(parser)
