"""The same job through `pc.run`, as a program of a user's own: `session.py STEPS`."""

import sys

from regression import build

import plancompiler as pc


def main() -> int:
    """Train, and say how it went."""
    try:
        with pc.run(build(2), 2, backend="processes") as session:
            for step, outputs in enumerate(session.run(int(sys.argv[1]))):
                if step == 0:
                    print(f"step 1/ loss {outputs['loss']}", flush=True)
            print(f"done {outputs['loss']}", flush=True)
    except pc.PlanCompilerError as error:
        print(f"plancompiler: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
