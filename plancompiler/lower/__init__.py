"""From a slice to a plan, and the four modes."""
