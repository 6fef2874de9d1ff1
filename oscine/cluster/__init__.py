"""Holds names that users have in files; see the modules. They will go with the next release."""
