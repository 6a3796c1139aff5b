"""Locked Python environments: created, checked against the lock, and the lock rewritten."""
