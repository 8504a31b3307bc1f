# Sourced by scripts/test: installs this project beside the systems whose models it imports.
#
# The versions are those that come without CUDA packages on Python 3.11; other Pythons get no such
# build of PyTorch, so the tests skip there. What is installed stays until this file or pyproject.toml
# changes.

install_importers() {
    venv=.venv-importers
    local python stamp=$venv/importers
    if cmp -s <(cat pyproject.toml scripts/importers.sh) "$stamp"; then
        return
    fi
    python=$(find_python)
    if [ ! -x "$venv/bin/python" ] && command -v python3.11 >/dev/null; then
        python3.11 -m venv --clear "$venv"
    elif [ ! -x "$venv/bin/python" ]; then
        "$python" -m venv --clear "$venv"
    fi
    install_project test
    step "Install JAX, Flax and Optax"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        jax==0.10.2 flax==0.12.8 optax==0.2.8 flatbuffers
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        step "Install PyTorch, transformers and ONNX"
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
            torch==2.13.0 transformers==5.23.0 onnx onnxruntime onnxscript
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps \
            rapidocr-onnxruntime # only for the models that it holds
    else
        echo "PyTorch would bring CUDA on this Python; its tests skip." >&2
    fi
    cat pyproject.toml scripts/importers.sh >"$stamp"
}
