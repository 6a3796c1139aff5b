"""Attention: the public functions and the operators behind them."""
