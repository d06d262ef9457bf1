"""Where in the client's body the prompt is that an error speaks of, when there are several."""

import copy

from tokenmesh.shared.errors import InvalidInput


def located(error: InvalidInput, where: str) -> InvalidInput:
    """The same error; `where` is such as `messages[3]`, and empty where there is one prompt.

    What was found in `messages[0]` of that prompt alone is in `messages[3][0]` of the body.
    """
    if not where:
        return error
    root = where.partition("[")[0]
    found = copy.copy(error)
    if error.param == root:
        found.param = where
    elif error.param is not None:
        found.param = error.param.replace(f"{root}[", f"{where}[", 1)
    deeper = error.message.replace(f"{root}[", f"{where}[")
    found.message = deeper if deeper != error.message else f"{where}: {error.message}"
    return found
