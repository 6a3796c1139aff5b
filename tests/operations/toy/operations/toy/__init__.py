"""out = x * scale, clamped at 0 or not: an operation that is in no release."""
