"""The plan, its text, its wire form and its verifier."""
