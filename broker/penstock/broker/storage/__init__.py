"""Partition logs on disk."""
