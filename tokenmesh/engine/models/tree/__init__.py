"""The general kind: transformers' own module tree on the step's tokens, with our memory under it.

Only this package and tests import transformers in a worker, and only when such a model is loaded.
"""

from tokenmesh.shared.lean_import import import_model_classes

# before a module here names a class of transformers
import_model_classes()
