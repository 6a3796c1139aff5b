"""out = x * scale, clamped at 0 or not: the room of an operation that is in no release."""
