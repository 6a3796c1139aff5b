"""Mixture of experts: the operators against a layer composed of torch's own."""
