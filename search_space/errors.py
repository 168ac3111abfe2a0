"""Errors that a user can act on."""

from __future__ import annotations


class UserError(ValueError):
    """The request cannot be served: bad input, or nothing feasible.

    The message says what was asked, what was found and what to do. The command line shows it once,
    without a traceback, and exits with 2.
    """


class JobError(UserError):
    """A job file that cannot be used; the message names the line."""
