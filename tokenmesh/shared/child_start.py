"""Runs a module in a process that ends with its parent: `child_start PARENT MODULE ARGUMENTS`.

Without it a child of a killed process would notice that only after its imports, which take the
processor from whoever does the work instead.
"""

import runpy
import sys

from tokenmesh.shared.parent_death import die_with


def main() -> None:
    """Ends as the module does."""
    _, parent, module, *arguments = sys.argv
    die_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
