"""What packages ask of others above them; the package root fills it in."""
