"""Writes the users of NATS and Valkey for compose and the chart from `tokenmesh/shared/rights.py`.

With --check it changes nothing and fails where a file differs. Passwords are variables of the
environment of the servers: GATEWAY_PASSWORD and so on.
"""

import re
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not the checkout installed

from scripts.generated_files import ROOT, write_or_check
from tokenmesh.shared.rights import SERVICE_USERS, nats_users, redis_users

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


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, files()))
