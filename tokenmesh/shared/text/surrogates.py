r"""Halves of surrogate pairs: JSON can spell one (`"\ud800"`), and no encoding can write it."""

import json
import re
from typing import Final

_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def spells_half_of_a_pair(text: str, value: object) -> bool:
    """Return whether JSON holds half of a surrogate pair; `value` is its parsed `text`."""
    if _ESCAPE.search(text) is None:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
