"""Text out of tokens: an incremental detokenizer and a stop-string matcher. No I/O."""

from tokenmesh.shared.text.detokenizer import Detokenizer, make_detokenizer
from tokenmesh.shared.text.stops import Scan, StopMatcher, StopStrings
from tokenmesh.shared.text.vocabulary import Vocabulary

__all__ = [
    "Detokenizer",
    "Scan",
    "StopMatcher",
    "StopStrings",
    "Vocabulary",
    "make_detokenizer",
]
