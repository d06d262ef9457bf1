"""The `tokenmesh` command, also as `python -m tokenmesh`."""

import signal
import sys

from tokenmesh import __version__


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:] == ["--version"]:  # without the imports of the commands
        print(f"tokenmesh {__version__}")  # noqa: T201
        return
    # Imports take a second: until they are done, Ctrl-C ends the process without a traceback.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tokenmesh.cli.service import is_plain, run_plain

    words = sys.argv[1:]
    # A service that `up` starts: the command line's libraries are 6 MB and 0.1 s of each process.
    if is_plain(words):
        signal.signal(signal.SIGINT, handler)
        sys.exit(run_plain(words))
    from tokenmesh.cli.main import main as command

    signal.signal(signal.SIGINT, handler)
    command()


if __name__ == "__main__":
    main()
