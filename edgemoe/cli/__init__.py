"""The `edgemoe` command: one module per verb, each thin (parse, call, print).

Verb modules import nothing heavy at the top: `edgemoe --help` must answer at once. This one imports nothing at all
before it is ready for Ctrl-C.
"""

import os
import sys

INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

_FULL = ("ENOSPC", "EDQUOT", "EFBIG", "EIO")
_interrupts: list[int] = []  # SIGINTs that have arrived


def main() -> None:
    """Run the command line: a `UserError`, or an output that is full, is one line on stderr and exit code 2, Ctrl-C is
    exit code 130."""
    import signal

    _interrupts.clear()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _fill_in()
        sys.exit(_code())
    except KeyboardInterrupt:
        _say_interrupted()
    except BrokenPipeError:  # whoever read the output has had enough
        _drop_output()
        sys.exit(BROKEN_PIPE)
    except Exception:
        # What Ctrl-C raised may arrive as something else: an import cut short, a buffer still in use.
        if not _interrupts:
            raise
        _say_interrupted()
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _fill_in() -> None:
    """Put the null device where a standard stream was closed: no other file may get its number, and be written to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def _interrupt(number: int, _: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _say_interrupted() -> None:
    _say("interrupted")
    sys.exit(INTERRUPTED)


def _say(line: str) -> None:
    from contextlib import suppress

    with suppress(OSError):  # standard error may be what is full
        print("edgemoe:", line, file=sys.stderr, flush=True)  # noqa: T201


def _drop_output() -> None:
    """What is still in the buffer cannot be written either: let the end of the program not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code() -> int:
    from errno import errorcode

    from edgemoe.cli.commands import run
    from edgemoe.errors import UserError

    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()  # here, where a closed pipe can still be answered
    except UserError as error:
        if _interrupts:
            raise
        _say(" ".join(str(error).splitlines()))
        code = 2
    except OSError as error:
        if _interrupts or errorcode.get(error.errno or 0) not in _FULL:
            raise
        _say(f"{error.filename or _full_output()}: cannot be written ({error.strerror})")
        code = 2
    return code


def _full_output() -> str:
    """Which output it is that could not be written: it still cannot."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return "standard output"
    return "the output"
