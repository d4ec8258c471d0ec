"""The one exception that reaches a user as a line of text instead of a traceback."""


class UserError(Exception):
    """Something a user can put right.

    The message is one or two lines: it names the file or key, says what is wrong with it, and gives the remedy.

    Args:
        message: What is printed after ``error: ``.
        status: Exit status of the process: 2 for wrong usage, config or checkpoint; 1 for a fault of input or machine.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status
