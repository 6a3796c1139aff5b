"""What torch and transformers say about torch itself, which no test here asks about: marks of files whose tests compile, or run whole models."""

import pytest

ignore = pytest.mark.filterwarnings
COMPILED = [
    ignore("ignore::DeprecationWarning"),
    ignore("ignore::FutureWarning"),
    ignore("ignore:.*TensorFloat32:UserWarning"),
]
WHOLE_MODELS = [ignore("ignore::DeprecationWarning"), ignore("ignore::FutureWarning"), ignore("ignore::UserWarning")]
