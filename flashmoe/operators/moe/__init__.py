"""Mixture of experts: the operators, and what is said about them in Python.

arguments   the rules for the arguments, and why a call failed
layer       the whole layer, forward and backward
scaled      the layer with e4m3 weights, forward alone, and what computes it where there is no kernel
routing     choosing experts, sorting by expert
grouped     products of groups of rows with one matrix each
"""

from __future__ import annotations

from flashmoe.operators.moe import grouped, layer, routing, scaled

OPERATORS = (*layer.OPERATORS, *scaled.OPERATORS, *routing.OPERATORS, *grouped.OPERATORS)
