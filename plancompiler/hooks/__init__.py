"""Functions of higher packages that lower packages call; the package root sets them."""
