"""Engines: what starts the ranks of a program, on this host or elsewhere."""
