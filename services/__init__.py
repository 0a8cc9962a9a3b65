"""Tidegate: online reinforcement learning of LLM agents on one elastic pool of accelerators."""

__version__ = "0.1.0"
