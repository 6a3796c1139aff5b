"""out = x * scale, optionally clamped at 0: an operation that is not in any release."""
