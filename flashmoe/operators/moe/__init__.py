"""Mixture of experts: the operators, and what is said about them in Python.

arguments   the rules for the arguments, and why a call failed
layer       the whole layer, forward and backward
routing     choosing experts, sorting by expert
grouped     products of groups of rows with one matrix each
"""

from __future__ import annotations

from flashmoe.operators.moe import grouped, layer, routing

OPERATORS = (*layer.OPERATORS, *routing.OPERATORS, *grouped.OPERATORS)
