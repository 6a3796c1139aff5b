"""Tests of the attention operator and its API, against the installed wheel."""
