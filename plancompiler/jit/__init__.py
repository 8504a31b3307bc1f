"""`pc.compile`: eager functions traced once per layout and run as plans."""
