# Makes the virtual environment that the other scripts use; sourced, not run.
#   VENV      where it lies (default: .venv in the checkout)
#   PYTHON    the interpreter to make it with (default: the first of python3.11, python3.12, python3 that fits)
# It installs only when pyproject.toml has changed since the last time.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

say() { printf '%s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "No Python 3.11 or 3.12 with the venv module was found."
  say "On Debian or Ubuntu: apt-get install python3 python3-venv. Or name one: PYTHON=/path/to/python3.11 $0"
  exit 2
}

# install EXTRA: the project, editable, with one of its extras
install() {
  local extra=$1 wanted stamp
  exec 9>"$VENV.lock"
  flock 9 # one at a time
  wanted=$(sha256sum "$ROOT/pyproject.toml" | cut -d' ' -f1)
  for stamp in "$VENV/.installed-$extra" "$VENV/.installed-dev"; do # dev holds all the others
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
      exec 9>&-
      return
    fi
  done
  if [ -e "$VENV/.installing" ]; then
    if [ "$VENV" != "$ROOT/.venv" ]; then
      say "The last installation into $VENV was cut short, which pip does not mend. Remove that folder, and run this again."
      exit 2
    fi
    say "The last installation was cut short, which pip does not mend: $VENV is made anew"
    rm -rf "$VENV"
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    local python
    python=$(find_python)
    say "Making a virtual environment in $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
  fi
  touch "$VENV/.installing"
  install_torch
  say "Installing the extra $extra and what it needs; the log is $VENV/install.log"
  run_pip install --editable "$ROOT[$extra]"
  printf '%s' "$wanted" >"$VENV/.installed-$extra"
  rm "$VENV/.installing"
  exec 9>&-
}

# The CPU build of torch where its index can be reached: the default build brings gigabytes of CUDA libraries.
install_torch() {
  local requirement
  requirement=$(grep -oE 'torch==[0-9.]+' "$ROOT/pyproject.toml" | head -n 1)
  if "$VENV/bin/python" -c 'import torch' 2>/dev/null; then return; fi
  say "Installing $requirement (CPU build where it can be had)"
  if curl --silent --fail --head --max-time 5 --output /dev/null "$TORCH_CPU_INDEX/torch/" 2>/dev/null; then
    run_pip install "$requirement" --index-url "$TORCH_CPU_INDEX"
  else
    run_pip install "$requirement"
  fi
}

# pip with its output in a log, a line of progress every few seconds, and the end of the log if it fails
run_pip() {
  local log=$VENV/install.log pid start=$SECONDS
  "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if [ $(((SECONDS - start) % 10)) -eq 9 ]; then
      say "  $((SECONDS - start)) s: $(tail -n 1 "$log" | cut -c 1-90)"
    fi
  done
  if ! wait "$pid"; then
    say "pip failed; the end of $log:"
    tail -n 15 "$log" >&2
    exit 1
  fi
}
