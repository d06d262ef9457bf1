"""transformers brings torch along wherever it is installed: 180 MB and two seconds for nothing."""

import logging
import sys


def forbid_torch() -> None:
    """Before transformers is imported: None in sys.modules makes an import of torch fail."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )
