"""What Oscine asks of the operating system, and the rules by which it reads and writes files."""
