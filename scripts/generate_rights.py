"""Writes the users of NATS and Valkey for compose and the chart from `tokenmesh/shared/rights.py`.

With --check it changes nothing and fails where a file differs. Passwords are variables of the
environment of the servers: GATEWAY_PASSWORD and so on.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Final

from tokenmesh.shared.rights import SERVICE_USERS, nats_users, redis_users

ROOT: Final = Path(__file__).resolve().parent.parent
COMPOSE: Final = ROOT / "compose/compose.yaml"
NOTE: Final = "# Written by scripts/generate_rights.py; edit tokenmesh/shared/rights.py instead.\n"
_VALKEY: Final = re.compile(r"(<<END\n)(?:.*\n)*?( +)(protected-mode no\n)")
"""Between these lines of the compose file are the users."""


def files() -> dict[Path, str]:
    """Path -> what should be in it."""
    variables = {user: f"${user.upper()}_PASSWORD" for user in SERVICE_USERS}
    nats, valkey = nats_users(variables), redis_users(variables)
    chart = ROOT / "deploy/chart/files"
    return {
        ROOT / "compose/users.conf": NOTE + nats,
        COMPOSE: _with_users(COMPOSE.read_text(encoding="utf-8"), valkey),
        chart / "users.conf": NOTE + nats,
        chart / "valkey-users.acl": valkey,
    }


def _with_users(text: str, users: str) -> str:
    def lines(match: re.Match[str]) -> str:
        indent = match[2]
        escaped = users.replace("$", "$$").splitlines()
        return match[1] + "".join(f"{indent}{line}\n" for line in escaped) + indent + match[3]

    changed, count = _VALKEY.subn(lines, text)
    assert count == 1, "the compose file has no place for the users of Valkey"
    return changed


def main() -> int:
    """Parse the arguments and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    wrong = [
        path
        for path, text in files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in wrong:
        if check:
            print(f"{path.relative_to(ROOT)} is not what scripts/generate_rights.py writes")
        else:
            path.write_text(files()[path], encoding="utf-8")
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
