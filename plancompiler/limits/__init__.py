"""Limits that hold everywhere: how long each wait may take."""
