"""Mixture of experts for users: the layer as functions and as a module."""
