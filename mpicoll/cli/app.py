"""The command `mpicoll` and its sub-commands."""

from __future__ import annotations

from importlib import import_module

import click

from mpicoll._version import __version__

#: Sub-commands in the order of --help; each is a click command in its module.
COMMANDS = ("demo", "explain", "bench", "tune", "simulate", "validate", "doctor", "trace")


class App(click.Group):
    """Loads a sub-command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the sub-command, or None."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"mpicoll.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command; name the known ones if there is none."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}; known: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=App, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="mpicoll")
def app() -> None:
    """Hand-written MPI collectives: see, prove, time and check them.

    Every command works alone and under mpiexec or srun; rank 0 prints.

    \b
      mpicoll demo allreduce                  what each rank holds, before and after
      mpicoll explain allreduce -n 8          who sends what to whom, and what it costs
      mpiexec -n 8 mpicoll bench allreduce    time it against the MPI's own
      mpiexec -n 8 mpicoll tune               measure what is fastest, for MPICOLL_TUNING
      mpicoll simulate allreduce -n 131072    predict times on a machine you do not have
      mpiexec -n 8 mpicoll validate           is everything right on this machine?
      mpiexec -n 8 mpicoll doctor             what is this machine?
      mpicoll doctor --flight mpicoll-flight  who hangs?
      mpicoll trace DIR                       who waited for whom, from MPICOLL_TRACE=DIR
    """
