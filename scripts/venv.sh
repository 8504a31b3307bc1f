# Sourced by the scripts: makes an environment if there is none and installs this project into it.
#
#     install_project EXTRA     EXTRA is empty or names extras, such as `test` or `test,jit`
#
# The environment is the folder $venv, by default .venv. An installation is repeated only when
# pyproject.toml differs from the copy that the last one left in that folder. The last line of a
# failed step says what went wrong; the caller stops there (set -e).

venv=.venv

step() { printf '\n== %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or newer with the venv module was found; install one or set PYTHON." >&2
    return 1
}

install_project() {
    local extra=$1 stamp python
    if ! "$venv"/bin/python -m pip --version >/dev/null 2>&1; then
        step "Make $venv"
        python=$(find_python)
        "$python" -m venv --clear "$venv"
    fi
    stamp=$venv/installed${extra:+-$extra}.toml
    if ! cmp -s pyproject.toml "$stamp"; then
        step "Install plancompiler${extra:+ with the $extra extra}"
        "$venv"/bin/python -m pip install -qq --disable-pip-version-check -e ".${extra:+[$extra]}"
        cp pyproject.toml "$stamp"
        cp pyproject.toml "$venv/installed.toml"
    fi
    # Where Python may not write bytecode by itself, each program would compile everything anew.
    "$venv"/bin/python -m compileall -q plancompiler executor master worker >/dev/null || true
}
