"""The failure of a command: one line on stderr and an exit status."""

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class CommandError(Exception):
    """Ends the command; the message is printed as one line."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
