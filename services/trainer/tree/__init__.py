"""Exact training over a forest of token segments: shared prefixes and contexts of any length."""
