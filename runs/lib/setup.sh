# Sourced from the repository root by the other scripts. `setup FILE` creates .venv, installs the requirement file with
# pip and puts .venv first in PATH. A stamp in .venv holds the hash of what is installed, so later calls take a moment.
# The first call takes 1 to 10 minutes, most of it the download of torch.
#
# On Linux without an NVIDIA GPU, torch comes from PyTorch's own index for CPUs (0.2 GB; with the CUDA packages of the
# default index it is about 3 GB). If that index does not answer, pip uses the default index.
# TORCH_CPU_INDEX=URL names another index for the CPU build; TORCH_CPU_INDEX= (empty) always uses the default one, for
# example on a login node whose jobs run on GPUs.

setup() {
  local file=$1 stamp=.venv/decoderstack-installed bin hash
  if ! venv_bin >/dev/null; then
    create_venv || return 1
  fi
  bin=$(venv_bin)
  hash=$(cat requirements*.txt | cksum)
  if ! grep -qxF "$hash $file" "$stamp" 2>/dev/null; then
    install_cpu_torch "$bin"
    echo "setup: installing $file into .venv (the first time takes minutes)"
    if ! "$bin/python" -m pip install --quiet --no-input --disable-pip-version-check -r "$file"; then
      echo "error: pip could not install $file (see above); fix that, then run this again" >&2
      return 1
    fi
    while [[ -f $file ]]; do # a line for the file, and for each that it includes
      echo "$hash $file"
      file=$(sed -n 's/^-r //p' "$file")
    done >"$stamp"
  fi
  if compgen -G "$SITE_PACKAGES/torch-*+cpu.dist-info" >/dev/null && has_nvidia_gpu; then
    echo "setup: this machine has an NVIDIA GPU, but .venv holds the CPU build of torch; to use the GPU, remove .venv" \
      "and run this again"
  fi
  export PATH="$PWD/$bin:$PATH"
}

SITE_PACKAGES=".venv/lib/python3*/site-packages" # a pattern, for compgen

# The folder of .venv that holds a python with pip. Python for Windows calls it Scripts.
venv_bin() {
  local bin
  for bin in .venv/bin .venv/Scripts; do
    if "$bin/python" -c "import pip" 2>/dev/null; then
      echo "$bin"
      return
    fi
  done
  return 1
}

# Creates .venv with the first Python in PATH that is new enough.
create_venv() {
  local candidate base=""
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
      base=$candidate
      break
    fi
  done
  if [[ -z $base ]]; then
    echo "error: this requires Python 3.11 or newer, but python3, python3.11 to python3.14 and python are all missing" \
      "or older; install one and run this again" >&2
    return 1
  fi
  echo "setup: creating .venv with $("$base" --version)"
  if ! "$base" -m venv .venv || ! venv_bin >/dev/null; then
    echo "error: $base could not create .venv; on Debian and Ubuntu, install the package python3-venv; if .venv is" \
      "left from an older Python, remove it; then run this again" >&2
    return 1
  fi
}

has_nvidia_gpu() {
  [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]
}

# Installs the CPU build of the pinned torch where that is what this machine needs. It fails without harm: pip then
# installs torch with everything else, from the default index.
install_cpu_torch() {
  local python=$1/python index=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu} version versions
  version=$(sed -n 's/^torch==//p' requirements*.txt)
  if compgen -G "$SITE_PACKAGES/torch-$version*.dist-info" >/dev/null; then
    return 0 # some build of it is there already
  fi
  if [[ $(uname -s) != Linux || -z $index ]] || has_nvidia_gpu; then
    echo "setup: torch comes from the default package index"
    return 0
  fi

  # Ask for the list of versions first, as an install would retry for minutes. The limit of 20 s is for hosts with
  # several addresses. +cpu in the version keeps pip from taking a CUDA build from another configured index.
  versions=$(timeout 20 "$python" -m pip index versions torch --index-url "$index" --timeout 5 --retries 0 \
    2>/dev/null) || versions=""
  if [[ $versions == *"$version+cpu"* ]]; then
    echo "setup: no NVIDIA GPU found; installing the CPU build of torch from $index"
    if "$python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps --index-url "$index" \
      "torch==$version+cpu"; then
      return 0
    fi
  fi
  echo "setup: no NVIDIA GPU found, but the CPU build of torch $version could not be had from $index (is it reachable" \
    "from here?); torch comes from the default package index instead, about 3 GB with CUDA packages"
}
