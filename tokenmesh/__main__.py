"""`python -m tokenmesh` is the `tokenmesh` command."""

from tokenmesh.cli.main import main

if __name__ == "__main__":
    main()
