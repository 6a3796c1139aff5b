"""Mixture of experts: the operators compared with a layer composed of torch operators."""
