"""The ways a command of sinklab ends badly, each with its exit status."""


class SinklabError(Exception):
    """The work could not be finished (exit status 1). The message says what happened and what to do.

    Attributes:
        said_elsewhere: another process of the same command has the same error and tells the user.
    """

    exit_status = 1
    said_elsewhere = False


class InputError(SinklabError, ValueError):
    """What the user gave cannot be used (exit status 2). The message says what is wrong, where, what is right."""

    exit_status = 2


class LostProcessError(SinklabError):
    """One of several processes is gone or has failed (exit status 1)."""
