"""The `edgemoe` command: one module per verb, each thin (parse, call, print).

Verb modules import nothing heavy at the top: `edgemoe --help` must answer at once. This one imports nothing at all
before it is ready for Ctrl-C.
"""

import os
import sys

INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

_interrupts: list[int] = []  # SIGINTs that have arrived


def main() -> None:
    """Run the command line: a `UserError` is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    import signal

    _interrupts.clear()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        sys.exit(_code())
    except KeyboardInterrupt:
        _say_interrupted()
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except Exception:
        # What Ctrl-C raised may arrive as something else: an import cut short, a buffer still in use.
        if not _interrupts:
            raise
        _say_interrupted()
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _interrupt(number: int, _: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _say_interrupted() -> None:
    print("edgemoe: interrupted", file=sys.stderr)  # noqa: T201
    sys.exit(INTERRUPTED)


def _code() -> int:
    from edgemoe.cli.commands import run
    from edgemoe.errors import UserError

    try:
        code = run(sys.argv[1:])
    except UserError as error:
        if _interrupts:
            raise
        print("edgemoe:", " ".join(str(error).splitlines()), file=sys.stderr)  # noqa: T201
        code = 2
    sys.stdout.flush()  # here, where a closed pipe can still be answered
    return code
