"""A home for processes of a user who has none, as in some containers."""

import os


def give_home() -> None:
    """Lets HOME be a folder in the temporary folder if neither it nor the password file names an absolute path.

    Else this and other libraries would make a folder named `~` in the working directory. Raises OSError.
    """
    if not os.environ.get("HOME"):
        os.environ.pop("HOME", None)  # so that the password file counts
    if not os.path.isabs(os.path.expanduser("~")):
        from oscine.system.owned_folder import temporary_home

        os.environ["HOME"] = str(temporary_home())
