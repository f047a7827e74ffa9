# Sourced by launch.sh and multi_node.sh.
#
# `repeat_error COMMAND...` runs torchrun. If a process failed, its error message stands somewhere above torchrun's
# report; it is repeated as the last line. SIGTERM goes on to torchrun.
repeat_error() {
  local log code=0 child tee message
  log=$(mktemp)
  exec 9> >(exec tee "$log" >&2)
  tee=$!
  "$@" 2>&9 9>&- &
  child=$!
  trap 'kill -TERM "$child" 2>/dev/null' TERM
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal has interrupted the wait
    code=0
    wait "$child" || code=$?
  done
  trap - TERM
  exec 9>&-
  wait "$tee" 2>/dev/null || true
  message=$(grep '^error: ' "$log" | grep -v -m 1 'please report what follows') || true # what follows is a traceback
  if ((code)) && [[ -n $message && $(tail -n 1 "$log") != "$message" ]]; then
    echo "$message" >&2
  fi
  rm -f "$log"
  return "$code"
}
