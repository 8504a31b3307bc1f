"""Asks a master for its status, and says how long that took: `ask_status.py HOST:PORT
TOKEN_FILE`."""

import sys
import time

import plancompiler as pc


def main() -> int:
    """Ask once."""
    begin = time.monotonic()
    try:
        with pc.Client(sys.argv[1], token_file=sys.argv[2]) as client:
            begin = time.monotonic()
            client.status()
    except pc.PlanCompilerError as error:
        print(f"plancompiler: {error}", file=sys.stderr)
        return error.exit_code
    print(f"seconds {time.monotonic() - begin:.3f}")
    return 0


sys.exit(main())
