"""Locked Python environments: made, checked against the lock, locked anew."""
