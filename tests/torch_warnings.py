"""Warnings of torch and transformers about themselves, which no test here is about: marks for files whose tests compile, or run whole models."""

import pytest

ignore = pytest.mark.filterwarnings
COMPILED = [
    ignore("ignore::DeprecationWarning"),
    ignore("ignore::FutureWarning"),
    ignore("ignore:.*TensorFloat32:UserWarning"),
]
WHOLE_MODELS = [ignore("ignore::DeprecationWarning"), ignore("ignore::FutureWarning"), ignore("ignore::UserWarning")]
