"""The kinds of devices that Oscine has ops for: a record each, in a file of its own."""
