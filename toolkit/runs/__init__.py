"""Captures done safely in a child process, and kept as records."""
