"""`python -m plancompiler` is the program `plancompiler`."""

from plancompiler.cli.main import main

if __name__ == "__main__":
    main()
