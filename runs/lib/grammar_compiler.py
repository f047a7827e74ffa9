"""Reads a grammar of llguidance on stdin, compiles it within limits, and prints what is wrong with it, if anything."""

import os
import sys

import llguidance

# Seconds of the processor, bytes of memory, bytes of the stack (less than the threads of a server have), bytes of a
# core dump.
LIMITS = {"CPU": 1, "AS": 1 << 30, "STACK": 1 << 20, "CORE": 0}


def limit_process() -> None:
    """Sets each of LIMITS that the system has, and gives way to other processes."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in LIMITS.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (ValueError, OSError):  # macOS lacks some; or the limit is lower already
            pass
    os.nice(10)


def main() -> None:
    limit_process()
    grammar = sys.stdin.buffer.read().decode()  # whatever encoding the locale has
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_logit_bias()
    sys.stdout.buffer.write(matcher.get_error().encode())


if __name__ == "__main__":
    main()
