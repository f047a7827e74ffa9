# Sourced by quickstart.sh and test.sh from the repository root: `setup FILE` makes .venv, installs the requirement
# file with pip and puts .venv first in PATH. A stamp in .venv holds the hash of what is installed, so a second call
# takes a moment. First time: 1 to 10 minutes, most of it the download of torch.

setup() {
  local file=$1 candidate base="" hash stamp=.venv/decoderstack-installed
  if ! .venv/bin/python -c "import pip" 2>/dev/null; then
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
      if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
        base=$candidate
        break
      fi
    done
    if [[ -z $base ]]; then
      echo "error: Python 3.11 or newer is needed (numpy and matplotlib ask for it), and none of python3, python3.11" \
        "to python3.14 and python is that; install one and run this again" >&2
      return 1
    fi
    echo "setup: making .venv with $("$base" --version)"
    if ! "$base" -m venv .venv; then
      echo "error: .venv could not be made with $base; on Debian and Ubuntu install the package python3-venv. If" \
        ".venv was left by an older Python, remove it. Then run this again" >&2
      return 1
    fi
  fi
  hash=$(cat requirements.txt requirements-test.txt | .venv/bin/python -c \
    "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())")
  if ! grep -qxF "$hash $file" "$stamp" 2>/dev/null; then
    echo "setup: installing $file into .venv (the first time takes minutes)"
    if ! .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check -r "$file"; then
      echo "error: pip could not install $file, see above; run this again once that is mended" >&2
      return 1
    fi
    echo "$hash $file" >"$stamp"
    if [[ $file == requirements-test.txt ]]; then # it includes the other
      echo "$hash requirements.txt" >>"$stamp"
    fi
  fi
  export PATH="$PWD/.venv/bin:$PATH"
}
