"""The `kerneltune` command: one Typer command per file; every failure becomes one line and an exit code.

Exit codes: 0 done, 1 a check failed, 2 bad usage or input, 3 needs a GPU (or a recording) that is not there,
70 an error in kerneltune itself, 130 interrupted. A file here parses, calls and prints; what it needs is imported
inside its function, so that `--help` loads neither torch nor the tuner.
"""

from __future__ import annotations

import importlib
import keyword
import os
import sys
import warnings
from collections.abc import Sequence

import typer

from kerneltune import __version__
from kerneltune.errors import BAD_INPUT, INTERRUPTED, UserError

COMMANDS = (
    *("search", "record", "spaces", "ceilings", "compile", "warmup", "simulate", "report"),
    *("export", "import", "lookup", "check", "diff", "merge", "revalidate"),
)

INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h

# Typer exports only this leaf of Click's errors (from its own copy of Click since 0.26): its second base is the common
# one, which has `format_message()` and `exit_code`.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]


def build_app() -> typer.Typer:
    """The application with every command registered."""
    app = typer.Typer(
        name="kerneltune",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    @app.callback(invoke_without_command=True)
    def kerneltune(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
        debug: bool = typer.Option(False, "--debug", help="On an error, print the traceback too."),
    ) -> None:
        """Tune MLA decode and fused MoE kernels on your GPU, judge them by its roofline, ship the table.

        Example: kerneltune search mla-decode --model deepseek-v3 --tp 8
        """
        if version:
            print(f"kerneltune {__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())

    for name in COMMANDS:
        module = f"{name}_" if keyword.iskeyword(name) else name
        importlib.import_module(f"kerneltune.cli.{module}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed by the caller (`>&-`)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
    debug = "--debug" in given
    sys.exit(_run(_fill_in_replay([argument for argument in given if argument != "--debug"]), debug))


def _fill_in_replay(arguments: list[str]) -> list[str]:
    """`--replay` may stand without a value, which Typer cannot say: then it means the shipped recordings."""
    filled = []
    for position, argument in enumerate(arguments):
        filled.append(argument)
        following = arguments[position + 1 : position + 2]
        if argument == "--replay" and (not following or following[0].startswith("-")):
            filled.append("shipped")
    return filled


def _run(arguments: list[str], debug: bool) -> int:
    warnings.showwarning = _warn
    try:
        command = typer.main.get_command(build_app())
        result = command.main(arguments, prog_name="kerneltune", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
        if code == INTERRUPTED:  # newer Typers turn Ctrl-C into this code
            return _fail("interrupted", INTERRUPTED)
        return code
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # `| head` has read enough; keep the interpreter's last flush from failing too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as error:
        _trace(debug)
        return _fail(str(error), error.exit_code)
    except UsageProblem as error:
        _trace(debug)
        return _fail(_usage(error), BAD_INPUT)
    except (ValueError, OSError) as error:  # a bad workload, named by its kernel; a file or folder that cannot be used
        _trace(debug)
        return _fail(str(error), BAD_INPUT)
    except Exception as error:
        _trace(debug)
        advice = "" if debug else "; --debug prints where"
        return _fail(f"{type(error).__name__}: {error} (this is a fault of kerneltune{advice})", INTERNAL_ERROR)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, without the place in our code that gave it."""
    print(f"warning: {message}", file=sys.stderr)


def _usage(error: BaseException) -> str:
    """Click's message, with the command whose --help says more."""
    message = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    message = message.rstrip(".")
    return f"{message}; see `{context.command_path} --help`." if context else message


def _fail(message: str, code: int) -> int:
    """Print one line on stderr, whatever the message holds, and return the code."""
    line = " ".join(message.split()) or "unknown error"
    print(line if code == INTERRUPTED else f"error: {line}", file=sys.stderr, flush=True)
    return code


def _trace(debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()
